"""Raw log-probabilities: log-softmax of the model's logits, before anything changed them (spec S37, S38)."""

from __future__ import annotations

from typing import Any

from mlxcel.plugins.sampling.threshold import tree_sum


def log_softmax(xp: Any, logits: Any) -> Any:
    """(z - m) - ln sum exp(z - m), float32 [R, V]."""
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    return shifted - xp.log(tree_sum(xp, xp.exp(shifted)))


def best(xp: Any, values: Any, count: int) -> tuple[Any, Any]:
    """The `count` largest of each row by (value descending, id ascending): ids int32 [R, n], values float32 [R, n].

    One argmax for each: no sort, and n is small.
    """
    ids = xp.arange(values.shape[-1], dtype=xp.int32)[None, :]
    found, scores = [], []
    left = values
    taken = xp.zeros(values.shape, bool)
    for _ in range(min(count, values.shape[-1])):
        # -inf may be a value: a place that was taken must lose even against it.
        top = xp.max(left, axis=-1, keepdims=True)
        is_top = (left == top) & ~taken
        place = xp.argmax(is_top, axis=-1).astype(xp.int32)[:, None]
        found.append(place)
        scores.append(top)
        taken = taken | (ids == place)
        left = xp.where(taken, xp.float32(-xp.inf), left)
    return xp.concatenate(found, axis=-1), xp.concatenate(scores, axis=-1)
