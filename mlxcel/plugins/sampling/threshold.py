"""Exact thresholds without a sort: bisection on the order-preserving integer image of float32 (spec S42)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HALVINGS = 32


def tree_sum(xp: Any, x: Any) -> Any:
    """Sum over the last axis in one fixed tree that its length V alone determines: [R, V] -> [R, 1].

    Float addition is monotone, and so is a tree of it: replacing values by smaller ones never gives a larger sum.
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        low, high = x[:, :half], x[:, half:]
        if high.shape[-1] < half:
            high = xp.concatenate([high, xp.zeros((x.shape[0], 1), x.dtype)], axis=-1)
        x = low + high
    return x


def ordered_image(xp: Any, x: Any) -> Any:
    """uint32 that order as the float32 values do: negatives have all bits flipped, the others the sign bit."""
    bits = x.view(xp.uint32)
    return xp.where(bits >> xp.uint32(31) == 1, ~bits, bits ^ xp.uint32(0x80000000))


def lowest_threshold(xp: Any, image: Any, above: Callable[[Any], Any]) -> Any:
    """The least t for which `above(t)` holds, for each row: uint32 [R, 1].

    image: uint32 [R, V]. `above` maps t [R, 1] to bool [R, 1], False below some value and True from there on, and True at
    the row's largest image. The result is exact whatever lies between two values.
    """
    high = xp.max(image, axis=-1, keepdims=True)
    low = xp.zeros_like(high)
    for _ in range(HALVINGS):
        middle = low + ((high - low) >> xp.uint32(1))
        holds = above(middle)
        high = xp.where(holds, middle, high)
        low = xp.where(holds | (low >= high), low, xp.minimum(middle + xp.uint32(1), high))
    return high
