"""What a chunk costs the generator itself: its processor time for a stream of a stub on this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Final

from mlxcel.errors import ServerError
from mlxcel.remote_http import Address
from mlxcel.tools.load.client import ask, request_bytes
from mlxcel.tools.load.connections import Connections

CHUNKS: Final = 200
PAUSE: Final = 0.0005
"""Seconds between two chunks, so that each is read by itself, as those of a server are."""

LIMIT: Final = 60.0
"""Seconds."""


def own_cost() -> float:
    """Seconds of this thread's processor time for a chunk, the wait for it included."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        bound.settimeout(LIMIT)
        stub = threading.Thread(target=_serve, args=(bound,), daemon=True)
        stub.start()
        address = Address(secure=False, host="127.0.0.1", port=bound.getsockname()[1], path="", key=None)
        try:
            return asyncio.run(_heard(address))
        finally:
            stub.join(LIMIT)


async def _heard(address: Address) -> float:
    request = request_bytes(address, "/", (), {})
    before = time.thread_time()
    connections = Connections(address)
    reply = await ask(connections, request, timeout=LIMIT)
    if reply.fault is not None:
        raise ServerError(f"this machine's own stub cannot be heard: {reply.fault}", hint="is loopback blocked?")
    spent = time.thread_time() - before
    connections.close()
    return spent / len(reply.times)


def _serve(bound: socket.socket) -> None:
    try:
        connection, _ = bound.accept()
        with connection:
            connection.settimeout(LIMIT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = _chunk(b"data: " + json.dumps(_EVENT).encode() + b"\n\n")
            for _ in range(CHUNKS):
                connection.sendall(chunk)
                time.sleep(PAUSE)
            connection.sendall(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    except OSError:
        return  # the client tells what it did not hear


def _chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


_EVENT: Final = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1700000000,
    "model": "stub",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    "usage": None,
}
"""An event such as servers send for a token."""
