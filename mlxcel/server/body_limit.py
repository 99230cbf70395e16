"""No header block and no body is taken beyond its bound (docs/spec/clients.md 3.5)."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcel.server.errors import error_response, shape_of
from mlxcel.server.refusals import BodyTooLarge, HeadersTooLarge, Refusal

HEADERS: Final = 16 << 10
"""Bytes of names and values."""


class BodyLimit:
    """Refuses by the length that is stated; where none is, `receive` raises BodyTooLarge at the byte too many."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADERS:
            await self._refuse(HeadersTooLarge(HEADERS), scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > self._limit:
            await self._refuse(BodyTooLarge(self._limit), scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise BodyTooLarge(self._limit)
            return message

        await self._app(scope, counted, send)

    async def _refuse(self, error: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error, shape_of(scope["path"]), scope["state"]["request_id"])(scope, receive, send)
