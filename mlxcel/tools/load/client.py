"""One request over a connection of its own, and what came of it.

It costs little, and what it costs is the same for each event: bytes are taken apart where the event loop hands them in,
and all that came in one read has one moment.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

from mlxcel.remote_http import Address
from mlxcel.tools.load.reply import Reply, said
from mlxcel.tools.load.wire import EventReader, ReplyReader, WireFault

MOST_ERROR: Final = 1 << 16
"""Bytes of an error's body that are read."""


def request_bytes(address: Address, route: str, headers: tuple[tuple[str, str], ...], body: Mapping[str, Any]) -> bytes:
    """A POST, whole."""
    sent = json.dumps(body).encode()
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"POST {address.path}{route} HTTP/1.1",
        f"Host: {host}:{address.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(sent)}",
        "Accept: text/event-stream",
        "Connection: close",
    ]
    if address.key is not None:
        lines.append(f"Authorization: Bearer {address.key}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + sent


async def ask(address: Address, request: bytes, *, timeout: float) -> Reply:
    """Send it and hear its reply to the end; what went wrong is the reply's `fault`. A reply without one ended with
    [DONE]. The time of the connection counts: a server that lets clients wait for one has them wait."""
    loop = asyncio.get_running_loop()
    reply = Reply(sent=loop.time())
    over: asyncio.Future[None] = loop.create_future()
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(
                lambda: _Stream(request, reply, over), address.host, address.port, ssl=True if address.secure else None
            )
            try:
                await over
            finally:
                transport.abort()
    except TimeoutError:
        reply.fail(f"no end within {timeout:g} s")
    except (OSError, UnicodeError) as error:
        reply.fail(f"{address.url} cannot be reached: {error}")
    reply.ended = loop.time()
    return reply


@attrs.define
class _Stream(asyncio.Protocol):
    """Bytes of one connection into one reply; `over` is done when no more are wanted."""

    request: bytes
    reply: Reply
    over: asyncio.Future[None]
    _wire: ReplyReader = attrs.field(factory=ReplyReader)
    _events: EventReader = attrs.field(factory=EventReader)
    _error: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.over.done():
            return
        at = self.over.get_loop().time()
        try:
            body = self._wire.feed(data)
            self.reply.status = self._wire.status
            if self.reply.status in (0, 200):
                for event in self._events.feed(body):
                    self.reply.hear(event, at)
            else:
                self._error += body
        except WireFault as fault:
            self.reply.fail(str(fault))
        if self.reply.done or self.reply.fault or self._wire.complete or len(self._error) > MOST_ERROR:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        reply = self.reply
        if reply.status not in (0, 200):
            reply.fail(f"status {reply.status}: {_message(self._error)}")
        elif not reply.done:
            reply.fail("the stream ended without [DONE]" if reply.status else "the connection ended without a reply")
        if not self.over.done():
            self.over.set_result(None)


def _message(body: bytes) -> str:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace").strip()[:500]
    return said(told.get("error", told) if isinstance(told, Mapping) else told)
