"""Mixtures of experts on NumPy: the formula, the choice, and row invariance."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from company import PATIENT, check_company, company
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_family import Layered, layered_checkpoint
from real_engine import assert_same_bits, real_engine
from tested_backends import REFERENCE, backend_in_test

from mlxcel_reference_numpy.context import NumpyContext
from mlxcel_reference_numpy.experts import choose_experts
from mlxcel_reference_numpy.weights import Weights

E, F, D = 6, 20, 24
LARGE = (4, 512, 768)
"""E, F and D of a real layer's kind."""

TOLERANCE = 2e-6
"""Of a float32 sum of up to 6 values near 1, each a sum of 24, against float64."""


def seeded(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def experts(e, f, d):
    """gate, up and down."""
    shapes = [(e, f, d), (e, f, d), (e, d, f)]
    return [seeded(*shape, seed=seed) / np.float32(5) for seed, shape in enumerate(shapes)]


SMALL = experts(E, F, D)


def mixture(x, router, top_k, *, renormalise=True, weights=SMALL):
    """`moe` of x [T, D] by router logits [T, E], on the tested backend."""
    if backend_in_test() != REFERENCE:
        from keeping_jax import moe

        return moe(x, router, weights, top_k=top_k, renormalise=renormalise)
    plan = SimpleNamespace(num_rows=1, query_start=np.array([0, len(x)]))
    plain = {(f"expert_{name}", 0): values for name, values in zip(("gate", "up", "down"), weights, strict=True)}
    context = NumpyContext(plan, np.zeros(len(x), np.int32), Weights(1, {}, plain, 0), [], 1)
    return context.moe(x, router, layer=0, top_k=top_k, activation="silu", renormalise=renormalise)


def choose(logits, top_k, *, renormalise):
    """Experts [T, top_k] and their shares, on the tested backend."""
    if backend_in_test() == REFERENCE:
        return choose_experts(logits, top_k, renormalise)
    from mlxcel_jax_cuda import experts

    return tuple(map(np.asarray, experts.choose_experts(logits, top_k, renormalise)))


def naive(x, router, top_k, renormalise):
    """float64, token by token and expert by expert, from the formula. No ties."""
    gates, ups, downs = (values.astype(np.float64) for values in SMALL)
    rows = []
    for token, logits in zip(x.astype(np.float64), router.astype(np.float64), strict=True):
        shares = [math.exp(score - max(logits)) for score in logits]
        shares = [share / sum(shares) for share in shares]
        best = sorted(range(E), key=lambda e: -shares[e])[:top_k]
        total = sum(shares[e] for e in best) if renormalise else 1.0
        y = np.zeros(D)
        for e in best:
            gate, up = gates[e] @ token, ups[e] @ token
            y += shares[e] / total * (downs[e] @ (gate / (1 + np.exp(-gate)) * up))
        rows.append(y)
    return np.array(rows)


@pytest.mark.on_jax(most=5)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5, E])
@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
def test_a_mixture_is_the_formula(backend, tokens, top_k, renormalise):
    x, router = seeded(tokens, D, seed=3), 2 * seeded(tokens, E, seed=4)
    expected = naive(x, router, top_k, renormalise)
    ours = mixture(x, router, top_k, renormalise=renormalise)
    assert ours.dtype == np.float32
    assert np.abs(ours - expected).max() <= TOLERANCE * max(1, np.abs(expected).max())


@pytest.mark.parametrize(
    ("logits", "top_k", "chosen"),
    [
        ([0, 0, 0, 0], 2, [0, 1]),
        ([1, 2, 2, 2], 2, [1, 2]),
        ([3, 1, 3, 5], 3, [3, 0, 2]),
        ([1, 0, 1, 0], 4, [0, 2, 1, 3]),
        ([-math.inf, 0, -math.inf, 0], 3, [1, 3, 0]),
        ([-200, -300, 0, -400], 3, [2, 0, 1]),  # shares of 0 in float32 are a tie
    ],
)
def test_ties_go_to_the_lowest_index(backend, logits, top_k, chosen):
    found, _shares = choose(np.array([logits], np.float32), top_k, renormalise=True)
    assert found.tolist() == [chosen]


def test_shares_are_a_softmax_over_all_or_over_the_chosen(backend):
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    _, plain = choose(logits, 2, renormalise=False)
    _, whole = choose(logits, 2, renormalise=True)
    np.testing.assert_allclose(plain, [[0.5, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(whole, [[2 / 3, 1 / 3]], rtol=1e-6)
    assert choose(1000 * logits, 1, renormalise=False)[1].tolist() == [[1.0]]


def test_all_experts_without_renormalising_are_the_same_as_with(backend):
    """Their shares sum to 1 but for rounding."""
    x, router = seeded(5, D, seed=5), seeded(5, E, seed=6)
    np.testing.assert_allclose(mixture(x, router, E, renormalise=False), mixture(x, router, E), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("shape", "top_k", "order"),
    [*(((E, F, D), top_k, order) for top_k in (1, 2, E) for order in "CF"), (LARGE, 2, "F")],
)
def test_a_mixture_does_not_know_the_tokens_beside_it(shape, top_k, order):
    """Any number of tokens, in any place and memory order, of whom any share goes to the same expert."""
    rng = np.random.default_rng(top_k)
    weights = SMALL if shape == (E, F, D) else experts(*shape)
    x, router = seeded(17, shape[2], seed=7), seeded(17, shape[0], seed=8)
    router[::3] = router[0]  # a third of them through the same experts

    def through(picked, order="C"):
        return mixture(np.array(x[picked], order=order), np.array(router[picked], order=order), top_k, weights=weights)

    alone = np.concatenate([through([token]) for token in range(len(x))])
    for count in (2, 3, 8, 17):
        picked = rng.permutation(17)[:count]
        assert_same_bits(alone[picked], through(picked, order), f"{count} tokens")


def test_a_token_that_is_no_number_spoils_no_other(backend):
    """NaN and infinity, in the token or in its router: the others' bits stay."""
    x, router = seeded(9, D, seed=9), seeded(9, E, seed=10)
    clean = mixture(x, router, 2)
    x[2], x[4, 0], router[6], router[7, 1] = np.nan, np.inf, np.nan, np.inf
    with np.errstate(all="ignore"):
        got = mixture(x, router, 2)
    others = [0, 1, 3, 5, 8]
    assert_same_bits(clean[others], got[others])
    assert not np.isfinite(got[[2, 4, 6, 7]]).all(axis=-1).any()


@pytest.fixture(scope="module", params=[True, False], ids=["renormalised", "plain"])
def engine(backend, request):
    checkpoint = layered_checkpoint("full+experts", "window 16+experts", renormalise=request.param)
    return real_engine(checkpoint, Layered())


@pytest.mark.on_jax(most=1)
@settings(max_examples=8, **PATIENT)
@given(data=st.data())
def test_rows_through_experts_do_not_know_their_company(engine, data):
    check_company(engine, data.draw(company(engine.vocab)))
