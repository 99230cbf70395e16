"""Status words: what kept a row from a token, in the low byte, and in which stage, above it (spec S45)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcel.plugins.sampling.stage import RowState, Stage

FINE, NOT_A_NUMBER, NOTHING_ALLOWED = 0, 1, 2


def of_logits(xp: Any, logits: Any) -> Any:
    """NOT_A_NUMBER where a row has NaN or +inf, FINE elsewhere: float32 [R, V] -> int32 [R]. -inf is legal."""
    return xp.where(xp.all(logits < xp.inf, axis=-1), xp.int32(FINE), xp.int32(NOT_A_NUMBER))


def behind_stage(xp: Any, status: Any, logits: Any, place: int) -> Any:
    """The status with rows that the stage at `place` of all stages has spoilt: [R], [R, V] -> int32 [R]."""
    spoilt = (status == FINE) & (of_logits(xp, logits) != FINE)
    return xp.where(spoilt, xp.int32(NOT_A_NUMBER | (place + 1) << 8), status)


def fault_words(stages: Sequence[Stage], state: RowState, status: int) -> str:
    """What a status other than FINE means for this row, as `Sampler.fault`."""
    if status & 0xFF == NOT_A_NUMBER:
        place = status >> 8
        return (
            f"NaN or +inf from the logits processor {stages[place - 1].foreign!r}"
            if place
            else ("NaN or +inf in its logits")
        )
    failed = [failure for prepared in state.prepared.values() if (failure := getattr(prepared, "failure", None))]
    return failed[0] if failed else "every token is masked"
