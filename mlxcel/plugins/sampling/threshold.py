"""Exact thresholds without a sort: bisection on the order-preserving integer image of float32 (spec S42)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HALVINGS = 32
"""Enough for any two uint32."""

_BRANCHES = 8


def tree_sum(xp: Any, x: Any) -> Any:
    """Sum over the last axis in one fixed tree that its length V alone determines: [R, V] -> [R, 1].

    Float addition is monotone, and so is a tree of it: replacing values by smaller ones never gives a larger sum.
    Elementwise additions only, so no library chooses an order. Each level adds eight contiguous slices of the row by
    halves: with two, XLA fuses so many levels that it compiles for seconds.
    """
    while x.shape[-1] > 1:
        length = x.shape[-1]
        width = -(-length // _BRANCHES)
        count = -(-length // width)
        if count * width > length:
            x = xp.concatenate([x, xp.zeros((x.shape[0], count * width - length), x.dtype)], axis=-1)
        slices = [x[:, i * width : (i + 1) * width] for i in range(count)]
        while len(slices) > 1:
            odd = slices[len(slices) & ~1 :]
            slices = [low + high for low, high in zip(slices[::2], slices[1::2], strict=False)] + odd
        x = slices[0]
    return x


def ordered_image(xp: Any, x: Any) -> Any:
    """uint32 that order as the float32 values do: negatives have all bits flipped, the others the sign bit.

    Both zeros are one value and have one image. No NaN.
    """
    bits = xp.where(x == 0, xp.float32(0), x).view(xp.uint32)
    return xp.where(bits >> xp.uint32(31) == 1, ~bits, bits ^ xp.uint32(0x80000000))


def lowest_threshold(xp: Any, image: Any, holds: Callable[[Any], Any]) -> Any:
    """The least t for which `holds(t)`, or the largest of `image` where there is none below it: uint32 [R, 1].

    image: uint32 [R, V]. `holds` maps t [R, 1] to bool [R, 1], each row False below some t and True from there on.
    """

    def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = low + ((high - low) >> xp.uint32(1))
        found = holds(middle)
        # A row whose bounds have met stays: its middle is its answer, whatever `holds` says there.
        return xp.where(found, low, xp.minimum(middle + xp.uint32(1), high)), xp.where(found, middle, high)

    top = xp.max(image, axis=-1, keepdims=True)
    return _repeat(xp, HALVINGS, halve, (xp.zeros_like(top), top))[1]


def _repeat(xp: Any, times: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    """state = step(i, state), `times` times. Traced code keeps the loop a loop: unrolled, it compiles for seconds."""
    if xp.__name__ == "jax.numpy":
        from jax.lax import fori_loop

        return fori_loop(0, times, step, state)
    for i in range(times):
        state = step(i, state)
    return state
