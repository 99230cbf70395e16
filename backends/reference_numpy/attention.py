"""Causal attention over page tables, one token at a time, in blocks of 128 absolute positions.

softmax(q k^T * scale) v. Every block is a product of one fixed shape for each KV head, and blocks are added in their
order, so a token's bits follow from its own position alone: not from its piece, its neighbours, or its pages.
"""

from __future__ import annotations

import numpy as np

from mlxcel.core.kv import BLOCK


def attend_token(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    position: int,
    scale: float,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One token over the positions 0 … `position` of its row.

    q: float32 [K, G, dk], G = H // K query heads a KV head. keys, values: one layer's pages, float32
    [pages, K, page_size, dk or dv], this token's own position written. table: int32 [P]. sinks: float32 [K, G], a score
    of each head beside those of positions. Returns float32 [K, G, dv].
    """
    k, v = (_blocks(pages, table, position) for pages in (keys, values))
    return _attend(q, k, v, 0, position, scale, softcap, sinks)


def attend_window(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    window: int,
    position: int,
    scale: float,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One token over the last `window` positions up to its own `position`.

    keys, values: one row's rings of one layer, float32 [K, ring, dk or dv], position p at p modulo ring, a multiple of
    128 that is at least `window`. Else as `attend_token`.
    """
    oldest = max(0, position - window + 1)
    numbers = np.arange(oldest // BLOCK, position // BLOCK + 1) % (keys.shape[1] // BLOCK)
    # By take: a copy in C order, as full attention reads, where an index of the second axis gives another order.
    k, v = (np.take(ring.reshape(len(ring), -1, BLOCK, ring.shape[2]), numbers, axis=1) for ring in (keys, values))
    v[:, 0, : oldest % BLOCK] = 0
    return _attend(q, k, v, oldest % BLOCK, position, scale, softcap, sinks)


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    low: int,
    position: int,
    scale: float,
    softcap: float,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Over the blocks k, v [K, blocks, 128, d] that end with the one of `position`; of the first, `low` are not seen,
    and hold zeros in v."""
    scores = np.matmul(q[:, None], k.swapaxes(-1, -2)) * np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    # By selection: what lies behind a row's end is whatever a page held before, NaN included.
    valid = position % BLOCK + 1
    scores[:, -1, :, valid:] = -np.inf
    scores[:, 0, :, :low] = -np.inf
    last = np.zeros_like(v[:, -1])
    last[:, :valid] = v[:, -1, :valid]
    most = scores.max(axis=(1, 3), keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks[:, None, :, None])
    weights = np.exp(scores - most)
    total = np.add.reduce(np.add.reduce(weights, axis=-1), axis=1)
    if sinks is not None:
        total += np.exp(sinks - most[:, 0, :, 0])
    mixed = np.add.reduce(np.matmul(weights[:, :-1], v[:, :-1]), axis=1) if v.shape[1] > 1 else 0
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
