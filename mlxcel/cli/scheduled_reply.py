"""One reply through the scheduler, as a person watches it: text as it comes, and an end when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from mlxcel.core.events import Delta, Ended
from mlxcel.core.plan import Piece

if TYPE_CHECKING:
    from mlxcel.cli.reply_output import ReplyOutput
    from mlxcel.core.plan import StepReport
    from mlxcel.core.reply import Reply
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.resolve_sampling import Resolved
    from mlxcel.core.result import RequestResult
    from mlxcel.core.scheduler import Scheduler
    from mlxcel.core.source import Progress

NEWS: Final = -1
STOP: Final = -2


class ReplyBell:
    """Wakes the thread that reads a reply. Its queue may be put to from a signal handler, which can take no lock.

    As an observer of the engine it tells how far the prompt is; there is one row.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[int] = SimpleQueue()

    def stop(self) -> None:
        """Ask for the end of the reply; heard too where none has begun."""
        self._queue.put(STOP)

    def wait(self) -> int:
        """NEWS, STOP, or how many tokens of the prompt are read, in the order in which they came."""
        return self._queue.get()

    def quiet(self) -> None:
        """Forget what was not waited for."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def listen(self, reply: Reply) -> None:
        reply.listen(self._news)

    def step_finished(self, report: StepReport) -> None:
        for part in report.parts:
            if isinstance(part, Piece):
                self._queue.put(part.plan.pieces[part.index].end)

    def request_finished(self, result: RequestResult) -> None:
        """The reply itself says that."""

    def _news(self) -> None:
        self._queue.put(NEWS)


def answer(
    scheduler: Scheduler,
    spec: SequenceSpec,
    resolved: Resolved,
    bell: ReplyBell,
    output: ReplyOutput | None,
    progress: Progress,
) -> RequestResult:
    """Run one sequence to its end, or until `bell` says stop: then what was produced comes back with the cause
    `cancelled`. What `output` writes is the text of the result. A fault of the row is in `result.error`. `progress` is
    of the prompt, and over with the first token.

    Raises what `Scheduler.submit` does; what writing raises ends the sequence.
    """
    from mlxcel.core.request import Request

    progress.start("prefill", len(spec.prompt_ids), "tokens")
    reply = scheduler.submit(Request((spec,), origin=resolved.origin, warnings=resolved.warnings))
    try:
        bell.listen(reply)
        while True:
            came = bell.wait()
            if came == STOP:
                reply.cancel()
            elif came >= 0:
                progress.advance(came)
            if (result := _read(reply, output, progress)) is not None:
                return result
    finally:
        progress.finish()
        reply.cancel()
        bell.quiet()


def _read(reply: Reply, output: ReplyOutput | None, progress: Progress) -> RequestResult | None:
    """All events that are there; the result once it ended."""
    while (event := reply.get(0)) is not None:
        if isinstance(event, Ended):
            return event.result
        if not isinstance(event, Delta):
            continue
        progress.finish()
        if output is not None:
            _write(output.reasoning, event.reasoning)
            _write(output.text, event.text)
    return None


def _write(write: Callable[[str], None], text: str) -> None:
    if text:
        write(text)
