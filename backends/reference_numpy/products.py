"""Row products: y[T, F] = x[T, D] @ w[F, D].T with the same bits per row for every T.

One matrix-vector product a row over fixed blocks of weight rows, the loop over tokens inside the block so that a block
is read from memory once. A product over a tile of tokens would let a row's bits depend on its place in the tile.
"""

from __future__ import annotations

import numpy as np

BLOCK = 2048
"""Weight rows a block. Fixed: T must not choose it."""


def row_products(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """weight float32 [F, D] and x float32 [T, D], both C-contiguous -> float32 [T, F]."""
    tokens, rows = len(x), len(weight)
    y = np.empty((tokens, rows), np.float32)
    for start in range(0, rows, BLOCK):
        block = weight[start : start + BLOCK]
        for token in range(tokens):
            np.dot(block, x[token], out=y[token, start : start + BLOCK])
    return y
