"""Mirostat 1 and 2: keeps the surprise of what is drawn near tau (spec 4.8). https://arxiv.org/abs/2007.14966"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlxcel.plugins.sampling.filters import remove, top_k
from mlxcel.plugins.sampling.masses import masses
from mlxcel.plugins.sampling.threshold import repeat, tree_sum

OBSERVED_BEST = 100
"""So many of the best tell version 1 how steep the row is."""

_LN_2 = math.log(2)
_SMALLEST = 2.0**-126  # the smallest normal float32: below it, array libraries flush to 0 or do not


def by_surprise(xp: Any, z: Any, mu: Any) -> Any:
    """Version 2: keep -log2 p_i <= max(mu, smallest surprise). z float32 [R, V]; mu float32 [R, 1]."""
    row = masses(xp, z)
    surprise = (xp.log(row.whole) - row.shifted) / xp.float32(_LN_2)
    return remove(xp, z, surprise <= xp.maximum(mu, xp.min(surprise, axis=-1, keepdims=True)))


def by_rank(xp: Any, z: Any, mu: Any) -> Any:
    """Version 1: keep the best K(mu), equal ones together. z float32 [R, V]; mu float32 [R, 1]."""
    return top_k(xp, z, rank(xp, z, mu))


def rank(xp: Any, z: Any, mu: Any) -> Any:
    """K = clamp(floor(k), 1, V) of spec S31: int32 [R, 1].

    With t_i = ln((i+2)/(i+1)) and b_i = ln(p_i/p_{i+1}) over the sorted best, s = sum t b / sum t^2, e = s - 1:
    k = (e 2^mu / (1 - V^-e))^(1/s), V where that is not finite, 1 for one candidate.
    """
    vocab = z.shape[-1]
    best = largest(xp, z - xp.max(z, axis=-1, keepdims=True), min(OBSERVED_BEST, vocab))
    real = xp.exp(best) >= xp.float32(_SMALLEST)
    if best.shape[-1] == 1:
        return xp.ones(best.shape, xp.int32)
    pair = real[:, 1:]
    places = np.arange(best.shape[-1] - 1, dtype=np.float64)
    t = xp.where(pair, xp.asarray(np.log((places + 2) / (places + 1)).astype(np.float32)), xp.float32(0))
    b = xp.where(pair, best[:, :-1] - xp.where(pair, best[:, 1:], xp.float32(0)), xp.float32(0))
    s = tree_sum(xp, t * b) / tree_sum(xp, t * t)
    e = s - 1
    k = xp.power(e * xp.exp2(mu) / -xp.expm1(-e * xp.float32(math.log(vocab))), 1 / s)
    k = xp.where(xp.isfinite(k), xp.clip(xp.floor(k), 1, vocab), xp.float32(vocab))
    return xp.where(pair[:, :1], k, xp.float32(1)).astype(xp.int32)


def largest(xp: Any, z: Any, count: int) -> Any:
    """The `count` largest of each row, largest first, each as often as it is there: [R, V] -> [R, count]."""
    if xp is np:
        kept = np.partition(z, z.shape[-1] - count, axis=-1)[:, z.shape[-1] - count :]
        return np.sort(kept, axis=-1)[:, ::-1]
    rows = xp.arange(z.shape[0])

    def take(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        left, found = state
        place = xp.argmax(left, axis=-1)
        return left.at[rows, place].set(-xp.inf), found.at[:, i].set(left[rows, place])

    return repeat(xp, count, take, (z, xp.zeros((z.shape[0], count), z.dtype)))[1]


def next_mu(xp: Any, kept: Any, tokens: Any, mu: Any, tau: Any, eta: Any) -> Any:
    """mu - eta (-log2 p'(drawn) - tau), p' over what was kept: float32 [R, 1].

    kept float32 [R, V], removed ones -inf; tokens int32 [R]; the others float32 [R, 1].
    """
    row = masses(xp, kept)
    drawn = xp.take_along_axis(row.shifted, tokens[:, None], axis=-1)
    return mu - eta * ((xp.log(row.whole) - drawn) / xp.float32(_LN_2) - tau)
