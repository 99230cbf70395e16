"""Log-probabilities of a row: of the model's logits, or of what a token was drawn from (spec S37, S38)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxcel.plugins.sampling.masses import masses
from mlxcel.plugins.sampling.threshold import repeat

NARROW = 20
"""Up to so many are ranked in the step; whoever asks for more gets all V, which `StepResult` ranks."""


def listed(wanted: int, vocab: int) -> int:
    """How many the step lists for a row that wants `wanted`, -1 for all: one of 0, NARROW and V."""
    if wanted == 0:
        return 0
    return min(NARROW, vocab) if 0 < wanted <= NARROW else vocab


def log_softmax(xp: Any, logits: Any) -> Any:
    """(z - m) - ln sum exp(z - m), float32 [R, V]; -inf stays."""
    row = masses(xp, logits)
    return row.shifted - xp.log(row.whole)


def best(xp: Any, values: Any, count: int) -> tuple[Any, Any]:
    """The `count` largest of each row: ids int32 [R, n], values float32 [R, n]; n is `count` or V.

    By (value descending, id ascending), or by id where all are asked for. A place with the value -inf says nothing.
    """
    vocab = values.shape[-1]
    if count >= vocab:
        ids = xp.broadcast_to(xp.arange(vocab, dtype=xp.int32), values.shape)
        return ids, values
    if xp is np:
        return _best_by_partition(values, count)
    rows = xp.arange(values.shape[0])

    def take(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        left, ids, found = state
        place = xp.argmax(left, axis=-1).astype(xp.int32)
        return left.at[rows, place].set(-xp.inf), ids.at[:, i].set(place), found.at[:, i].set(left[rows, place])

    shape = (values.shape[0], count)
    _, ids, found = repeat(xp, count, take, (values, xp.zeros(shape, xp.int32), xp.zeros(shape, xp.float32)))
    return ids, found


def _best_by_partition(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Only the values at or above the count-th are ordered."""
    vocab = values.shape[-1]
    ids = np.empty((len(values), count), np.int32)
    for place, row in enumerate(values):
        above = np.flatnonzero(row >= np.partition(row, vocab - count)[vocab - count])
        ids[place] = above[np.argsort(-row[above], kind="stable")[:count]]
    return ids, np.take_along_axis(values, ids, axis=-1)
