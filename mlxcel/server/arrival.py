"""A body arrives within its time, and none that nobody reads stays on the way (docs/spec/clients.md 3.5, 3.11)."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcel.server.refusals import BodyTooSlow

PATIENCE: Final = 30.0
"""Seconds that any body may take to arrive."""

SLOWEST: Final = 16 << 10
"""Bytes a second: what has arrived gives as much more time as it takes at this rate."""

LINGER: Final = 2.0
"""Seconds for which the rest of a body is waited for behind a reply that does without it: a client that sends on does
not read, and one whose connection is closed over what it sent may never see the reply."""


class Arrival:
    """A route that waits for a body gets BodyTooSlow once the time is over. What is left of a body when the last of a
    reply is sent is read and forgotten: hypercorn holds a connection for ever whose body fills its queue."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        dropping: asyncio.Task[None] | None = None

        async def answer(message: Message) -> None:
            nonlocal dropping
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and not body.whole:
                await send({**message, "more_body": True})
                dropping = asyncio.create_task(body.drop())
                await asyncio.wait([dropping], timeout=LINGER)
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._app(scope, body.receive, answer)
        finally:
            if dropping is not None:
                dropping.cancel()


class _Body:
    """What is still to come of a body. `whole` is whether that is nothing."""

    def __init__(self, receive: Receive) -> None:
        self.whole = False
        self._receive = receive
        self._read = 0
        self._begun = asyncio.get_running_loop().time()

    async def receive(self) -> Message:
        """The next message; behind a whole body the one that the client is gone. BodyTooSlow."""
        if self.whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._begun + PATIENCE + self._read / SLOWEST):
                return await self._next()
        except TimeoutError:
            raise BodyTooSlow(self._read, asyncio.get_running_loop().time() - self._begun) from None

    async def drop(self) -> None:
        """The rest, however long it takes."""
        while not self.whole:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)  # so it is when the client is gone
        return message


def _has_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    if not scope["http_version"].startswith("1"):
        return True  # where a body needs no header
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
