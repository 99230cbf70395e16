"""Rows of tools list what their draw compared (docs/spec/clients.md 5.4): the chain's own numbers, noise included."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling import noise
from mlxcel.plugins.sampling.chain import ChainSampler

VOCAB, ROWS, POSITION = 500, 6, 9
CLOSE = 2e-5
"""Of float32 differences of numbers up to 40."""

FILTERED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}


def drawn(*, compared: bool, closed: bool = False, **params: Any) -> Any:
    """A step of rows with seeds of their own over logits of their own."""
    sampler = ChainSampler(vocab=VOCAB)
    prompt = np.arange(8, dtype=np.int32)
    specs = [
        SequenceSpec("row", prompt, SamplingParams(**params, seed=seed, logprobs=20), compared=compared)
        for seed in range(ROWS)
    ]
    states = [sampler.open(spec) for spec in specs]
    arrays = sampler.pack(states, [POSITION] * ROWS, [False] * ROWS, closed=closed)
    logits = (3 * np.random.default_rng(1).standard_normal((ROWS, VOCAB))).astype(np.float32)
    carry = Carry(np.zeros(ROWS, np.int32), np.zeros(ROWS, np.float32))
    return sampler.draw(np, logits, arrays, carry)


def gumbel(seed: int) -> Any:
    """float32 [V], the noise of that row's draw by its definition."""
    seeds, zero, position = np.array([seed], np.uint32), np.zeros(1, np.uint32), np.array([POSITION], np.uint32)
    return noise.gumbel(np, noise.words(np, noise.row_keys(np, seeds, zero, position, noise.DRAW), VOCAB))[0]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("params", [{"temperature": 1.0}, FILTERED])
def test_scores_of_a_sampled_row_are_its_log_probabilities_and_its_noise(params: dict[str, Any], closed: bool) -> None:
    scores = drawn(compared=True, closed=closed, **params)
    processed = drawn(compared=False, logprobs_mode="processed", **params)
    assert np.array_equal(scores.tokens, processed.tokens)
    assert np.array_equal(scores.top_ids[:, 0], scores.tokens)
    for row in range(ROWS):
        known = dict(zip(processed.top_ids[row].tolist(), processed.top_logprobs[row].tolist(), strict=True))
        added = gumbel(row)
        both = [
            (score - float(added[token]), known[token])
            for token, score in zip(scores.top_ids[row].tolist(), scores.top_logprobs[row].tolist(), strict=True)
            if token in known and np.isfinite(score)
        ]
        assert len(both) >= 2
        # Scores are not normalised: they differ from log-probabilities by one number a row.
        assert np.ptp([score - logprob for score, logprob in both]) < CLOSE


def test_scores_of_a_greedy_row_are_its_processed_log_probabilities() -> None:
    params = {"temperature": 0.0, "repetition_penalty": 1.5}
    scores = drawn(compared=True, **params)
    processed = drawn(compared=False, logprobs_mode="processed", **params)
    for field in ("tokens", "logprobs", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(scores, field), getattr(processed, field)), field


def test_who_lists_scores_changes_no_neighbour() -> None:
    """S3: greedy, sampled, listing scores or log-probabilities, in one step and alone."""
    sampler = ChainSampler(vocab=VOCAB)
    plain = SequenceSpec("row", np.arange(8, dtype=np.int32), SamplingParams(temperature=0.0, logprobs=2))
    kinds = [
        plain,
        attrs.evolve(plain, compared=True),
        attrs.evolve(plain, params=SamplingParams(temperature=1.0, seed=4, logprobs=2)),
        attrs.evolve(plain, params=SamplingParams(temperature=1.0, seed=4, logprobs=2), compared=True),
    ]
    logits = (3 * np.random.default_rng(2).standard_normal((1, VOCAB))).astype(np.float32)
    states = [sampler.open(spec) for spec in kinds]

    def draw(chosen: list[Any]) -> Any:
        count = len(chosen)
        arrays = sampler.pack(chosen, [POSITION] * count, [False] * count)
        carry = Carry(np.zeros(count, np.int32), np.zeros(count, np.float32))
        return sampler.draw(np, np.repeat(logits, count, axis=0), arrays, carry)

    together = draw(states)
    for place, state in enumerate(states):
        alone = draw([state])
        for field in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            assert np.array_equal(getattr(together, field)[place], getattr(alone, field)[0]), (place, field)
