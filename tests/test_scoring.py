"""Scores as array code (docs/spec/engine.md S37 to S39, S45): NumPy and JAX, whatever the sampler's stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_rows import LIBRARIES, LOGPROB_TOLERANCE, chain, flat_logits

from mlxcel.core.plan import SamplingArrays, StepResult
from mlxcel.core.sampling import Carry

NOTHING = Carry(None, None)


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return LIBRARIES[request.param]


def scored(xp, logits, targets, top):
    sampler = chain(logits.shape[-1])
    sampling = sampler.pack_scores(np.asarray(targets, np.int32), top)
    if xp is np:
        return StepResult(*sampler.draw(np, logits, sampling, NOTHING))

    @jax.jit
    def step(logits, params):
        return sampler.draw(jnp, logits, SamplingArrays(sampling.stages, params, sampling.top_logprobs), NOTHING)

    drawn = step(jnp.asarray(logits), dict(sampling.params))
    return StepResult(*(None if array is None else np.asarray(array) for array in drawn))


@pytest.mark.parametrize("vocab", [1, 2, 7, 317, 49152])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_targets_are_scored_by_the_raw_logits(xp, vocab, top):
    """S38, against float64 and a stable sort; ties by id; what is removed has no chance and ranks last."""
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((4, vocab)) * 8).astype(np.float32) / 4
    logits[1, 1::3] = -np.inf
    logits[2] *= 1e4
    targets = rng.integers(0, vocab, 4)
    found = scored(xp, logits, targets, top)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    at = exact[np.arange(4), targets]
    assert np.array_equal(found.tokens, targets)
    assert not found.status.any()
    near = {"rtol": LOGPROB_TOLERANCE, "atol": LOGPROB_TOLERANCE}
    np.testing.assert_allclose(found.logprobs, at, **near)
    if not top:
        assert found.top_ids is found.top_logprobs is None
        return
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : min(20, vocab)]
    if vocab <= 20:  # all of it, by id
        assert np.array_equal(found.top_ids, np.tile(np.arange(vocab), (4, 1)))
        np.testing.assert_allclose(found.top_logprobs, exact, **near)
    else:
        assert np.array_equal(found.top_ids, order)
        np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(exact, order, axis=-1), **near)


def test_a_row_does_not_know_the_others(xp):
    """Bits alone and beside others."""
    logits = flat_logits(5, 317, 9)
    together = scored(xp, logits, [3] * 5, 5)
    for place in range(5):
        alone = scored(xp, logits[place : place + 1], [3], 5)
        assert alone.logprobs.tobytes() == together.logprobs[place : place + 1].tobytes()
        assert alone.top_logprobs.tobytes() == together.top_logprobs[place : place + 1].tobytes()


def test_rows_that_say_nothing(xp):
    """S45: 1 for NaN and +inf, 2 where no id has a probability; the row between them is unharmed."""
    logits = flat_logits(4, 7)
    logits[0, 2], logits[2, 2], logits[3] = np.nan, np.inf, -np.inf
    found = scored(xp, logits, [2, 2, 2, 2], 3)
    assert found.status.tolist() == [1, 0, 1, 2]
    assert found.tokens.tolist() == [-1, 2, -1, -1]
    alone = scored(xp, logits[1:2], [2], 3)
    assert found.logprobs[1] == alone.logprobs[0]


def test_a_list_of_any_length_is_one_of_three():
    """S44: nothing, 20, or all V by their ids: the length that was asked for chooses no executable."""
    sampler = chain(317)
    targets = np.zeros(2, np.int32)
    assert [sampler.pack_scores(targets, top).top_logprobs for top in (0, 1, 7, 20, 21, 317)] == [
        0,
        20,
        20,
        20,
        317,
        317,
    ]
    assert {sampler.pack_scores(targets, top).stages for top in (0, 7, 317)} == {("score",)}
