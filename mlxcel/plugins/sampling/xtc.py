"""XTC, exclude top choices: now and then all probable tokens but the least of them go (spec S22)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxcel.plugins.sampling.filters import remove
from mlxcel.plugins.sampling.masses import masses


def xtc(xp: Any, z: Any, threshold: Any, hit: Any, exempt: Any, keep: Any | None = None) -> Any:
    """Qualifiers are survivors with p >= threshold that are not exempt; with two or more of them, all whose p is above
    the smallest qualifying p go.

    z float32 [R, V], removed ones -inf; threshold float32 [R, 1]; hit bool [R, 1], whether the gate is open; exempt
    bool [R, V]; keep int32 [R, 1]: nothing goes where fewer than so many would stay (spec S21).
    """
    row = masses(xp, z)
    p = row.weight / row.whole
    there = z > xp.float32(-xp.inf)
    qualifies = there & ~exempt & (p >= threshold)
    # By z, which orders as p does and rounds no two of them together. Of fewer than two none lies above the least.
    least = xp.min(xp.where(qualifies, z, xp.float32(xp.inf)), axis=-1, keepdims=True)
    goes = qualifies & (z > least) & hit
    if keep is not None:
        left = xp.sum((there & ~goes).astype(xp.int32), axis=-1, keepdims=True)
        goes = goes & (left >= keep)
    return remove(xp, z, ~goes)


def marked(xp: Any, ids: Any, size: int) -> Any:
    """bool [R, V] with V = size: True at each row's ids, int32 [R, n]; -1 marks nothing."""
    rows, places = xp.arange(ids.shape[0])[:, None], xp.where(ids < 0, size, ids)
    if xp is not np:
        return xp.zeros((ids.shape[0], size), bool).at[rows, places].set(True, mode="drop")
    found = np.zeros((ids.shape[0], size + 1), bool)
    found[rows, places] = True
    return np.ascontiguousarray(found[:, :size])
