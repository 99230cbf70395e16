"""Streams of server-sent events, as tests read them."""

from __future__ import annotations

import json
from typing import Any

from script_server import ScriptServer


def events_of(text: str) -> list[tuple[str | None, Any]]:
    """(name, data) of each event of a whole stream, comments left out, and nothing behind the last."""
    assert text.endswith("\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = [line.split(": ", 1) for line in block.split("\n") if not line.startswith(":")]
        if fields:
            named = dict(fields)
            found.append((named.get("event"), json.loads(named["data"])))
    return found


def events(server: ScriptServer, path: str, body: Any) -> list[tuple[str | None, Any]]:
    return events_of(server.raw_stream(path, body))


def data(server: ScriptServer, path: str, body: Any) -> list[Any]:
    """Of events without names."""
    found = events(server, path, body)
    assert {name for name, _ in found} == {None}
    return [value for _, value in found]
