"""The requests that all arms run (docs/spec/clients.md 5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.core.tokenizer import Tokenizer

BEST: Final = 12
"""Candidates whose scores are compared at each step: as many as a sampled row has."""

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


NEWEST: Final = 8
"""Ids of a prompt that sampled rows may draw, beside those of the breakers. Among all of a vocabulary a reply hardly
repeats itself, least of all with random weights, and a penalty that is forgotten changes no token."""


def case_params(case: str, prompt: np.ndarray, tokenizer: Tokenizer, *, max_tokens: int, seed: int) -> SamplingParams:
    """Ends are ignored, so that streams are of one length; with the best candidates of each step. prompt: int32 [P]."""
    values: dict[str, Any] = {"temperature": 0.0}
    if case != "greedy":
        values = {**SEEDED, "seed": seed, "allowed_token_ids": candidates(prompt, tokenizer)}
    if case == "ahead":
        values["dry_multiplier"] = 0.0
    return SamplingParams(**values, max_tokens=max_tokens, ignore_eos=True, logprobs=BEST, reasoning_format="none")


def candidates(prompt: np.ndarray, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The NEWEST different ids of a prompt, int32 [P], on which penalties lie from the first token, and ids that end
    what DRY compares."""
    newest = list(dict.fromkeys(prompt[::-1].tolist()))[:NEWEST]
    breakers = [tokenizer.encode(text, add_special=False)[-1:] for text in SEEDED["dry_sequence_breakers"]]
    return tuple(dict.fromkeys((*newest, *(id_ for ids in breakers for id_ in ids))))
