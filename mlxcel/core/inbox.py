"""The one door to the engine thread: requests, cancellations, errands, and the bound of the queue (spec C8)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from mlxcel.core.errand import Errand
from mlxcel.core.job import Job
from mlxcel.errors import MlxcelError


@attrs.frozen(eq=False)
class Cancel:
    """End what is left of a job."""

    job: Job


Message = Job | Cancel | Errand


class Inbox:
    """Any thread posts, the engine thread takes. `rows` places run, `depth` requests may wait beside them.

    A place that is free counts with the queue: a request that will run at once does not wait.
    """

    def __init__(self, *, rows: int, depth: int) -> None:
        self._lock = threading.RLock()  # taken by itself where nobody waits: each tick comes by
        self._changed = threading.Condition(self._lock)
        self._messages: list[Message] = []
        self._rows, self._depth = rows, depth
        self._busy = 0
        self._waiting = 0
        self._closed: Callable[[], MlxcelError] | None = None
        self._woken = False

    # --- any thread ---------------------------------------------------------------------------------------------------

    def offer(self, job: Job, full: Callable[[int], MlxcelError]) -> None:
        """Take a job, or raise `full(waiting)` when it would be one too many, or what the inbox was closed with. One
        decision: between asking and answering nobody gets in."""
        with self._changed:
            if self._closed is not None:
                raise self._closed()
            if not self._fits():
                raise full(self._waiting)
            self._waiting += 1
            self._messages.append(job)
            self._changed.notify_all()

    @property
    def room(self) -> bool:
        """Whether a job offered now would not be one too many."""
        with self._lock:
            return self._fits()

    def _fits(self) -> bool:
        return self._waiting < self._depth + max(0, self._rows - self._busy)

    def cancel(self, job: Job) -> None:
        with self._changed:
            self._messages.append(Cancel(job))
            self._changed.notify_all()

    def post(self, errand: Errand) -> None:
        with self._changed:
            self._messages.append(errand)
            self._changed.notify_all()

    def close(self, error: Callable[[], MlxcelError]) -> None:
        """Refuse every further job with what `error` makes. The last reason given counts."""
        with self._changed:
            self._closed = error
            self._woken = True
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Requests of which a choice never ran."""
        with self._lock:
            return self._waiting

    # --- the engine thread --------------------------------------------------------------------------------------------

    def take(self) -> list[Message]:
        """What came since the last time, in its order."""
        with self._lock:
            messages, self._messages, self._woken = self._messages, [], False
            return messages

    def wait(self, timeout: float | None) -> None:
        """Until there is a message, somebody closed the inbox, or `timeout` seconds passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._woken, timeout)

    def count(self, *, busy: int, left: int = 0) -> None:
        """`busy` places are taken now, and `left` requests no longer wait."""
        with self._lock:
            self._busy = busy
            self._waiting -= left
