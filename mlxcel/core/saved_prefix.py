"""A prefix outside the process: its ids, what it is the KV of, and its valid positions as host arrays (spec V16)."""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.core.prefix import KVKey


@attrs.frozen(eq=False)
class SavedState:
    """Rings of a row, as StatePayload has them."""

    arrays: tuple[np.ndarray, ...]
    reach: int
    written: int


@attrs.frozen(eq=False)
class SavedPrefix:
    """`arrays` are keys and values of each full layer in turn, [positions, heads, width]."""

    ids: np.ndarray  # int32 [positions]
    key: KVKey
    prefilled: int
    arrays: tuple[np.ndarray, ...]
    state: SavedState | None = None


def positions_of(pages: np.ndarray, length: int) -> np.ndarray:
    """[pages, heads, page_size, width] -> the first [length, heads, width]."""
    rows = np.asarray(pages).swapaxes(1, 2)
    return np.ascontiguousarray(rows.reshape(-1, *rows.shape[2:])[:length])


def pages_of(positions: np.ndarray, pages: int, page_size: int) -> np.ndarray:
    """[length, heads, width] -> [pages, heads, page_size, width], zeros behind the last position."""
    length, heads, width = positions.shape
    filled = np.zeros((pages * page_size, heads, width), positions.dtype)
    filled[:length] = positions
    return np.ascontiguousarray(filled.reshape(pages, page_size, heads, width).swapaxes(1, 2))
