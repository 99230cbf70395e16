"""The search of threshold.py for GPUs: four bits at a time, few launches and no loop (spec S42).

A pass weighs the row above 16 candidates at once. Counts are integers, so any order of addition will do; masses are
added in the tree of `tree_sum`, so that both forms of the search find the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

BRANCHES = 8
"""Slices that one level of the tree adds, by halves."""

_BITS = 4
"""Of a pass. With five a pass costs the device twice as much and only one of eight is saved."""

_LAST = 64
"""At most so many sums of a tree are left to its last launch. Left alone, XLA takes one more."""


def least_by_count(image: Any, count: Any) -> Any:
    """The least t with fewer than `count` of the row above it: uint32 [R, 1].

    image uint32 [R, V], jax; count int32 [R, 1], at least 1, so that t is at most the row's largest.
    """
    import jax.numpy as jnp

    def number_above(t: Any) -> Any:
        return jnp.sum((image[:, None, :] > t[:, :, None]).astype(jnp.int32), axis=-1)

    return _least(number_above, count)


def least_by_mass(image: Any, top: Any, weight: Any, bound: Any) -> Any:
    """The least t with less than `bound` of weight above it, at most `top`: uint32 [R, 1].

    image uint32 [R, V], jax; top uint32 [R, 1], the row's largest; weight float32 [R, V], not negative; bound float32
    [R, 1].
    """
    import jax.numpy as jnp

    return jnp.minimum(_least(mass_above(image, weight), bound), top)


def mass_above(image: Any, weight: Any) -> Callable[[Any], Any]:
    """A function from thresholds uint32 [R, J] to the weight above each, float32 [R, J], in the order of `tree_sum`.

    image uint32 [R, V], jax; weight float32 [R, V], not negative.
    """
    import jax.numpy as jnp

    length = image.shape[-1]
    # Laid out once: a launch that had to look for the places of padding would take three times as long.
    image, weight = apart((_leaves(image), _leaves(weight)))

    def above(t: Any) -> Any:
        return _add_leaves(jnp.where(image[:, :, None] > t[:, None, :], weight[:, :, None], jnp.float32(0)), length)

    return above


def _least(above: Callable[[Any], Any], bound: Any) -> Any:
    """The least t with above(t) < bound, the largest uint32 where there is none: uint32 [R, 1].

    `above` maps candidates uint32 [R, 16] to [R, 16] and falls as they grow; bound [R, 1].
    """
    import jax.numpy as jnp

    digits = jnp.arange(1 << _BITS, dtype=jnp.uint32)[None, :]
    # The least value of each digit, behind those that are settled.
    first = jnp.broadcast_to(digits << jnp.uint32(32 - _BITS), (len(bound), 1 << _BITS))
    for place in reversed(range(0, 32, _BITS)):
        # Barriers keep what comes of one pass from being worked out again in the launches of the next.
        found = apart(above(first + jnp.uint32((1 << place) - 1)))
        digit = sum((~(found[:, i : i + 1] < bound)).astype(jnp.uint32) for i in range((1 << _BITS) - 1))
        low = first[:, :1] + (digit << jnp.uint32(place))
        first = apart(low + ((digits << jnp.uint32(place)) >> jnp.uint32(_BITS)))
    return low


def tree_of_pairs(x: Any) -> Any:
    """`tree_sum` of float32 [R, V], none negative, bit for bit: [R]."""
    return _add_leaves(_leaves(x)[:, :, None], x.shape[-1])[:, 0]


def _levels(length: int) -> list[tuple[int, int]]:
    """Of each level of the tree over V = `length`: how many times it halves, and how many sums it leaves."""
    levels = []
    while length > 1:
        width = -(-length // BRANCHES)
        levels.append(((-(-length // width) - 1).bit_length(), width))
        length = width
    return levels


def _leaves(x: Any) -> Any:
    """[R, V] -> [R, N], N a power of two: with zeros where a level lacks a slice or an end of one."""
    import jax.numpy as jnp

    rows = len(x)
    x = x[:, None]
    for halvings, width in _levels(x.shape[-1]):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, (width << halvings) - x.shape[-1]))).reshape(rows, -1, width)
    return x.reshape(rows, -1)


def _add_leaves(x: Any, length: int) -> Any:
    """The tree over V = `length`, for each of J columns: float32 [R, N, J], none negative -> [R, J].

    A reduction over an axis of two is one addition in whatever order, and XLA runs many of them in one launch, which it
    does not with slices. Two in a row that are alike it would make one and choose an order: so every other one takes
    the absolute value, which changes nothing.
    """
    from jax import lax

    levels = _levels(length)
    x = x.reshape(len(x), *[2] * sum(halvings for halvings, _ in levels), x.shape[-1])
    added = 0
    for halvings, width in levels:
        for axis in range(halvings, 0, -1):
            x = lax.reduce(x, np.float32(0), (lax.add, _add_absolute)[added % 2], (axis,))
            added += 1
        if _LAST // BRANCHES < width <= _LAST:
            x = apart(x)
    return x


def apart(x: Any) -> Any:
    """x, worked out before anything that reads it."""
    from jax import lax

    return lax.optimization_barrier(x)  # type: ignore[no-untyped-call]


def _add_absolute(a: Any, b: Any) -> Any:
    from jax import lax

    return lax.abs(lax.add(a, b))
