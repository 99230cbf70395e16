"""What all block formats of ggml are packed from: halves and small unsigned integers, several of them in a byte."""

from __future__ import annotations

import numpy as np


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The little-endian IEEE half at byte `at` of each block [n, bytes] uint8, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def unpacked(packed: np.ndarray, bits: int, up: int = 0) -> np.ndarray:
    """The integers of `bits` bits in packed [..., w] uint8, times 2**up, as a new uint8 [..., 8 / bits, w].

    Integer k of byte i is at [..., k, i], the lowest bits first: ggml keeps neighbours in neighbouring bytes, so that
    the same shift serves all of them.
    """
    # Rows move as one item each: NumPy's loop over so few bytes costs more than they do.
    row = np.dtype(f"V{packed.shape[-1]}")
    packed = np.ascontiguousarray(packed.view(row)).view(np.uint8)
    rows = np.empty((*packed.shape[:-1], 8 // bits), row)
    for k in range(8 // bits):
        down = k * bits - up
        moved = packed >> down if down >= 0 else packed << -down
        rows[..., k] = moved.view(row)[..., 0]
    fields: np.ndarray = rows[..., None].view(np.uint8)
    fields &= (1 << bits) - 1 << up
    return fields
