"""When a figure counts as lost: the figures that may not get worse, and by how much each may (docs/spec/engine.md D32).

Standard library only: programs that import nothing else of mlxcel read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BETTER: Final[Mapping[str, int]] = {"ttft_ms": -1, "decode_tok_s": 1}
"""The figures of a cell that may not get worse: 1 where more is better, -1 where less is."""

THRESHOLDS_PERCENT: Final[Mapping[str, float]] = {"ttft_ms": 24.5, "decode_tok_s": 4.0}
"""Just above the widest difference between two runs of the same flags (docs/adr/0007-unified-batch-native-engine.md). A
short prompt's first token takes 6 ms, of which a millisecond of the host is much; a rate is the mean of many steps."""


def loss_percent(figure: str, before: float, now: float) -> float:
    """By how much `now` is worse than `before`, in percent of it; below 0 where it is better. Both are above 0."""
    return BETTER[figure] * (before - now) / before * 100


def is_lost(figure: str, before: float, now: float) -> bool:
    """Whether that is more than the figure's threshold."""
    return loss_percent(figure, before, now) > THRESHOLDS_PERCENT[figure]
