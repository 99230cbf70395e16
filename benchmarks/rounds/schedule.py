"""Which arm runs when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rounds.arms import Arm


@dataclass(frozen=True)
class Entry:
    """One process. `round` counts from 0 and on through a file that is appended to, `position` from 0 in each round."""

    round: int
    position: int
    arm: Arm


def schedule(arms: Sequence[Arm], rounds: range) -> Iterator[Entry]:
    """Round r begins with arm r and goes round, so that no arm is always the first, or always behind the same one's
    heat."""
    for turn in rounds:
        shift = turn % len(arms)
        for position, arm in enumerate([*arms[shift:], *arms[:shift]]):
            yield Entry(turn, position, arm)
