"""Counter-based noise: threefry2x32 words and Gumbel values from (seed, position, purpose, id) alone (spec 4.9).

https://www.thesalmons.org/john/random123/papers/random123sc11.pdf. 32-bit integer arithmetic throughout, so the words
are bit-equal on every array library.
"""

from __future__ import annotations

from typing import Any

DRAW = 0
"""Purpose of the noise that draws a token."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(xp: Any, key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """20 rounds of threefry2x32. All four uint32 arrays, shapes that broadcast, at least one axis.

    Returns two words of that shape.
    """
    u32 = xp.uint32
    keys = (key[0], key[1], key[0] ^ key[1] ^ u32(_PARITY))
    x0, x1 = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << u32(rotation)) | (x1 >> u32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + u32(group + 1)
    return x0, x1


def row_keys(xp: Any, seed_low: Any, seed_high: Any, position: Any, purpose: int) -> tuple[Any, Any]:
    """K of spec 4.9 for each row: seed words, position uint32 [R] -> two uint32 [R]."""
    return threefry2x32(xp, (seed_low, seed_high), (position, xp.full_like(position, purpose)))


def words(xp: Any, keys: tuple[Any, Any], count: int) -> Any:
    """word_i for i = 0 … count - 1 under the rows' keys [R]: uint32 [R, count]. A word depends on its id alone."""
    pairs = xp.arange((count + 1) // 2, dtype=xp.uint32)[None, :]
    first, second = threefry2x32(xp, (keys[0][:, None], keys[1][:, None]), (pairs, xp.zeros_like(pairs)))
    return xp.reshape(xp.stack([first, second], axis=-1), (first.shape[0], -1))[:, :count]


def gumbel(xp: Any, word: Any) -> Any:
    """Gumbel noise of uint32 words: float32 of the same shape, in -2.81 … 22.87."""
    f32 = xp.float32
    v = xp.minimum((word.astype(f32) + f32(0.5)) * f32(2.0**-32), f32(1 - 2.0**-24))
    return -xp.log(-xp.log1p(-v))
