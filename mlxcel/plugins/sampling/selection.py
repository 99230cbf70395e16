"""Rows by selection: what a stage made of those that use it, the others bit for bit (spec S3)."""

from __future__ import annotations

from typing import Any

import numpy as np


def select(xp: Any, rows: Any, changed: Any, z: Any) -> Any:
    """`changed` in the rows where `rows` [R] is True, z in the others: both [R, V]. Never a copy without need."""
    if xp is np and np.all(rows):
        return changed
    return xp.where(rows[:, None], changed, z)
