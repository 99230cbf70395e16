"""Whether the engine still moves (spec C36)."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOKS = 8
"""How often the watchdog looks within its limit."""


class Watchdog:
    """No step finished for `limit` seconds of `clock` while rows exist: `expired` is called, once, from its own thread.

    `limit` 0: never. It starts to watch at the first `busy(True)`, so that what runs before that has all the time.
    """

    def __init__(self, limit: float, clock: Callable[[], float], expired: Callable[[float], None]) -> None:
        self._limit, self._clock, self._expired = limit, clock, expired
        self._since: float | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def busy(self, rows: bool) -> None:
        """Whether rows exist. The time counts from when they came."""
        if not rows:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    def step_finished(self) -> None:
        if self._since is not None:
            self._since = self._clock()

    def look(self) -> bool:
        """Whether the time is over; `expired` was then called, now or before."""
        since = self._since
        if self._done.is_set() or not self._limit or since is None or self._clock() - since < self._limit:
            return False
        self._done.set()
        self._expired(self._limit)
        return True

    def start(self) -> None:
        if self._limit and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mlxcel-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more, and wait for its thread."""
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._limit / _LOOKS):
            self.look()
