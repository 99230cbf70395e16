"""Filters: each a threshold on a value, so that equal values stay or go together (spec S4, 4.6)."""

from __future__ import annotations

from typing import Any

from mlxcel.plugins.sampling.threshold import lowest_threshold, ordered_image, tree_sum


def top_k(xp: Any, z: Any, k: Any) -> Any:
    """Keep z_i >= the k-th largest. z float32 [R, V], removed ones -inf; k int32 [R, 1], 1 or more. Returns z."""
    image = ordered_image(xp, z)

    def fewer_above(t: Any) -> Any:
        return xp.sum((image > t).astype(xp.int32), axis=-1, keepdims=True) < k

    return _keep(xp, z, image >= lowest_threshold(xp, image, fewer_above))


def top_p(xp: Any, z: Any, p: Any) -> Any:
    """Keep i iff the mass strictly above it is < p of the whole, or it is a maximum. p float32 [R, 1], 0 … 1."""
    image = ordered_image(xp, z)
    weight = xp.exp(z - xp.max(z, axis=-1, keepdims=True))
    bound = p * tree_sum(xp, weight)

    def little_above(t: Any) -> Any:
        return tree_sum(xp, xp.where(image > t, weight, xp.float32(0))) < bound

    return _keep(xp, z, image >= lowest_threshold(xp, image, little_above))


def min_p(xp: Any, z: Any, p: Any) -> Any:
    """Keep z_i >= max z + ln p. p float32 [R, 1], above 0."""
    return _keep(xp, z, z >= xp.max(z, axis=-1, keepdims=True) + xp.log(p))


def _keep(xp: Any, z: Any, stays: Any) -> Any:
    return xp.where(stays, z, xp.float32(-xp.inf))
