"""Waiting for a quiet host, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

INTERVAL_S = 5.0
"""Between the two samples that have to be quiet, and before the next try."""


@dataclass(frozen=True)
class Passed:
    """Seconds in the gate, and what was busy when it stopped waiting: None if nothing was."""

    wait_s: float
    reason: str | None


@dataclass(frozen=True)
class Gate:
    """`look` names what is busy, by names only; nothing when all is quiet."""

    look: Callable[[], Sequence[str]]
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait(self) -> Passed:
        """Until two samples in a row are quiet, or `timeout_s` seconds are over. The last samples lie closer together
        where less than an interval is left."""
        began, quiet = self.clock(), 0
        while True:
            busy = self.look()
            quiet = 0 if busy else quiet + 1
            left = began + self.timeout_s - self.clock()
            if quiet == 2 or (busy and left <= 0):
                return Passed(self.clock() - began, "; ".join(busy) or None)
            self.sleep(min(INTERVAL_S, max(left, 0.0)))
