"""A clock that tests drive."""

from __future__ import annotations


class ManualClock:
    """A monotonic clock in seconds that moves only when told. Call it to read it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
