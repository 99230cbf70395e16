"""Rows that an engine runs before it counts as ready: what serving needs is made by then (docs/spec/engine.md C62)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mlxcel.core.bind_params import Caps
from mlxcel.core.params import SamplingParams
from mlxcel.prepare import Prompt, sequence_spec

if TYPE_CHECKING:
    from mlxcel.core.request import SequenceSpec
    from mlxcel.load import LoadedModel

WARM_UP: Final = "warm-up"
"""The id of these rows. No client hears of them, nothing counts them."""


def warm_up_rows(model: LoadedModel) -> tuple[SequenceSpec, ...]:
    """One greedy row and one that draws, of two tokens each: a prompt's piece, and a step behind it."""
    if model.facts.context < 4:
        return ()
    kinds = (SamplingParams(temperature=0, max_tokens=2), SamplingParams(seed=0, max_tokens=2))
    caps = Caps(max_n=1)
    return tuple(sequence_spec(model, Prompt((0, 0)), params, request_id=WARM_UP, caps=caps) for params in kinds)
