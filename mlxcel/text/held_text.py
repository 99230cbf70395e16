"""Text on its way to a client: it waits, and each character knows whether the client is to see it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Run(NamedTuple):
    """Neighbouring characters that are all shown, or all hidden: the spelling of a special token that is left out."""

    text: str
    shown: bool


def shown_text(runs: Iterable[Run]) -> str:
    return "".join(run.text for run in runs if run.shown)


class HeldText:
    """A queue of characters: runs are added behind, any number of characters is taken in front."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs: deque[Run] = deque()
        self.length = 0
        self.add(runs)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._runs)

    @property
    def text(self) -> str:
        """All of it, hidden characters too."""
        return "".join(run.text for run in self._runs)

    def add(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run.text:
                self._runs.append(run)
                self.length += len(run.text)

    def take(self, count: int) -> list[Run]:
        """The first `count` characters, 0 to `length` of them."""
        taken: list[Run] = []
        self.length -= count
        while count:
            run = self._runs.popleft()
            if len(run.text) > count:
                self._runs.appendleft(Run(run.text[count:], run.shown))
                run = Run(run.text[:count], run.shown)
            taken.append(run)
            count -= len(run.text)
        return taken

    def take_all(self) -> list[Run]:
        return self.take(self.length)
