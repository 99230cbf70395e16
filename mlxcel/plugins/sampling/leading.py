"""The largest values of a row, for GPUs, and thresholds among them (spec S42).

Where a row keeps no more than its k largest values, the k-th is one of few, and so is any threshold above it: both are
looked for among these and not among all of uint32, with the very same places kept.
"""

from __future__ import annotations

from typing import Any

from mlxcel.plugins.sampling.digits import apart, mass_above

LISTED = 64
"""Most values that are listed: the largest k of a row that is drawn by them."""

_ALL_PAIRS = 1024
"""Up to so many values are ranked by comparing each with each."""

_PIVOTS = 8
"""Candidates of a pass, of two: LISTED is its square."""


def leading(image: Any) -> Any:
    """The LISTED largest of each row, largest first, equal ones each: uint32 [R, LISTED], 0 behind the last of V.

    image uint32 [R, V], jax. While there are many, only the blocks with the largest maxima go on: a value above the
    n-th largest is in one of fewer than n blocks whose maximum is above it too.
    """
    while image.shape[-1] > _ALL_PAIRS:
        image = _of_best_blocks(image)
    return _by_rank(image, image)


def _of_best_blocks(image: Any) -> Any:
    """uint32 [R, LISTED size]: the blocks of `size` values that have the largest maxima."""
    import jax.numpy as jnp

    rows, length = image.shape
    size = 1
    while -(-length // size) > _ALL_PAIRS:
        size *= 2
    blocks = jnp.pad(image, ((0, 0), (0, -length % size))).reshape(rows, -1, size)
    maxima = apart(jnp.max(blocks, axis=-1))
    places = jnp.broadcast_to(jnp.arange(maxima.shape[-1], dtype=jnp.uint32), maxima.shape)
    best = _by_rank(maxima, places).astype(jnp.int32)
    return apart(jnp.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, -1))


def _by_rank(image: Any, values: Any) -> Any:
    """The `values` uint32 [R, N] of the LISTED largest of `image` [R, N], equal ones by place: [R, LISTED]."""
    import jax.numpy as jnp

    place = jnp.arange(image.shape[-1])
    one, other = image[:, :, None], image[:, None, :]
    before = (other > one) | ((other == one) & (place[None, None, :] < place[None, :, None]))
    rank = apart(jnp.sum(before.astype(jnp.int32), axis=-1))
    found = rank[:, None, :] == jnp.arange(LISTED, dtype=jnp.int32)[None, :, None]
    # One place at most has a rank: so a maximum is that place's value.
    return apart(jnp.max(jnp.where(found, values[:, None, :], jnp.uint32(0)), axis=-1))


def listed_by_count(listed: Any, count: Any) -> Any:
    """The count-th largest: uint32 [R, 1]. listed as `leading` gives it; count int32 [R, 1], 1 to LISTED."""
    import jax.numpy as jnp

    return jnp.take_along_axis(listed, jnp.clip(count, 1, LISTED) - 1, axis=-1)


def listed_by_mass(image: Any, listed: Any, weight: Any, bound: Any) -> Any:
    """The least listed value with less than `bound` of weight above it, or the largest: uint32 [R, 1].

    image uint32 [R, V], jax; listed uint32 [R, LISTED], largest first, which has all values that have a weight but the
    least of these; weight float32 [R, V], not negative; bound float32 [R, 1].
    """
    import jax.numpy as jnp

    above = mass_above(image, weight)
    groups = listed.reshape(-1, _PIVOTS, _PIVOTS)
    # The less is listed above a value the less weight is there: those that hold stand before those that do not.
    whole = jnp.minimum(_count(above(groups[:, :, -1]) < bound), _PIVOTS - 1)
    group = jnp.take_along_axis(groups, whole[:, :, None], axis=1)[:, 0]
    last = whole * _PIVOTS + _count(above(group) < bound) - 1
    return jnp.take_along_axis(listed, jnp.maximum(last, 0), axis=-1)


def _count(holds: Any) -> Any:
    """bool [R, N] -> int32 [R, 1]"""
    import jax.numpy as jnp

    return apart(jnp.sum(holds.astype(jnp.int32), axis=-1, keepdims=True))
