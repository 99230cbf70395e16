"""Counter-based noise: threefry2x32 words and Gumbel values from (seed, position, purpose, id) alone (spec 4.9).

https://www.thesalmons.org/john/random123/papers/random123sc11.pdf. 32-bit integer arithmetic throughout, so the words
are bit-equal on every array library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DRAW, XTC_GATE, CHOICE = 0, 1, 2
"""Purposes of the chain's own noise: the draw of a token, the gate of XTC, the seed of a request's further choice."""

SPAN = 26.0
"""More than two Gumbel values can differ by."""

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


def words_at(xp: Any, keys: tuple[Any, Any], ids: Any) -> Any:
    """word_i of single ids under a key each: keys and ids of one shape, uint32 the same shape."""
    pairs = ids.astype(xp.uint32)
    first, second = threefry2x32(xp, keys, (pairs >> xp.uint32(1), xp.zeros_like(pairs)))
    return xp.where((pairs & xp.uint32(1)) == 1, second, first)


def gumbel(xp: Any, word: Any) -> Any:
    """Gumbel noise of uint32 words: float32 of the same shape, in -2.81 … 22.87."""
    f32 = xp.float32
    v = xp.minimum((word.astype(f32) + f32(0.5)) * f32(2.0**-32), f32(1 - 2.0**-24))
    return -xp.log(-xp.log1p(-v))


def uniform(xp: Any, word: Any) -> Any:
    """A uniform value in [0, 1) of uint32 words: float32 of the same shape."""
    return (word >> xp.uint32(8)).astype(xp.float32) * xp.float32(2.0**-24)


def gumbel_argmax(xp: Any, y: Any, keys: tuple[Any, Any]) -> Any:
    """argmax of y_i + n_i, the lowest id on ties (spec S27): int32 [R]. y float32 [R, V]; keys two uint32 [R].

    NumPy makes no noise for ids that no noise can lift to the top, which changes no id.
    """
    if xp is np:
        rows, ids = np.nonzero(y >= np.max(y, axis=-1, keepdims=True) - np.float32(SPAN))
        if 4 * len(ids) < y.size:
            found = np.full(y.shape, -np.inf, np.float32)
            noise = gumbel(np, words_at(np, (keys[0][rows], keys[1][rows]), ids))
            found[rows, ids] = y[rows, ids] + noise
            return np.argmax(found, axis=-1).astype(np.int32)
    return xp.argmax(scores(xp, y, keys), axis=-1).astype(xp.int32)


def scores(xp: Any, y: Any, keys: tuple[Any, Any]) -> Any:
    """y_i + n_i, which the draw compares: float32 [R, V]. y float32 [R, V]; keys two uint32 [R]."""
    return y + gumbel(xp, words(xp, keys, y.shape[-1]))


def choice_seed(seed: int, choice: int) -> int:
    """Seed of a further choice of a request whose own is `seed`; choice 0 keeps it.

    All are 0 … 2**63 - 1, so that each can be sent back and repeats its choice.
    """
    if choice == 0:
        return seed
    low, high = (np.array([word], np.uint32) for word in (seed & 0xFFFFFFFF, seed >> 32))
    first, second = row_keys(np, low, high, np.array([choice], np.uint32), CHOICE)
    return (int(second[0]) << 32 | int(first[0])) & (2**63 - 1)
