"""Streams of events: what goes out, when, and who hears of it when nobody reads on (docs/spec/clients.md 3.6)."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from other_threads import PATIENCE

from mlxcel.server.sse import BURST, DONE, KEEP_ALIVE, PAUSE, TOGETHER, EventStream, data, event


class Time:
    """A clock that stands still until a sleeper has nothing else to wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Wire:
    """The server's side of a connection."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:] if message["body"]]


def run(main: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main

    asyncio.run(bounded())


def test_events_are_lines_of_utf8_json() -> None:
    """H-A7: true UTF-8, and no line break inside an event."""
    assert data({"a": "é\n\u2028"}) == 'data: {"a":"é\\n\u2028"}\n\n'.encode()
    assert event("ping", {"type": "ping"}) == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_the_headers_leave_before_the_first_frame() -> None:
    """H-O11, H-A7: status, charset and an empty body are sent while the first frame is still to come."""

    async def main() -> None:
        wire, first = Wire(), asyncio.Event()

        async def frames() -> AsyncGenerator[bytes, None]:
            await first.wait()
            yield b"x"

        stream = EventStream(frames(), 0, leave=lambda: None)
        task = asyncio.create_task(stream({}, wire.receive, wire.send))
        while len(wire.sent) < 2:
            await asyncio.sleep(0)
        start, body = wire.sent
        assert dict(start["headers"]) == {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
        }
        assert body == {"type": "http.response.body", "body": b"", "more_body": True}
        first.set()
        await task
        assert wire.bodies == [b"x"]
        assert wire.sent[-1]["more_body"] is False

    run(main())


@pytest.mark.parametrize("ping", [15.0, 0.5])
def test_h_o11_comments_keep_a_silent_stream_alive(ping: float) -> None:
    """H-O11: one every interval while nothing is sent, by the clock that is given; none between frames."""

    async def main() -> None:
        wire, time, first = Wire(), Time(), asyncio.Event()

        async def frames() -> AsyncGenerator[bytes, None]:
            yield b"a"
            yield PAUSE
            await first.wait()
            yield b"b"

        stream = EventStream(frames(), ping, leave=lambda: None, clock=time.clock, sleep=time.sleep)
        task = asyncio.create_task(stream({}, wire.receive, wire.send))
        while wire.bodies.count(KEEP_ALIVE) < 3:
            await asyncio.sleep(0)
        first.set()
        await task
        assert time.sleeps[:3] == [ping] * 3
        assert wire.bodies[0] == b"a"
        assert wire.bodies[-1] == b"b"
        assert set(wire.bodies[1:-1]) == {KEEP_ALIVE}

    run(main())


def test_a_frame_puts_the_next_comment_off() -> None:
    async def main() -> None:
        wire, time = Wire(), Time()

        async def frames() -> AsyncGenerator[bytes, None]:
            yield b"a"
            yield PAUSE
            await asyncio.sleep(0)  # the pinger begins to wait
            time.now = 9.0
            yield b"b"
            yield PAUSE
            while KEEP_ALIVE not in wire.bodies:
                await asyncio.sleep(0)

        async def sleep(seconds: float) -> None:
            if len(time.sleeps) == 0:
                while time.now < 9.0:
                    await asyncio.sleep(0)
                time.now = 10.0
                time.sleeps.append(seconds)
            else:
                await time.sleep(seconds)

        await EventStream(frames(), 10, leave=lambda: None, clock=time.clock, sleep=sleep)({}, wire.receive, wire.send)
        assert time.sleeps[:2] == [10.0, 9.0]

    run(main())


@pytest.mark.parametrize("ping", [0, -1])
def test_pings_can_be_off(ping: float) -> None:
    async def main() -> None:
        wire = Wire()

        async def frames() -> AsyncGenerator[bytes, None]:
            for _ in range(50):
                await asyncio.sleep(0)
            yield DONE

        await EventStream(frames(), ping, leave=lambda: None, sleep=None)({}, wire.receive, wire.send)  # type: ignore[arg-type]
        assert wire.bodies == [DONE]

    run(main())


def test_a_client_that_leaves_is_told_at_once_and_the_frames_are_closed() -> None:
    """Nothing more is sent, no comment either, until the frames have ended by themselves."""

    async def main() -> None:
        wire, time, left, closed = Wire(), Time(), asyncio.Event(), []

        async def frames() -> AsyncGenerator[bytes, None]:
            try:
                yield b"a"
                yield PAUSE
                await left.wait()  # as replies do, which end by themselves once they are cancelled
                for _ in range(20):
                    await asyncio.sleep(0)
                yield b"b"
            finally:
                closed.append(True)

        stream = EventStream(frames(), 15, leave=left.set, clock=time.clock, sleep=time.sleep)
        task = asyncio.create_task(stream({}, wire.receive, wire.send))
        while not wire.bodies:
            await asyncio.sleep(0)
        wire.gone.set()
        await left.wait()
        sent = list(wire.bodies)
        await task
        assert wire.bodies == sent
        assert b"b" not in sent
        assert closed == [True]

    run(main())


def test_frames_that_are_there_at_once_leave_together() -> None:
    """Up to the next pause, or as many bytes as are held back for that; and whatever is left at the end."""

    async def main() -> None:
        wire = Wire()

        async def frames() -> AsyncGenerator[bytes, None]:
            for frame in (PAUSE, b"a", b"b", PAUSE, PAUSE, b"c", b"d" * TOGETHER, b"e", b"f"):
                yield frame

        await EventStream(frames(), 0, leave=lambda: None)({}, wire.receive, wire.send)
        assert wire.bodies == [b"ab", b"c" + b"d" * TOGETHER, b"ef"]

    run(main())


def test_a_client_that_leaves_in_a_burst_gets_no_more_than_its_rest() -> None:
    """3.6: nor does it get an end, where frames are there without waiting and sending does not wait either."""

    async def main() -> None:
        wire = Wire()

        async def frames() -> AsyncGenerator[bytes, None]:
            for number in range(50):
                if number == 10:
                    wire.gone.set()
                yield b"x"
                yield PAUSE

        await EventStream(frames(), 0, leave=lambda: None)({}, wire.receive, wire.send)
        assert 10 <= len(wire.bodies) <= 10 + BURST
        assert all(message["more_body"] for message in wire.sent[1:])

    run(main())


@pytest.mark.parametrize("fault", [OSError("gone"), asyncio.CancelledError()])
def test_a_reply_that_breaks_off_leaves_nothing_running(fault: BaseException) -> None:
    """A send that fails, and a host that ends the task: both leave."""

    async def main() -> None:
        wire, left, closed = Wire(), [], []

        async def send(message: Any) -> None:
            await wire.send(message)
            if message.get("body"):
                raise fault

        async def frames() -> AsyncGenerator[bytes, None]:
            try:
                yield b"a"
            finally:
                closed.append(True)

        with pytest.raises(type(fault)):
            await EventStream(frames(), 15, leave=lambda: left.append(True))({}, wire.receive, send)
        assert (left, closed) == ([True], [True])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
