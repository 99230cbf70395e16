"""A prefix outside the process: its ids, what it is the KV of, and its valid positions as host arrays (spec V16)."""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.core.backend import Backend
from mlxcel.core.kv import KVStore
from mlxcel.core.prefix import DetachedKV, KVKey, StatePayload
from mlxcel.errors import CapacityError

NOBODY = 0
"""The id that KV has in a store while it is read from a file: no row has it."""


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


def export(backend: Backend, prefix: DetachedKV) -> SavedPrefix:
    """What a record holds."""
    state = prefix.payload
    rings = None if state is None else tuple(np.asarray(array) for array in state.arrays)
    return SavedPrefix(
        ids=prefix.ids,
        key=prefix.key,
        prefilled=prefix.prefilled,
        arrays=tuple(positions_of(array, prefix.length) for array in backend.export_pages(prefix.pages)),
        state=None if state is None or rings is None else SavedState(rings, state.reach, state.written),
    )


def restore(backend: Backend, kv: KVStore, saved: SavedPrefix, *, epoch: int) -> DetachedKV | None:
    """The same on pages of a store, held by the caller; None while it has no room. `epoch` is that of the arrays."""
    length = len(saved.ids)
    try:
        kv.open(NOBODY, length)
    except CapacityError:
        return None
    try:
        kv.reserve([(NOBODY, length)])
        kv.advance(NOBODY, length)
        pages = kv.detach(NOBODY, length)
    except CapacityError:
        kv.free(NOBODY)
        return None
    try:
        backend.import_pages(pages, [pages_of(array, len(pages), kv.page_size) for array in saved.arrays])
    except BaseException:
        kv.release(pages)
        raise
    payload = None
    if (state := saved.state) is not None:
        nbytes = sum(array.nbytes for array in state.arrays)
        payload = StatePayload(state.arrays, nbytes, state.reach, state.written)
    return DetachedKV(saved.ids, saved.key, pages, saved.prefilled, epoch, payload)


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
