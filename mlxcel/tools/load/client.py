"""One request, and what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from mlxcel.remote_http import Address
from mlxcel.tools.load.connections import Connections
from mlxcel.tools.load.reply import Reply


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
    ]
    if address.key is not None:
        lines.append(f"Authorization: Bearer {address.key}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + sent


async def ask(connections: Connections, request: bytes, *, timeout: float) -> Reply:
    """Send it and hear its reply to the end; what went wrong is the reply's `fault`. A reply without one ended with
    [DONE]. Where no connection is kept, the time that one takes counts: a server that lets clients wait for theirs has
    them wait."""
    loop = asyncio.get_running_loop()
    reply = Reply(sent=loop.time())
    try:
        async with asyncio.timeout(timeout):
            while await _silent(connections, request, reply):
                reply.fault = None  # the connection was closed as the request set out: no fault of the server's
    except TimeoutError:
        reply.fail(f"no end within {timeout:g} s")
    except (OSError, UnicodeError) as error:
        reply.fail(f"{connections.address.url} cannot be reached: {error}")
    reply.ended = loop.time()
    return reply


async def _silent(connections: Connections, request: bytes, reply: Reply) -> bool:
    """Whether a connection that was kept from before had nothing to say to the request."""
    connection, kept = await connections.take()
    over = connection.ask(request, reply)
    try:
        return await over and kept
    finally:
        if over.cancelled():
            connection.close()
