"""Rows by selection: what a stage made of those that use it, the others bit for bit (spec S3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

WHEN_USED: Final = "when_used"
"""Among the stages of a step: it has more of them than its rows use, and those that no row uses are not run."""


def select(xp: Any, rows: Any, changed: Any, z: Any) -> Any:
    """`changed` in the rows where `rows` [R] is True, z in the others: both [R, V]. Never a copy without need."""
    if xp is np and np.all(rows):
        return changed
    return xp.where(rows[:, None], changed, z)


def when(xp: Any, rows: Any, make: Callable[[], Any], otherwise: Any) -> Any:
    """`make()` where `rows` [R] has a True, else `otherwise`: arrays, or tuples of them, of the same shapes and dtypes.

    Traced code runs one of the two, as eager code does.
    """
    if xp is np:
        return make() if np.any(rows) else otherwise
    from jax.lax import cond

    return cond(xp.any(rows), make, lambda: otherwise)
