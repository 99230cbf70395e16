"""Server-sent events: replies that leave piece by piece (docs/spec/clients.md 3.6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from mlxcel.server.bridge import hang_up
from mlxcel.server.json_out import dumps

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"

PAUSE: Final = b""
"""The frame that says that none will come for now."""

TOGETHER: Final = 1 << 16
"""Bytes of frames from which on they are not held back for more."""

BURST: Final = 3
"""Times that something is sent without a wait. Then others have their turn, and it is heard whether the client is
still there."""

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Frames = AsyncGenerator[bytes, None]


def data(value: Any) -> bytes:
    """One event without a name. Encoded JSON has no line break."""
    return b"data: " + dumps(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One event of Anthropic's: its name is the value's `type`."""
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


class EventStream:
    """A reply of frames, sent as they come: those that are there at once, up to the next PAUSE, together. The status
    and the headers leave before the first one.

    While none comes, `idle` is sent every `ping` seconds; never with a `ping` of 0 or less. Once the client is gone
    `leave` is called and nothing more is sent; the frames end by themselves then, and are closed whatever happens.
    `clock` and `sleep` are the time that pings go by.
    """

    def __init__(
        self,
        frames: Frames,
        ping: float,
        *,
        leave: Callable[[], None],
        idle: bytes = KEEP_ALIVE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._frames, self._ping, self._leave, self._idle = frames, ping, leave, idle
        self._clock, self._sleep = clock, sleep
        self._sent = 0.0
        self._sends = 0
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with hang_up(receive, self._left):
            pinging: asyncio.Task[None] | None = None
            try:
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                await self._send(send, b"")  # a server keeps the headers back until there is a body
                if self._ping > 0:
                    pinging = asyncio.create_task(self._keep_alive(send))
                held = b""
                async for frame in self._frames:
                    held += frame
                    if held and (frame == PAUSE or len(held) >= TOGETHER):
                        together, held = held, b""
                        await self._send(send, together)
                if held:
                    await self._send(send, held)
            finally:
                if pinging is not None:
                    pinging.cancel()
                    with suppress(asyncio.CancelledError, OSError):
                        await pinging
                await self._frames.aclose()
            if not self._gone:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _left(self) -> None:
        self._gone = True
        self._leave()

    async def _send(self, send: Send, body: bytes) -> None:
        if self._gone:
            return
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._sent = self._clock()
        self._sends += 1
        if self._sends % BURST == 0:
            await asyncio.sleep(0)

    async def _keep_alive(self, send: Send) -> None:
        while not self._gone:
            wait = self._sent + self._ping - self._clock()
            if wait > 0:
                await self._sleep(wait)
            else:
                await self._send(send, self._idle)
