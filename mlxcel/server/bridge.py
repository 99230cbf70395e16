"""Between the engine's thread and the event loop: the events of a request as they come, and its end when nobody is left
to hear them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from starlette.types import Receive

from mlxcel.core.events import Event
from mlxcel.core.reply import Reply

if TYPE_CHECKING:
    from mlxcel.gather import Prepared
    from mlxcel.server.served import ServedModel

LOOK: Final = 0.05
"""Seconds after which a prompt that waits, while none of its request runs, looks for room in the queue."""


class Replies:
    """The replies of one HTTP request, one a prompt. Later prompts wait here until there is room in the queue, which
    there is at the latest when earlier ones have ended: its bound is for requests. All methods are called on the event
    loop. What `ServedModel.submit` raises for the first prompt is raised here, before anything runs.
    """

    def __init__(self, served: ServedModel, prepared: Sequence[Prepared]) -> None:
        self._loop = asyncio.get_running_loop()
        self._served = served
        self._waiting = deque(enumerate(prepared))
        self._open: dict[int, Reply] = {}
        self._rung: dict[int, None] = {}  # replies that have something to say, in the order in which they said so
        self._woken = asyncio.Event()
        self._begin()
        try:
            self._feed()
        except BaseException:
            self.cancel()  # nobody will
            raise

    def cancel(self) -> None:
        """Nobody listens any more: what runs is ended, what waits is not begun."""
        self._waiting.clear()
        for reply in self._open.values():
            reply.cancel()

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(prompt, event) until every prompt's reply has ended. Raises what `submit` does for a later prompt."""
        async for heard in self.as_they_come():
            if heard is not None:
                yield heard

    async def as_they_come(self) -> AsyncIterator[tuple[int, Event] | None]:
        """As `events`, and None whenever there is nothing more for now."""
        while self._open or self._waiting:
            while self._rung:
                prompt = next(iter(self._rung))
                del self._rung[prompt]
                reply = self._open[prompt]
                while (event := reply.get(0)) is not None:
                    yield prompt, event
                if reply.ended:
                    del self._open[prompt]
                    self._rung.pop(prompt, None)  # it may have said so while its last events were being sent
            self._feed()
            if self._open and not self._rung:
                yield None
                await self._woken.wait()
                self._woken.clear()
            elif self._waiting and not self._open:
                yield None
                await asyncio.sleep(LOOK)

    def _feed(self) -> None:
        while self._waiting and self._served.room:
            self._begin()

    def _begin(self) -> None:
        prompt, prepared = self._waiting[0]
        reply = self._served.submit(prepared)
        self._waiting.popleft()
        self._open[prompt] = reply
        reply.listen(self._bell(prompt))

    def _bell(self, prompt: int) -> Callable[[], None]:
        """For the engine's thread, whenever there is something to read. Raises once the loop is closed: that is how the
        engine learns that nobody reads."""

        def ring() -> None:
            if prompt in self._open:
                self._rung[prompt] = None
                self._woken.set()

        def tell() -> None:
            self._loop.call_soon_threadsafe(ring)

        return tell


@asynccontextmanager
async def hang_up(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """While the block runs, `leave` is called as soon as the client is gone; and in any case when the block is left by
    an exception, such as the cancellation of its task."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    listening = asyncio.create_task(listen())
    try:
        yield
    except BaseException:
        leave()
        raise
    finally:
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
