"""How the rows of a cell draw."""

from __future__ import annotations

from typing import Final

from mlxcel.core.params import SamplingParams
from mlxcel.tools.parity.cases import SEEDED

SEED: Final = 1234


def case_params(case: str, *, max_tokens: int) -> SamplingParams:
    """ "greedy", or "seeded", whose values are engine-parity's. What would end a reply early is ignored."""
    values = {"temperature": 0.0} if case == "greedy" else SEEDED
    return SamplingParams(**values, max_tokens=max_tokens, seed=SEED, ignore_eos=True)
