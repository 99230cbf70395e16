"""Streams of replies as a client reads them from a socket, several ways: eagerly, slowly, and not to the end."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import attrs

Address = tuple[str, int]
NOW: Callable[[], float] = time.perf_counter


@attrs.define
class Said:
    """What came of a reply: text by choice, and whether it came to its end."""

    text: dict[int, str] = attrs.field(factory=lambda: defaultdict(str))
    whole: bool = False
    status: int = 0
    fault: str | None = None

    def hear(self, line: bytes) -> None:
        """A line of the body."""
        if not line.startswith(b"data: "):
            return
        if line.startswith(b"data: [DONE]"):
            self.whole = True
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.fault = json.dumps(event["error"])
        elif "choices" in event:  # OpenAI's
            for choice in event["choices"]:
                self.text[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        elif "content" in event:  # the native route's
            self.text[event["index"]] += event["content"]
            self.whole = event["stop"]
        else:  # Anthropic's
            self.text[0] += event.get("delta", {}).get("text", "")
            self.whole = event["type"] == "message_stop"


@attrs.define
class Heard:
    """When a reply's first and last pieces came, in seconds."""

    first: float = 0.0
    last: float = 0.0


async def stream(
    address: Address,
    path: str,
    body: Any,
    *,
    pause: float = 0.0,
    leave_after: float | None = None,
    abrupt: bool = False,
) -> Said:
    """The reply to a body. With a `pause` little is read at a time and so many seconds go by between two lines. After
    `leave_after` seconds the client is gone, `abrupt` with a reset."""
    said = Said()
    sock = socket.socket()
    if pause:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    if abrupt:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(posted(path, {**body, "stream": True}))
    try:
        async with asyncio.timeout(leave_after):
            said.status = int((await reader.readline()).split()[1])
            while line := await reader.readline():
                said.hear(line)
                if pause:
                    await asyncio.sleep(pause)
    except TimeoutError:
        pass
    finally:
        writer.close()
    return said


async def listen(address: Address, path: str, body: Any) -> Heard:
    """Moments of the pieces of an OpenAI stream, which are not decoded. RuntimeError unless it ends as it should."""
    heard = Heard()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(posted(path, body))
    read = end = b""
    while read := await reader.read(1 << 16):
        end = (end + read)[-64:]
        if heard.first or b"data: " in read:
            heard.last = NOW()
            heard.first = heard.first or heard.last
    writer.close()
    if b"data: [DONE]" not in end:
        raise RuntimeError(f"a stream ended with {end!r}")
    return heard


def posted(path: str, body: Any) -> bytes:
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent


async def get(address: Address, path: str, body: Any = None) -> Any:
    """JSON of a short request, or text where it is none. RuntimeError."""
    reader, writer = await asyncio.open_connection(*address)
    asked = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    writer.write(asked if body is None else posted(path, body))
    reply = await reader.read()
    writer.close()
    start, _, text = reply.partition(b"\r\n\r\n")
    if start.split()[1] != b"200":
        raise RuntimeError(f"{path}: {reply!r}")
    return json.loads(text) if b"application/json" in start else text.decode()
