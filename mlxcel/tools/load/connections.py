"""Connections to the server, used again as long as it keeps them, as other clients do.

What a chunk costs here is the same for each: bytes are taken apart where the event loop hands them in, and all that
came in one read has one moment.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from mlxcel.remote_http import Address
from mlxcel.tools.load.reply import Reply, said
from mlxcel.tools.load.wire import EventReader, ReplyReader, WireFault

MOST_ERROR: Final = 1 << 16
"""Bytes of an error's body that are read."""


class Connection(asyncio.Protocol):
    """One, with one request at a time. `free` gets it back once the reply is read to its last byte, where the server
    keeps it; `gone` hears that it has ended."""

    def __init__(self, free: Callable[[Connection], None], gone: Callable[[Connection], None]) -> None:
        self._free, self._gone = free, gone
        self._transport: asyncio.WriteTransport | None = None
        self._over: asyncio.Future[bool] | None = None
        self._begin(Reply())

    def _begin(self, reply: Reply) -> None:
        self._reply = reply
        self._wire, self._events = ReplyReader(), EventReader()
        self._error = b""
        self._silent = True

    def ask(self, request: bytes, reply: Reply) -> asyncio.Future[bool]:
        """Done once nothing more of the reply is wanted; whether nothing of it came at all. From then on the connection
        may be somebody else's."""
        assert self._transport is not None
        self._begin(reply)
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._over

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._over is None:
            self.close()  # nobody asked
            return
        self._silent = False
        reply, wanted = self._reply, not self._over.done()
        try:
            body = self._wire.feed(data)
            if wanted:
                self._hear(body, self._over.get_loop().time())
        except WireFault as fault:
            if not wanted:
                self.close()
                return
            reply.fail(str(fault))
        if wanted and (reply.done or reply.fault or self._wire.complete or len(self._error) > MOST_ERROR):
            self._finish()
        if self._over.done():
            self._settle()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()
        self._gone(self)

    def _hear(self, body: bytes, at: float) -> None:
        self._reply.status = self._wire.status
        if self._reply.status in (0, 200):
            for event in self._events.feed(body):
                self._reply.hear(event, at)
        else:
            self._error += body

    def _finish(self) -> None:
        if self._over is None or self._over.done():
            return
        reply = self._reply
        if reply.status not in (0, 200):
            reply.fail(f"status {reply.status}: {_message(self._error)}")
        elif not reply.done:
            reply.fail("the stream ended without [DONE]" if reply.status else "the connection ended without a reply")
        self._over.set_result(self._silent)

    def _settle(self) -> None:
        """Behind [DONE] the last bytes of the body may still come."""
        if self._wire.keeps and self._wire.complete:
            self._over = None
            self._free(self)
        elif not self._wire.keeps or not self._reply.done:
            self.close()


class Connections:
    """Of one event loop, to one server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._trust: ssl.SSLContext | None = None
        self._peer: tuple[str, int] | None = None  # where the name led to: it is looked up once

    async def take(self) -> tuple[Connection, bool]:
        """One that nobody uses, and whether it was kept from before. OSError, UnicodeError."""
        if self._idle:
            return self._idle.pop(), True
        address = self.address
        host, port = self._peer or (address.host, address.port)
        if address.secure and self._trust is None:
            self._trust = ssl.create_default_context()
        transport, made = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._idle.append, self._forget),
            host,
            port,
            ssl=self._trust,
            server_hostname=address.host if address.secure else None,
        )
        self._open.add(made)
        peer = transport.get_extra_info("peername")
        if peer is not None:
            self._peer = peer[:2]
        return made, False

    def close(self) -> None:
        for connection in [*self._open]:
            connection.close()

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)


def _message(body: bytes) -> str:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace").strip()[:500]
    return said(told.get("error", told) if isinstance(told, Mapping) else told)
