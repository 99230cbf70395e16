"""When the time of requests is over (spec C14)."""

from __future__ import annotations

from heapq import heappop, heappush
from weakref import ref

from mlxcel.core.job import Job


class Deadlines:
    """Jobs by their deadline, the next one first. It keeps none: one that ended long before its deadline, with all its
    text, must not wait for it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ref[Job]]] = []

    def add(self, deadline: float, job: Job) -> None:
        heappush(self._heap, (deadline, job.number, ref(job)))

    @property
    def next(self) -> float | None:
        """The next deadline of a job that goes on."""
        while self._heap and ((job := self._heap[0][2]()) is None or job.ended):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[Job]:
        """Those whose time is over at `now`. They are forgotten."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            if (job := heappop(self._heap)[2]()) is not None:
                found.append(job)
        return found
