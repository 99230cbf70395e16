"""What is said of a fault once a stream has begun, when there is no status left to say it with."""

from __future__ import annotations

import logging
from typing import Any

from mlxcel.errors import MlxcelError
from mlxcel.server.errors import Shape, error_body

log = logging.getLogger("mlxcel.server")


def told(error: Exception, shape: Shape, request_id: str) -> dict[str, Any]:
    """The object of the last event. A mistake of ours is logged."""
    if not isinstance(error, MlxcelError):
        log.error("request %s failed", request_id, exc_info=error)
    return error_body(error, shape, request_id)
