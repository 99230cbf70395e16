"""When a figure counts as lost: the one threshold, and which figures it is about (docs/spec/engine.md D32).

Standard library only: programs that import nothing else of mlxcel read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

THRESHOLD_PERCENT: Final = 1.0
"""Just above the widest difference between arms with the same flags (docs/adr/0007-unified-batch-native-engine.md)."""

BETTER: Final[Mapping[str, int]] = {"ttft_ms": -1, "decode_tok_s": 1}
"""The figures of a cell that may not get worse: 1 where more is better, -1 where less is."""


def loss_percent(figure: str, before: float, now: float) -> float:
    """By how much `now` is worse than `before`, in percent of it; below 0 where it is better. Both are above 0."""
    return BETTER[figure] * (before - now) / before * 100


def is_lost(figure: str, before: float, now: float) -> bool:
    """Whether that is more than the threshold."""
    return loss_percent(figure, before, now) > THRESHOLD_PERCENT
