"""The model's ends in the rows that ignore them (`ignore_eos`, spec S16).

They are few, so their ids are numbers of a row, as its temperature is, and no mask of all V. A step that has them is no
other step, and costs a backend that compiles no executable more.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.sampling.pairs import NOBODY, change_at

MOST: Final = 8
"""Ids of a row, W. Models have one to five ends; a row of more is masked."""


def ignored_ends(spec: SequenceSpec) -> frozenset[int]:
    """E without U where the row ignores its ends, so that the user's own stops still work."""
    return spec.eos_ids.difference(spec.params.stop_token_ids) if spec.params.ignore_eos else frozenset()


def few_ends(spec: SequenceSpec, vocab: int) -> np.ndarray:
    """int32 [W]: what the row ignores, NOBODY behind it; nothing where that is more than W."""
    ids = sorted(token for token in ignored_ends(spec) if token < vocab)
    found = np.full(MOST, NOBODY, np.int32)
    if len(ids) <= MOST:
        found[: len(ids)] = ids
    return found


def without_ends(xp: Any, z: Any, ids: Any) -> Any:
    """z float32 [R, V] with -inf at ids int32 [R, W]."""
    if xp is np:
        return change_at(xp, z, ids, lambda old: np.full_like(old, -np.inf))
    # By comparison, which goes into whatever reads z, where a scatter would be launches and a copy of z.
    column, gone = xp.arange(z.shape[-1], dtype=ids.dtype), xp.zeros(z.shape, xp.bool_)
    for place in range(MOST):
        gone |= column == ids[:, place : place + 1]
    return xp.where(gone, xp.float32(-xp.inf), z)
