"""Scores of known tokens: a sampler's answer to `Sampler.pack_scores`, the same for every sampler. Nothing is drawn."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.sampling import Drawn
from mlxcel.plugins.sampling.logprobs import best, listed, log_softmax
from mlxcel.plugins.sampling.status import FINE, NOTHING_ALLOWED, of_logits

SCORING: Final = ("score",)
"""The stages of a step that scores: it has no other."""


def pack_scores(targets: np.ndarray, top: int, vocab: int) -> SamplingArrays:
    """As `Sampler.pack_scores`; V is `vocab`."""
    return SamplingArrays(stages=SCORING, params={"target": targets}, top_logprobs=listed(top, vocab))


def draw_scores(xp: Any, logits: Any, sampling: SamplingArrays) -> Drawn:
    """logits [R, V] of a step that `pack_scores` packed. The status is that of the raw logits; a row where no id has a
    probability has nothing to say of its target."""
    raw, targets = logits.astype(xp.float32), sampling.params["target"]
    status = of_logits(xp, raw)
    empty = (status == FINE) & (xp.max(raw, axis=-1) == xp.float32(-xp.inf))
    status = xp.where(empty, xp.int32(NOTHING_ALLOWED), status)
    fine = status == FINE
    values = log_softmax(xp, xp.where(fine[:, None], raw, xp.float32(0)))
    logprobs = xp.take_along_axis(values, targets[:, None], axis=-1)[:, 0]
    top_ids, top_logprobs = best(xp, values, sampling.top_logprobs) if sampling.top_logprobs else (None, None)
    return Drawn(xp.where(fine, targets, xp.int32(-1)), status, logprobs, top_ids, top_logprobs)
