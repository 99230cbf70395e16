"""Sets of token ids as bits: id t is bit t % 32 of word t // 32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

WORD = 32


def allowed_words(allowed: np.ndarray) -> np.ndarray:
    """bool [V] -> uint32 [(V + 31) // 32]. Bits behind V are 0."""
    padded = np.zeros(-(-len(allowed) // WORD) * WORD, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def words_of_ids(ids: Iterable[int], vocab: int, *, without: bool = False) -> np.ndarray:
    """The ids alone or, with `without`, all others. Ids outside 0 … V - 1 are ignored."""
    chosen = np.full(vocab, without, bool)
    inside = [token for token in ids if 0 <= token < vocab]
    chosen[inside] = not without
    return allowed_words(chosen)


def word_count(vocab: int) -> int:
    return -(-vocab // WORD)


def unpacked(xp: Any, words: Any, vocab: int) -> Any:
    """uint32 [R, W] -> bool [R, V], pure array-API code."""
    bits = (words[:, :, None] >> xp.arange(WORD, dtype=xp.uint32)) & xp.uint32(1)
    return xp.reshape(bits, (words.shape[0], -1))[:, :vocab] != 0
