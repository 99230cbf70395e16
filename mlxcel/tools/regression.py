"""When a figure counts as lost: the figures that may not get worse, and by how much each may (docs/spec/engine.md D32).

Standard library only: programs that import nothing else of mlxcel read it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BETTER: Final[Mapping[str, int]] = {"ttft_ms": -1, "decode_tok_s": 1}
"""The figures of a cell that may not get worse: 1 where more is better, -1 where less is."""

LONG: Final = 2048
"""Tokens from which a prompt's first token is the device's work: of a short one it takes 6 ms, of which a millisecond
of the host is much."""

SHORT_PERCENT: Final[Mapping[str, float]] = {"ttft_ms": 24.5, "decode_tok_s": 4.0}
LONG_PERCENT: Final[Mapping[str, float]] = {"ttft_ms": 5.0, "decode_tok_s": 2.5}
"""What a figure may lose with a prompt below `LONG`, and from it on: just above the widest difference between two runs
of the same flags (docs/adr/0007-unified-batch-native-engine.md)."""


def loss_percent(figure: str, before: float, now: float) -> float:
    """By how much `now` is worse than `before`, in percent of it; below 0 where it is better. Both are above 0."""
    return BETTER[figure] * (before - now) / before * 100


def may_lose(figure: str, prompt: int) -> float:
    """The threshold in percent of a figure with a prompt of so many tokens."""
    return (SHORT_PERCENT if prompt < LONG else LONG_PERCENT)[figure]


def is_lost(figure: str, prompt: int, before: float, now: float) -> bool:
    """Whether it is worse by more than that."""
    return loss_percent(figure, before, now) > may_lose(figure, prompt)


def allowed() -> str:
    """All thresholds, for people."""
    each = (f"{SHORT_PERCENT[name]:g} % ({LONG_PERCENT[name]:g} %) of {name}" for name in BETTER)
    return f"{', '.join(each)}; in brackets with prompts of {LONG} tokens or more"
