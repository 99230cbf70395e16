"""The requests that all arms run (docs/spec/clients.md 5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxcel.core.params import SamplingParams

BEST: Final = 2
"""Candidates that are recorded of each step."""

SEEDED: Final[Mapping[str, Any]] = {
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
}
"""Every part of a sampler that servers are asked for in earnest."""


def case_params(case: str, *, max_tokens: int, seed: int) -> SamplingParams:
    """Ends are ignored, so that streams are of one length; with the two best candidates of each step."""
    values: Mapping[str, Any] = {"temperature": 0.0} if case == "greedy" else {**SEEDED, "seed": seed}
    return SamplingParams(**values, max_tokens=max_tokens, ignore_eos=True, logprobs=BEST, reasoning_format="none")
