"""Sparse changes of logits: (id, value) pairs a row, packed to a few widths, applied by gather and scatter (S43)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NOBODY = -1
"""Pads ids: it stands for no token."""

_GROWTH = 8


def closed_width(count: int, vocab: int, *, least: int = 64) -> int:
    """The least of `least` times 1, 8, 64, … and V that holds `count`: few widths, so few executables (spec S44)."""
    width = least
    while width < count:
        width *= _GROWTH
    return vocab if count <= vocab < width else width


def pack_lists(lists: Sequence[np.ndarray], width: int, *, fill: int = 0) -> np.ndarray:
    """Lists of one dtype, each of at most `width`, side by side: [R, width], `fill` behind each."""
    packed = np.full((len(lists), width), fill, lists[0].dtype)
    for row, values in zip(packed, lists, strict=True):
        row[: len(values)] = values
    return packed


def with_newest(xp: Any, ids: Any, pending: Any, tokens: Any) -> tuple[Any, Any]:
    """Ids [R, W] and one more column for a draw in flight: the newest id, where it is pending and not among them.

    pending bool [R], tokens int32 [R]. Returns int32 [R, W + 1] and bool [R, W + 1], True at the newest id.
    """
    newest = xp.where(pending, tokens, xp.int32(NOBODY))[:, None]
    known = xp.any(ids == newest, axis=-1, keepdims=True)
    wider = xp.concatenate([ids, xp.where(known, xp.int32(NOBODY), newest)], axis=-1)
    return wider, (wider == newest) & pending[:, None]


def change_at(xp: Any, z: Any, ids: Any, change: Callable[[Any], Any]) -> Any:
    """z float32 [R, V] with the values at ids int32 [R, W] replaced by what `change` makes of them, [R, W] -> [R, W].

    The ids of a row are distinct, but for those that are -1, which stand for nothing. All other values keep their bits.
    """
    if xp.__name__ == "jax.numpy":
        rows = xp.arange(z.shape[0])[:, None]
        # Beyond V, and distinct: `at` counts negative places from the end.
        places = xp.where(ids < 0, z.shape[1] + xp.arange(ids.shape[1], dtype=xp.int32), ids)
        values = change(z.at[rows, places].get(mode="fill", fill_value=0))
        return z.at[rows, places].set(values, mode="drop", unique_indices=True)
    rows, columns = np.nonzero(ids >= 0)
    places = ids[rows, columns]
    values = np.zeros(ids.shape, np.float32)
    values[rows, columns] = z[rows, places]
    changed = z.copy()
    changed[rows, places] = change(values)[rows, columns]
    return changed
