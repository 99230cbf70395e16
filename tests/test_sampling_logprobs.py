"""Raw log-probabilities of drawn tokens (docs/spec/engine.md 4.10)."""

import numpy as np
import pytest
from sampling_rows import LIBRARIES, LOGPROB_TOLERANCE, chain, draw, flat_logits, params, told

from mlxcel.core.plan import StepResult
from mlxcel.plugins.sampling.logprobs import NARROW, best, log_softmax

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
@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_best_are_those_of_a_stable_sort(xp, size, count):
    """Spec S38, S39: value descending, id ascending; -inf is in no list."""
    values = np.round(np.random.default_rng(size).standard_normal((4, size)) * 2).astype(np.float32)
    values[1:, : size // 2] = -np.inf
    values[2] = -np.inf
    top = [np.asarray(field) for field in best(xp, xp.asarray(values), count)]
    tokens = np.zeros(4, np.int32)
    result = StepResult(tokens, tokens, values[:, 0], *top)
    for place, row in enumerate(values):
        order = [token for token in np.argsort(-row, kind="stable").tolist() if row[token] > -np.inf]
        expected = tuple((token, float(row[token])) for token in order[:count])
        assert result.token_logprobs(place, count).top == expected


def test_logprobs_do_not_know_temperature_filters_or_masks(xp):
    """Spec S37: raw. Temperatures 0, 0.1 and 2, filters, padding ids: one and the same list."""
    logits = np.tile(flat_logits(1, 317, 9), (4, 1))
    rows = [params(seed=6, logprobs=5, **row) for row in ({"temperature": 0}, {"temperature": 0.1}, {"temperature": 2})]
    rows.append(params(seed=6, logprobs=5, top_k=2, min_p=0.5))
    drawn = draw(xp, logits, rows, [4] * 4, sampler=chain(317, 300))
    assert np.all(drawn.top_ids == drawn.top_ids[0])
    assert np.all(drawn.top_logprobs == drawn.top_logprobs[0])
    values = np.asarray(log_softmax(xp, xp.asarray(logits)))
    assert np.allclose(drawn.logprobs, values[np.arange(4), drawn.tokens], rtol=0, atol=LOGPROB_TOLERANCE)
    assert drawn.tokens[2] not in dict(told(drawn, 2, rows[2]).top)  # reported also outside the list


def test_logprobs_are_made_only_when_a_row_asks():
    """None: nothing. 0: the drawn token's alone. Else a list of one of two lengths, so that numbers choose no step."""
    logits = flat_logits(2, 317)
    assert draw(np, logits, [params()] * 2, [0, 0])[2:5] == (None, None, None)
    only = draw(np, logits, [params(), params(logprobs=0)], [0, 0])
    assert only.logprobs.shape == (2,)
    assert only.top_ids is only.top_logprobs is None
    for wanted, length in ((1, NARROW), (NARROW, NARROW), (NARROW + 1, 317), (-1, 317), (10**6, 317)):
        rows = [params(logprobs=1), params(logprobs=wanted)]
        drawn = draw(np, logits, rows, [0, 0])
        assert drawn.top_ids.shape == (2, length)
        assert len(told(drawn, 0, rows[0]).top) == 1
        assert len(told(drawn, 1, rows[1]).top) == (min(wanted, 317) if wanted > 0 else 317)
