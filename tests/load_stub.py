"""A server that is a script, in the event loop of the client that it answers, whose clock goes by only where everybody
waits: times of a load are exact."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import attrs

from mlxcel.remote_http import Address
from mlxcel.tools.load.client import request_bytes
from mlxcel.tools.load.connections import Connections
from mlxcel.tools.load.measure import Load, run_load

T = TypeVar("T")

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ADDRESS = Address.parse("http://stub:80", None)


@attrs.frozen
class Cut:
    """The connection ends."""


@attrs.frozen
class Stall:
    """For so many seconds nothing runs in the whole process, the client included."""

    seconds: float


Act = bytes | Cut | Stall
Script = Sequence[tuple[float, Act]]
"""Seconds that go by, and what is done then."""


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(said: str, reason: str | None = None) -> bytes:
    """A chunk of /v1/completions."""
    return event({"choices": [{"index": 0, "text": said, "finish_reason": reason}], "usage": None})


def delta(fields: Any, reason: str | None = None) -> bytes:
    """A chunk of /v1/chat/completions."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    told: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": told})


def framed(script: Script) -> Script:
    """In chunks, behind which the connection stays."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [(pause, act if act == HEAD or not isinstance(act, bytes) else chunk(act)) for pause, act in script]
    return [(pause, head if act == HEAD else act) for pause, act in chunks] + [(0.0, b"0\r\n\r\n")]


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def reply(*gaps: float, prompt: int = 7, tokens: int | None = None, cached: int | None = None) -> Script:
    """A word after each gap, and a whole end at once behind the last."""
    words: list[tuple[float, Act]] = [(gap, text(" w")) for gap in gaps]
    end = text("", "length") + usage(prompt, len(gaps) if tokens is None else tokens, cached) + DONE
    return [(0.0, HEAD), *words, (0.0, end)]


def refusal(status: int, body: bytes) -> Script:
    return [(0.0, f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)]


@attrs.define
class Stub:
    """Request number n is answered by script n; `most` is how many it had at once. A script that is None takes no
    connection; `connections` counts those that were taken."""

    scripts: Sequence[Script | None]
    asked: list[bytes] = attrs.field(factory=list)
    now: int = 0
    most: int = 0
    connections: int = 0
    _next: int = 0

    def following(self) -> Script | None:
        self._next += 1
        return self.scripts[self._next - 1]

    def refuses(self) -> bool:
        """Whether the next request gets no connection; then it is over."""
        if refused := self.scripts[self._next] is None:
            self._next += 1
        return refused

    async def answer(self, script: Script, loop: Loop, protocol: asyncio.Protocol) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for pause, act in script:
                await asyncio.sleep(pause)
                if isinstance(act, Stall):
                    loop.now += act.seconds
                elif isinstance(act, Cut):
                    protocol.connection_lost(None)
                else:
                    protocol.data_received(act)
        finally:
            self.now -= 1


class Loop(asyncio.SelectorEventLoop):
    """`now` in seconds; a wait takes no time."""

    def __init__(self, stub: Stub) -> None:
        self.now = 0.0
        self._stub = stub
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    async def create_connection(self, factory: Callable[[], Any], *place: Any, **options: Any) -> Any:  # type: ignore[override]
        if self._stub.refuses():
            raise ConnectionRefusedError(111, "Connection refused")
        self._stub.connections += 1
        protocol = factory()
        transport = _Transport(self, self._stub, protocol)
        protocol.connection_made(transport)
        return transport, protocol


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for ever"
        self._loop.now += max(timeout, 0)
        return super().select(0)


class _Transport(asyncio.Transport):
    def __init__(self, loop: Loop, stub: Stub, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._stub, self._protocol = loop, stub, protocol
        self._tasks: list[asyncio.Task[None]] = []

    def write(self, data: Any) -> None:
        self._stub.asked.append(bytes(data))
        script = self._stub.following()
        assert script is not None
        self._tasks.append(self._loop.create_task(self._stub.answer(script, self._loop, self._protocol)))

    def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon(self._protocol.connection_lost, None)


def run(stub: Stub, main: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own, from second 0 on."""
    with asyncio.Runner(loop_factory=lambda: Loop(stub)) as runner:
        return runner.run(main)


async def loaded(plan: Sequence[float], **how: Any) -> Load:
    """Requests at moments of a plan, then nothing more."""
    connections = Connections(ADDRESS)
    try:
        return await run_load(connections, posts(len(plan)), plan, **how)
    finally:
        connections.close()


def posts(count: int) -> list[bytes]:
    return [request_bytes(ADDRESS, "/v1/completions", (), {"prompt": str(place)}) for place in range(count)]
