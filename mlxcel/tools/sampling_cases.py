"""How the measuring tools draw: two cases, of which one uses every stage that a server's requests do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxcel.core.params import SamplingParams

SEED: Final = 1234

CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repeat_last_n": 64,
        "dry_multiplier": 0.8,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
    },
}
"""docs/spec/clients.md 5.3."""


def case_params(case: str, *, max_tokens: int, seed: int = SEED) -> SamplingParams:
    """Of `max_tokens` tokens: what ends a reply early is ignored, so that lengths can be compared."""
    return SamplingParams(**CASES[case], max_tokens=max_tokens, seed=seed, ignore_eos=True)
