"""Exact thresholds without a sort: a search on the order-preserving integer image of float32 (spec S42)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlxcel.plugins.sampling.digits import BRANCHES, least_by_count, least_by_mass
from mlxcel.plugins.sampling.leading import listed_by_count, listed_by_mass

HALVINGS = 32
"""Enough for any two uint32."""

LEADING = (512, 8192)
"""So many of a row's largest values NumPy tries one by one: most thresholds lie among the first, nearly all among the
second."""

_SAMPLED = 16
"""Every so manieth value tells roughly where the largest begin."""


def tree_sum(xp: Any, x: Any) -> Any:
    """Sum over the last axis in one fixed tree that its length V alone determines: [R, V] -> [R, 1].

    Float addition is monotone, and so is a tree of it: replacing values by smaller ones never gives a larger sum.
    Elementwise additions only, so no library chooses an order. Each level adds eight contiguous slices of the row by
    halves: with two, XLA fuses so many levels that it compiles for seconds.
    """
    if xp is np:
        return _tree_sum_of_blocks(x)
    while x.shape[-1] > 1:
        length = x.shape[-1]
        width = -(-length // BRANCHES)
        count = -(-length // width)
        if count * width > length:
            x = xp.concatenate([x, xp.zeros((x.shape[0], count * width - length), x.dtype)], axis=-1)
        slices = [x[:, i * width : (i + 1) * width] for i in range(count)]
        while len(slices) > 1:
            odd = slices[len(slices) & ~1 :]
            slices = [low + high for low, high in zip(slices[::2], slices[1::2], strict=False)] + odd
        x = slices[0]
    return x


def _tree_sum_of_blocks(x: np.ndarray) -> np.ndarray:
    """The same tree in few calls: a missing slice is one of zeros, which changes no sum."""
    while x.shape[-1] > 1:
        rows, length = x.shape
        width = -(-length // BRANCHES)
        if BRANCHES * width > length:
            x = np.concatenate([x, np.zeros((rows, BRANCHES * width - length), x.dtype)], axis=-1)
        blocks = x.reshape(rows, BRANCHES, width)
        while blocks.shape[1] > 1:
            blocks = blocks[:, ::2] + blocks[:, 1::2]
        x = blocks[:, 0]
    return x


def ordered_image(xp: Any, x: Any) -> Any:
    """uint32 that order as the float32 values do: negatives have all bits flipped, the others the sign bit.

    Both zeros are one value and have one image. No NaN.
    """
    bits = x.view(xp.uint32)
    image = bits >> xp.uint32(31)
    # In place where arrays can be: fresh pages cost NumPy more than the arithmetic.
    image *= xp.uint32(0xFFFFFFFF)
    image |= xp.uint32(0x80000000)
    image ^= bits
    image += image == xp.uint32(0x7FFFFFFF)  # -0
    return image


def among_best(xp: Any, image: Any, count: Any, listed: Any | None = None) -> Any:
    """Where image >= the count-th largest of its row: bool [R, V]. image uint32 [R, V]; count int32 [R, 1], at least 1,
    above V means all; listed: what `leading` made of image, where no count is above LISTED."""

    if xp is np:
        ranks = np.minimum(count[:, 0], image.shape[-1])
        return image >= np.stack([_largest(row, int(k))[:1] for row, k in zip(image, ranks, strict=True)])

    def fewer_above(t: Any) -> Any:
        return xp.sum((image > t).astype(xp.int32), axis=-1, keepdims=True) < count

    def on_a_gpu(_: Any) -> Any:
        return least_by_count(image, count) if listed is None else listed_by_count(listed, count)

    return image >= lowest_threshold(xp, image, fewer_above, on_a_gpu)


def within_mass(xp: Any, image: Any, weight: Any, bound: Any, top: Any | None = None, listed: Any | None = None) -> Any:
    """Where the weight strictly above a place is below `bound`, or nothing is above it: bool [R, V].

    image uint32 [R, V]; weight float32 [R, V], 0 … 1; bound float32 [R, 1]; top uint32 [R, 1], the largest image of
    each row where it is known; listed uint32 [R, LISTED], largest first, where these are all that have a weight.
    """

    def little_above(t: Any) -> Any:
        return tree_sum(xp, weight * (image > t)) < bound

    def on_a_gpu(top: Any) -> Any:
        if listed is None:
            return least_by_mass(image, top, weight, bound)
        return listed_by_mass(image, listed, weight, bound)

    return image >= lowest_threshold(xp, image, little_above, on_a_gpu, top)


def lowest_threshold(
    xp: Any,
    image: Any,
    holds: Callable[[Any], Any],
    by_digits: Callable[[Any], Any] | None = None,
    top: Any | None = None,
) -> Any:
    """A t such that the places with image >= t are those whose image holds, the largest always: uint32 [R, 1].

    image: uint32 [R, V]. `holds` maps t [R, 1] to bool [R, 1], each row False below some t and True from there on.
    Traced code halves all of uint32; on a GPU `by_digits`, where there is one, makes the same of the row's largest
    image. NumPy tries a row's own largest values first, which are the same places.
    """
    top = xp.max(image, axis=-1, keepdims=True) if top is None else top
    if xp is np:
        return _lowest_value(image, top, holds)
    from jax.lax import platform_dependent

    def by_halves(top: Any) -> Any:
        return _halved(xp, xp.zeros_like(top), top, holds)

    # A CPU adds little in a launch, and one by one costs it nothing; a GPU the other way round.
    return by_halves(top) if by_digits is None else platform_dependent(top, default=by_halves, cuda=by_digits)


def _lowest_value(image: Any, top: Any, holds: Callable[[Any], Any]) -> Any:
    """The search among values that are there. Rows with further values that hold are halved."""
    bottom = np.min(image, axis=-1, keepdims=True)
    least, goes_on = top, np.ones(top.shape, bool)
    for count in LEADING:
        tried = _leading(image, bottom, count)
        low, high = np.zeros(top.shape, np.int64), np.full(top.shape, tried.shape[-1] - 1)
        while np.any(low < high):
            middle = (low + high + 1) // 2
            found = holds(np.take_along_axis(tried, middle, axis=-1)) | (middle == low)
            low, high = np.where(found, middle, low), np.where(found, high, middle - 1)
        least = np.take_along_axis(tried, low, axis=-1)
        # Whatever holds at a row's last tried value may hold below it, unless nothing is below it.
        goes_on = (low == tried.shape[-1] - 1) & (least > bottom)
        if not goes_on.any():
            return least
    return _halved(np, np.where(goes_on, np.uint32(0), least), least, holds)


def _leading(image: np.ndarray, bottom: np.ndarray, count: int) -> np.ndarray:
    """uint32 [R, n]: the largest values of each row, largest first, at most `count`; filled up with the row's least,
    `bottom` [R, 1]."""
    found = []
    for row, least in zip(image, bottom[:, 0], strict=True):
        above = row[row > least]
        found.append(np.sort(_largest(above, count) if len(above) > count else above)[::-1])
    width = min(count, 1 + max(map(len, found)))
    return np.stack(
        [
            np.pad(row, (0, width - len(row)), constant_values=least)
            for row, least in zip(found, bottom[:, 0], strict=True)
        ]
    )


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """uint32 [count]: the largest of row [n], n >= count >= 1, the least of them first, the others in no order."""
    sample = row[::_SAMPLED]
    rank = 2 * (count // _SAMPLED) + _SAMPLED // 2
    if rank < len(sample):
        near = row[row >= np.partition(sample, len(sample) - rank)[len(sample) - rank]]
        row = near if len(near) >= count else row
    return np.partition(row, len(row) - count)[len(row) - count :]


def _halved(xp: Any, low: Any, high: Any, holds: Callable[[Any], Any]) -> Any:
    """The least t in [low, high] that holds, `high` where there is none below it. All uint32 [R, 1]."""

    def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = low + ((high - low) >> xp.uint32(1))
        found = holds(middle)
        # A row whose bounds have met stays: its middle is its answer, whatever `holds` says there.
        return xp.where(found, low, xp.minimum(middle + xp.uint32(1), high)), xp.where(found, middle, high)

    return repeat(xp, HALVINGS, halve, (low, high))[1]


def repeat(xp: Any, times: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    """state = step(i, state), `times` times. Traced code keeps the loop a loop: unrolled, it compiles for seconds."""
    if xp is not np:
        from jax.lax import fori_loop

        return fori_loop(0, times, step, state)
    for i in range(times):
        state = step(i, state)
    return state
