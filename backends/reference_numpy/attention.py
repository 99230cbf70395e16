"""Causal attention over page tables, one token at a time, in blocks of 128 absolute positions.

softmax(q k^T * scale) v. Every block is a product of one fixed shape for each KV head, and blocks are added in their
order, so a token's bits follow from its own position alone: not from its piece, its neighbours, or its pages.
"""

from __future__ import annotations

import numpy as np

from mlxcel.core.kv import BLOCK


def attend_token(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: np.ndarray, position: int, scale: float
) -> np.ndarray:
    """One token over the positions 0 … `position` of its row.

    q: float32 [K, G, dk], G = H // K query heads a KV head. keys, values: one layer's pages, float32
    [pages, K, page_size, dk or dv], this token's own position written. table: int32 [P]. Returns float32 [K, G, dv].
    """
    blocks = position // BLOCK + 1
    k, v = _blocks(keys, table, position), _blocks(values, table, position)
    valid = position + 1 - (blocks - 1) * BLOCK
    scores = np.matmul(q[:, None], k.swapaxes(-1, -2)) * np.float32(scale)
    # By selection: what lies behind a row's end is whatever a page held before, NaN included.
    scores[:, -1, :, valid:] = -np.inf
    last = np.zeros_like(v[:, -1])
    last[:, :valid] = v[:, -1, :valid]
    weights = np.exp(scores - scores.max(axis=(1, 3), keepdims=True))
    total = np.add.reduce(np.add.reduce(weights, axis=-1), axis=1)
    mixed = np.add.reduce(np.matmul(weights[:, :-1], v[:, :-1]), axis=1) if blocks > 1 else 0
    result: np.ndarray = (mixed + np.matmul(weights[:, -1], last)) / total[..., None]
    return result


def _blocks(pages: np.ndarray, table: np.ndarray, position: int) -> np.ndarray:
    """The blocks that hold positions 0 … `position` of a row, [K, blocks, 128, d]: a view of one big page, or small
    pages gathered, with zeros where a block has no page yet."""
    _, heads, page_size, dim = pages.shape
    blocks = position // BLOCK + 1
    if page_size >= blocks * BLOCK:
        row = pages[table[0], :, : blocks * BLOCK]
    else:
        held = table[: position // page_size + 1]
        row = np.zeros((heads, blocks * BLOCK, dim), np.float32)
        row[:, : len(held) * page_size] = pages[held].swapaxes(0, 1).reshape(heads, -1, dim)[:, : blocks * BLOCK]
    return row.reshape(heads, blocks, BLOCK, dim)
