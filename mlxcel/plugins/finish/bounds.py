"""Bounds of a reply other than its length: time and indentation (spec 5.4)."""

from __future__ import annotations

from collections.abc import Callable


class TimeBound:
    """F15: `milliseconds` from a row's first token on, by `clock` (seconds, monotonic). Paused time does not count."""

    def __init__(self, milliseconds: float, clock: Callable[[], float]) -> None:
        self._limit = milliseconds
        self._clock = clock
        self._since: float | None = None
        self._paused: float | None = None

    def passed(self) -> bool:
        """Asked once a token: the first time starts the bound."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return (now - self._since) * 1000 >= self._limit

    def pause(self) -> None:
        if self._paused is None:
            self._paused = self._clock()

    def resume(self) -> None:
        if self._paused is not None and self._since is not None:
            self._since += self._clock() - self._paused
        self._paused = None


class IndentBound:
    """F21: each line behind the first begins with at least `least` spaces or tabs. An empty line has none."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._beginning = False  # whether the line has too few blanks so far
        self.blanks = 0  # of the line that is beginning

    def push(self, text: str) -> int | None:
        """How many characters of `text` stay before the first that comes too soon, or None when none does."""
        place = 0
        while True:
            if not self._beginning:
                place = text.find("\n", place) + 1
                if not place:
                    return None
                self._beginning, self.blanks = True, 0
            while self._beginning:
                if place == len(text):
                    return None
                if text[place] not in " \t":
                    return place
                self.blanks += 1
                place += 1
                self._beginning = self.blanks < self._least
