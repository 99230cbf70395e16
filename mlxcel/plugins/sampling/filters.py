"""Filters: each a threshold on a value, so that equal values stay or go together (spec S4, 4.6).

z is float32 [R, V] with removed ids at -inf, and so is what comes back; `keep`, where a step has it, is min_keep:
int32 [R, 1], at least 1 (spec S21); `peak`, where it is known, the maximum of each row: float32 [R, 1]; `listed`, where
a row has no more values than that, or keeps no more by its k, the largest: uint32 [R, LISTED], of leading.py.
None of these removes a maximum.
"""

from __future__ import annotations

from typing import Any

from mlxcel.plugins.sampling.masses import masses
from mlxcel.plugins.sampling.threshold import among_best, ordered_image, tree_sum, within_mass

FARTHEST = 1e15
"""Logits further below the maximum count as so far in sigma: their squares still add up in float32."""


def top_n_sigma(xp: Any, z: Any, n: Any, peak: Any | None = None) -> Any:
    """Keep z_i >= m - n sigma, the population standard deviation of the finite, in two passes. n float32 [R, 1].

    A row of one survivor stays as it is. https://arxiv.org/abs/2411.07641
    """
    m = xp.max(z, axis=-1, keepdims=True) if peak is None else peak
    there = (z > xp.float32(-xp.inf)).astype(xp.float32)
    count = tree_sum(xp, there)
    shifted = xp.maximum(z - m, xp.float32(-FARTHEST)) * there
    from_mean = (shifted - tree_sum(xp, shifted) / count) * there
    sigma = xp.sqrt(tree_sum(xp, from_mean * from_mean) / count)
    return remove(xp, z, z >= m - n * sigma)


def top_k(xp: Any, z: Any, k: Any, listed: Any | None = None) -> Any:
    """Keep z_i >= the k-th largest. k int32 [R, 1], 1 or more."""
    return remove(xp, z, among_best(xp, ordered_image(xp, z), k, listed))


def top_p(xp: Any, z: Any, p: Any, keep: Any | None = None, peak: Any | None = None, listed: Any | None = None) -> Any:
    """Keep i iff the mass strictly above it is < p of the whole, or it is a maximum. p float32 [R, 1], 0 … 1."""
    image = ordered_image(xp, z)
    row = masses(xp, z, peak)
    top = None if peak is None else ordered_image(xp, peak)
    stays = within_mass(xp, image, row.weight, p * row.whole, top, listed)
    return remove(xp, z, stays if keep is None else stays | among_best(xp, image, keep))


def min_p(xp: Any, z: Any, p: Any, keep: Any | None = None, peak: Any | None = None) -> Any:
    """Keep z_i >= max z + ln p. p float32 [R, 1], above 0."""
    stays = z >= (xp.max(z, axis=-1, keepdims=True) if peak is None else peak) + xp.log(p)
    return remove(xp, z, stays if keep is None else stays | among_best(xp, ordered_image(xp, z), keep))


def remove(xp: Any, z: Any, stays: Any) -> Any:
    """z where `stays`, else -inf."""
    return xp.where(stays, z, xp.float32(-xp.inf))
