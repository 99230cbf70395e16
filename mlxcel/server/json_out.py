"""JSON as the server writes it: UTF-8, no blanks, keys in the order they were put in; a float that is none is null."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def dumps(value: Any) -> bytes:
    return msgspec.json.encode(value)


class Json(Response):
    """A reply whose content is a value of plain data."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)
