"""One reply through the scheduler, as a person watches it: text as it comes, and an end when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from mlxcel.core.events import Delta, Ended

if TYPE_CHECKING:
    from mlxcel.cli.reply_output import ReplyOutput
    from mlxcel.core.reply import Reply
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.core.result import RequestResult
    from mlxcel.core.scheduler import Scheduler

NEWS: Final = True
STOP: Final = False


class ReplyBell:
    """Wakes the thread that reads a reply. Its queue may be put to from a signal handler, which can take no lock."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bool] = SimpleQueue()

    def stop(self) -> None:
        """Ask for the end of the reply; heard too where none has begun."""
        self._queue.put(STOP)

    def wait(self) -> bool:
        """NEWS or STOP, whichever came first."""
        return self._queue.get()

    def listen(self, reply: Reply) -> None:
        reply.listen(self._news)

    def _news(self) -> None:
        self._queue.put(NEWS)


def answer(
    scheduler: Scheduler, spec: SequenceSpec, resolved: Resolved, bell: ReplyBell, output: ReplyOutput | None
) -> RequestResult:
    """Run one sequence to its end, or until `bell` says stop: then what was produced comes back with the cause
    `cancelled`. What `output` writes is the text of the result. A fault of the row is in `result.error`.

    Raises what `Scheduler.submit` does; what writing raises ends the sequence.
    """
    from mlxcel.core.request import Request

    reply = scheduler.submit(Request((spec,), origin=resolved.origin, warnings=resolved.warnings))
    try:
        bell.listen(reply)
        while True:
            if bell.wait() is STOP:
                reply.cancel()
            if (result := _read(reply, output)) is not None:
                return result
    finally:
        reply.cancel()


def _read(reply: Reply, output: ReplyOutput | None) -> RequestResult | None:
    """All events that are there; the result once it ended."""
    while (event := reply.get(0)) is not None:
        if isinstance(event, Ended):
            return event.result
        if isinstance(event, Delta) and output is not None:
            _write(output.reasoning, event.reasoning)
            _write(output.text, event.text)
    return None


def _write(write: Callable[[str], None], text: str) -> None:
    if text:
        write(text)
