"""Which web pages may use the server (docs/spec/clients.md 3.7).

A browser asks before it lets a page send JSON or a key to another origin, but not before a POST without a type: enough
to keep a model busy, or to empty its cache. And a page whose name its owner makes lead to this machine is, to the
browser, a page of this server. Keys keep both out; where there are none, `Origin` and `Sec-Fetch-Site` do.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcel.errors import shown
from mlxcel.server.errors import error_response, shape_of
from mlxcel.server.refusals import Forbidden
from mlxcel.server.settings import ServerSettings

LOOPBACK: Final = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
METHODS: Final = "GET, POST, OPTIONS, HEAD"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_AGE: Final = "600"
EXPOSED: Final = "X-Request-Id, Retry-After"


class Cors:
    """Answers preflights, without asking for a key, marks replies to pages of an origin that is allowed, and refuses
    what other pages would have done."""

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
        elif origin is not None and allowed is None and self._foreign(scope["method"], origin, asked):
            await _refuse(origin, scope, receive, answer)
        else:
            await self._app(scope, receive, answer)

    def _foreign(self, method: str, origin: str, asked: Headers) -> bool:
        """Whether a page of `origin`, which is not allowed, is none of this server's own either. Browsers tell by
        `Sec-Fetch-Site`, but not over plain http to other machines: there the page's address is the one that was asked,
        and on a server that only this machine reaches it is none but this machine's."""
        if method in SAFE or self._settings.api_keys:
            return False
        if (site := asked.get("sec-fetch-site")) is not None:
            return site not in ("same-origin", "none")
        host = asked.get("host", "")
        away = self._settings.loopback and LOOPBACK.fullmatch(f"http://{host}") is None
        return away or origin.partition("://")[2] != host

    async def _preflight(self, asked: Headers, allowed: bool, send: Send) -> None:
        headers = MutableHeaders()
        if allowed:
            headers["Access-Control-Allow-Methods"] = METHODS
            headers["Access-Control-Max-Age"] = MAX_AGE
            if wanted := asked.get("access-control-request-headers"):
                headers["Access-Control-Allow-Headers"] = wanted
        await send({"type": "http.response.start", "status": 204, "headers": headers.raw})
        await send({"type": "http.response.body", "body": b""})


async def _refuse(origin: str, scope: Scope, receive: Receive, send: Send) -> None:
    error = Forbidden(
        f"pages of {shown(origin)} may not use this server",
        hint="the flag --allowed-origins names others, and with keys a page only needs one",
    )
    await error_response(error, shape_of(scope["path"]), scope["state"]["request_id"])(scope, receive, send)
