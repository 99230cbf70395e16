"""A row of logits as masses: the softmax in its two parts, whose sums run in one order (spec 4.6)."""

from __future__ import annotations

from typing import Any, NamedTuple

from mlxcel.plugins.sampling.threshold import tree_sum


class Masses(NamedTuple):
    """Of a row z with m = max z: p = weight / whole."""

    shifted: Any  # z - m, float32 [R, V]
    weight: Any  # exp(z - m), float32 [R, V]
    whole: Any  # their sum Z, float32 [R, 1]


def masses(xp: Any, z: Any, peak: Any | None = None) -> Masses:
    """z float32 [R, V], removed ones -inf, at least one finite a row; peak float32 [R, 1], its maximum where known."""
    shifted = z - (xp.max(z, axis=-1, keepdims=True) if peak is None else peak)
    weight = xp.exp(shifted)
    return Masses(shifted, weight, tree_sum(xp, weight))


def entropy(xp: Any, row: Masses) -> Any:
    """H = -sum p ln p = ln Z - sum e (z - m) / Z, float32 [R, 1], not below 0. What has no mass adds nothing."""
    shifted = xp.where(row.weight > 0, row.shifted, xp.float32(0))
    return xp.maximum(xp.log(row.whole) - tree_sum(xp, row.weight * shifted) / row.whole, xp.float32(0))
