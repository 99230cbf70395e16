"""From the engine's thread to the event loop: several replies of one request, in turn as the queue has room."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from other_threads import PATIENCE

from mlxcel.core.events import Delta, Ended, Started
from mlxcel.core.outbox import Outbox
from mlxcel.core.reply import Reply
from mlxcel.errors import QueueFull, ShuttingDown
from mlxcel.server.bridge import Replies, hang_up


class Served:
    """A model whose queue and whose replies are up to the test. `submitted` are the prompts it took, by their names."""

    def __init__(self, room: int) -> None:
        self.places = room
        self.refuses: Exception | None = None
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.boxes: dict[str, Outbox] = {}

    @property
    def room(self) -> bool:
        return self.places > 0

    def submit(self, prompt: Any) -> Reply:
        if self.refuses is not None:
            raise self.refuses
        if not self.room:
            raise QueueFull(1, 1)
        self.places -= 1
        self.submitted.append(prompt)
        box = self.boxes[prompt] = Outbox(1)
        return Reply(prompt, 1, box, lambda: self.cancelled.append(prompt))

    def end(self, prompt: str) -> None:
        self.places += 1
        self.boxes[prompt].end(Ended(0, None))  # type: ignore[arg-type]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


def test_prompts_are_submitted_as_earlier_ones_end() -> None:
    async def main() -> None:
        served = Served(room=2)
        replies = Replies(served, ["a", "b", "c", "d"])  # type: ignore[arg-type, list-item]
        assert served.submitted == ["a", "b"]
        heard = []

        async def read() -> None:
            async for prompt, event in replies.events():
                heard.append((prompt, type(event)))

        reading = asyncio.create_task(read())
        for prompt, submitted in (("b", "abc"), ("c", "abcd"), ("a", "abcd"), ("d", "abcd")):
            served.boxes[prompt].put(Started(0))
            served.boxes[prompt].put(Delta(0, "x"))
            threading.Thread(target=served.end, args=[prompt]).start()
            while ("abcd".index(prompt), Ended) not in heard or "".join(served.submitted) != submitted:
                await asyncio.sleep(0)
        await reading
        for prompt in range(4):
            assert [kind for place, kind in heard if place == prompt] == [Started, Delta, Ended]

    run(main)


def test_a_reply_that_ends_while_its_events_are_being_sent_has_ended() -> None:
    """3.6: a client that reads slowly holds the reader up in the middle of it, wherever that is."""

    async def main() -> None:
        for held_up_at in (Started, Delta, Ended):
            served = Served(room=1)
            replies, heard = Replies(served, ["a"]), []  # type: ignore[arg-type, list-item]
            served.boxes["a"].put(Started(0))
            async for _, event in replies.events():
                heard.append(type(event))
                if heard == [Started]:
                    served.boxes["a"].put(Delta(0, "x"))
                elif heard == [Started, Delta]:
                    served.end("a")
                if isinstance(event, held_up_at):
                    for _ in range(3):
                        await asyncio.sleep(0)
            assert heard == [Started, Delta, Ended]

    run(main)


def test_the_first_refusal_is_raised_and_nothing_runs() -> None:
    async def main() -> None:
        served = Served(room=0)
        with pytest.raises(QueueFull):
            Replies(served, ["a", "b"])  # type: ignore[arg-type, list-item]
        assert served.submitted == []

    run(main)


def test_a_prompt_waits_for_room_though_none_of_its_request_runs() -> None:
    """Others may have filled the queue meanwhile: the request was taken, and is not refused half way."""

    async def main() -> None:
        served = Served(room=1)
        replies = Replies(served, ["a", "b"])  # type: ignore[arg-type, list-item]
        served.end("a")
        served.places = 0
        loop = asyncio.get_running_loop()

        def free() -> None:
            served.places = 1

        def finish() -> None:
            if "b" in served.boxes:
                served.end("b")
            else:
                loop.call_later(0.01, finish)

        loop.call_later(0.01, free)
        loop.call_later(0.02, finish)
        heard = [prompt async for prompt, _ in replies.events()]
        assert (heard, served.submitted) == ([0, 1], ["a", "b"])

    run(main)


def test_a_later_refusal_ends_the_reading() -> None:
    async def main() -> None:
        served = Served(room=1)
        replies = Replies(served, ["a", "b"])  # type: ignore[arg-type, list-item]
        served.refuses = ShuttingDown("over")
        served.end("a")
        with pytest.raises(ShuttingDown):
            _ = [event async for event in replies.events()]

    run(main)


def test_cancelling_ends_what_runs_and_begins_nothing_else() -> None:
    async def main() -> None:
        served = Served(room=2)
        replies = Replies(served, ["a", "b", "c"])  # type: ignore[arg-type, list-item]
        replies.cancel()
        replies.cancel()
        assert sorted(served.cancelled) == ["a", "a", "b", "b"]
        served.end("a")
        served.end("b")
        assert len([event async for event in replies.events()]) == 2
        assert served.submitted == ["a", "b"]

    run(main)


def test_a_loop_that_is_closed_is_a_client_that_left() -> None:
    """The engine's thread learns of it from `put`, which says that nobody keeps up."""
    served = Served(room=1)

    async def main() -> None:
        Replies(served, ["a"])  # type: ignore[arg-type, list-item]
        assert served.boxes["a"].put(Started(0))

    run(main)
    assert not served.boxes["a"].put(Delta(0, "x"))


def test_a_block_is_left_by_whoever_goes_first() -> None:
    """`leave` is called on a hang-up and when the block fails, and not when it ends well; nothing stays behind."""

    async def main() -> None:
        gone, calls = asyncio.Event(), []

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async with hang_up(receive, lambda: calls.append("well")):
            await asyncio.sleep(0)
        assert calls == []
        with pytest.raises(ValueError, match="broken"):
            async with hang_up(receive, lambda: calls.append("broken")):
                raise ValueError("broken")
        gone.set()
        async with hang_up(receive, lambda: calls.append("hung up")):
            while "hung up" not in calls:
                await asyncio.sleep(0)
        assert calls == ["broken", "hung up"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main)


def test_what_runs_is_ended_when_the_rest_of_its_request_is_refused() -> None:
    """No reply is left to nobody, not even while the request is still being handed over."""

    async def main() -> None:
        served = Served(room=3)
        submit = served.submit

        def refusing(prompt: Any) -> Reply:
            if prompt == "b":
                raise ShuttingDown("now")
            return submit(prompt)

        served.submit = refusing  # type: ignore[method-assign]
        with pytest.raises(ShuttingDown):
            Replies(served, ["a", "b", "c"])  # type: ignore[arg-type, list-item]
        assert (served.submitted, served.cancelled) == (["a"], ["a"])

    run(main)
