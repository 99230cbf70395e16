"""Which web pages may use the server (docs/spec/clients.md 3.7)."""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcel.server.settings import ServerSettings

LOOPBACK: Final = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
METHODS: Final = "GET, POST, OPTIONS, HEAD"
MAX_AGE: Final = "600"
EXPOSED: Final = "X-Request-Id, Retry-After"


class Cors:
    """Answers preflights, without asking for a key, and marks replies to pages of an origin that is allowed."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings

    def _allowed(self, origin: str) -> str | None:
        """The value of Access-Control-Allow-Origin."""
        origins = self._settings.allowed_origins
        if self._settings.any_origin:
            return "*"
        listed = LOOPBACK.fullmatch(origin) is not None if origins is None else origin in origins
        return origin if listed else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        origin = asked.get("origin")
        allowed = None if origin is None else self._allowed(origin)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if not self._settings.any_origin:
                    headers.add_vary_header("Origin")
                if allowed is not None:
                    headers["Access-Control-Allow-Origin"] = allowed
                    headers["Access-Control-Expose-Headers"] = EXPOSED
            await send(message)

        if scope["method"] == "OPTIONS" and origin is not None and "access-control-request-method" in asked:
            await self._preflight(asked, allowed is not None, answer)
        else:
            await self._app(scope, receive, answer)

    async def _preflight(self, asked: Headers, allowed: bool, send: Send) -> None:
        headers = MutableHeaders()
        if allowed:
            headers["Access-Control-Allow-Methods"] = METHODS
            headers["Access-Control-Max-Age"] = MAX_AGE
            if wanted := asked.get("access-control-request-headers"):
                headers["Access-Control-Allow-Headers"] = wanted
        await send({"type": "http.response.start", "status": 204, "headers": headers.raw})
        await send({"type": "http.response.body", "body": b""})
