"""What a client holds of a request it submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlxcel.core.events import Ended, Event
from mlxcel.core.outbox import Outbox
from mlxcel.core.result import RequestResult


class Reply:
    """A request on its way. All methods may be called from any thread; events are for one reader.

    Iterating gives every event until the last choice ended, and waits for each.
    """

    def __init__(self, request_id: str, choices: int, outbox: Outbox, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.choices = choices
        self._outbox = outbox
        self._cancel = cancel

    @property
    def ended(self) -> bool:
        """Whether every choice ended and every event was read."""
        return self._outbox.ended

    @property
    def over(self) -> bool:
        """Whether every choice ended, read or not."""
        return self._outbox.over

    def get(self, timeout: float | None = None) -> Event | None:
        """The next event, None when none came in `timeout` seconds or none will come. 0 does not wait."""
        return self._outbox.get(timeout)

    def listen(self, listener: Callable[[], None]) -> None:
        """See `Outbox.listen`: for readers that must not block, such as an event loop."""
        self._outbox.listen(listener)

    def cancel(self) -> None:
        """End all choices that still run or wait, with cause `cancelled`. Harmless at any time, and again."""
        self._cancel()

    def __iter__(self) -> Iterator[Event]:
        while (event := self._outbox.get()) is not None:
            yield event

    def results(self) -> list[RequestResult]:
        """Wait for the end of all choices; their results by index. Events that were read before are not among them."""
        ended = [event for event in self if isinstance(event, Ended)]
        return [event.result for event in sorted(ended, key=lambda event: event.choice)]
