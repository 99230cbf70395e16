"""Raw log-probabilities of drawn tokens (docs/spec/engine.md 4.10)."""

import numpy as np
import pytest
from sampling_rows import LIBRARIES, LOGPROB_TOLERANCE, draw, flat_logits, params

from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.logprobs import best, log_softmax

SIZES = [1, 2, 7, 317, 49152]


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return LIBRARIES[request.param]


@pytest.mark.parametrize("size", SIZES)
def test_logprobs_are_the_log_softmax_of_the_raw_logits(xp, size):
    """Spec S38, against float64."""
    logits = (np.random.default_rng(size).standard_normal((3, size)) * 5).astype(np.float32)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    error = np.abs(np.asarray(log_softmax(xp, xp.asarray(logits))) - exact)
    assert np.max(error / np.maximum(1, np.abs(exact))) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("size", SIZES)
def test_the_best_are_those_of_a_stable_sort(xp, size):
    """Spec S38: value descending, id ascending; -inf is listed when nothing better is left."""
    values = np.round(np.random.default_rng(size).standard_normal((4, size)) * 2).astype(np.float32)
    values[1:, : size // 2] = -np.inf
    values[2] = -np.inf
    top_ids, top = best(xp, xp.asarray(values), 20)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :20]
    assert np.array_equal(np.asarray(top_ids), order)
    assert np.array_equal(np.asarray(top), np.take_along_axis(values, order, axis=-1))


def test_logprobs_do_not_know_temperature_filters_or_masks(xp):
    """Spec S37: raw. Temperatures 0, 0.1 and 2, filters, padding ids: one and the same list."""
    logits = np.tile(flat_logits(1, 317, 9), (4, 1))
    rows = [params(seed=6, logprobs=5, **row) for row in ({"temperature": 0}, {"temperature": 0.1}, {"temperature": 2})]
    rows.append(params(seed=6, logprobs=5, top_k=2, min_p=0.5))
    drawn = draw(xp, logits, rows, [4] * 4, sampler=ChainSampler(vocab=317, tokenizer_size=300))
    assert np.all(drawn.top_ids == drawn.top_ids[0])
    assert np.all(drawn.top_logprobs == drawn.top_logprobs[0])
    values = np.asarray(log_softmax(xp, xp.asarray(logits)))
    assert np.allclose(drawn.logprobs, values[np.arange(4), drawn.tokens], rtol=0, atol=LOGPROB_TOLERANCE)
    assert drawn.tokens[2] not in drawn.top_ids[2]  # reported also outside the list


def test_logprobs_are_made_only_when_a_row_asks():
    """None: nothing. 0: the drawn token's alone. Else as many as the row that wants most."""
    logits = flat_logits(2, 7)
    assert draw(np, logits, [params()] * 2, [0, 0])[2:5] == (None, None, None)
    only = draw(np, logits, [params(), params(logprobs=0)], [0, 0])
    assert only.logprobs.shape == (2,)
    assert only.top_ids is only.top_logprobs is None
    assert draw(np, logits, [params(logprobs=2), params(logprobs=4)], [0, 0]).top_ids.shape == (2, 4)
