"""What is drawn from, after every stage of docs/spec/engine.md 4.6 to 4.8, against the formulas in float64."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from chain_reference import Undecided
from chain_reference import chain as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_rows import LIBRARIES, WORKED, Words, draw, draw_states, params, spec, told

from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.masses import masses
from mlxcel.plugins.sampling.noise import XTC_GATE, row_keys, uniform, words
from mlxcel.plugins.sampling.xtc import xtc

LOG_TOLERANCE = 3e-5
"""float32 exp, sums and logarithms behind a division by T, relative to max(1, |value|)."""

FARTHEST = 80.0
"""Below -80 a survivor's mass may underflow in float32, and a bound on its distance from others with it."""


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return LIBRARIES[request.param]


@functools.cache
def sampler_for(vocab, texts=()):
    return ChainSampler(vocab=vocab, tokenizer=Words(vocab, texts))


def drawn_from(xp, logits, row, *, sampler=None, eos_ids=(), position=3):
    """{id: log-probability} that a token of this row is drawn from, and its status."""
    sampler = sampler or sampler_for(len(logits))
    row = row.clone(logprobs=-1, logprobs_mode="processed")
    drawn = draw_states(xp, logits[None], [sampler.open(spec(row, eos_ids=eos_ids))], [position], sampler=sampler)
    assert drawn.status.tolist() == [0]
    found = told(drawn, 0, row)
    assert found.token in dict(found.top) or row.greedy
    return dict(found.top)


def kept(xp, row, **more):
    return sorted(drawn_from(xp, WORKED, row, **more))


def same_distribution(found, expected):
    """Survivors exactly, log-probabilities within the tolerance. expected: {id: logit}."""
    assert sorted(found) == sorted(expected)
    m = max(expected.values())
    log_whole = m + math.log(math.fsum(math.exp(v - m) for v in expected.values()))
    for token, value in expected.items():
        exact = value - log_whole
        assert abs(found[token] - exact) <= LOG_TOLERANCE * max(1, abs(exact), abs(value)), token


# --- the worked rows --------------------------------------------------------------------------------------------------


@pytest.mark.on_jax(most=5)
@pytest.mark.parametrize(
    ("row", "survivors"),
    [
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_n_sigma": 1}, [0, 1, 2]),
        ({"top_n_sigma": 0.5}, [0, 1]),
        ({"top_p": 0.7}, [0, 1, 2]),
        ({"top_p": 0.91}, [0, 1, 2, 3, 4]),
        ({"typical_p": 0.2}, [1]),
        ({"typical_p": 0.5}, [0, 1, 2]),
        ({"typical_p": 0.9}, [0, 1, 2, 3]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        ({"min_p": 0.2, "temperature": 2}, [0, 1, 2, 3]),
        ({"min_p": 0.2, "temperature": 2, "samplers": ["temperature", "min_p"]}, [0, 1, 2, 3, 4, 5]),
        ({"xtc_probability": 1, "xtc_threshold": 0.09}, [3, 4, 5, 6]),
        ({"top_p": 0, "min_p": 1, "top_k": 2}, [0]),
        ({"mirostat": 2, "mirostat_tau": 1}, [0, 1]),
        ({"mirostat": 1, "mirostat_tau": 1}, [0, 1]),
        # Spec S21: at least so many by the stage's own measure.
        ({"top_p": 0, "min_keep": 3}, [0, 1, 2]),
        ({"min_p": 1, "min_keep": 2}, [0, 1]),
        ({"typical_p": 0.2, "min_keep": 2}, [1, 2]),
        ({"top_k": 2, "min_keep": 5}, [0, 1]),
        ({"top_n_sigma": 0.5, "min_keep": 5}, [0, 1]),
        ({"top_p": 0.1, "min_keep": 7}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 0.1, "min_keep": 2**31 - 1}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 0.1, "min_keep": 1}, [0]),
        ({"xtc_probability": 1, "xtc_threshold": 0.09, "min_keep": 4}, [3, 4, 5, 6]),
        ({"xtc_probability": 1, "xtc_threshold": 0.09, "min_keep": 5}, [0, 1, 2, 3, 4, 5, 6]),
        # Spec S32: inert beside mirostat.
        ({"mirostat": 2, "mirostat_tau": 1, "top_k": 1, "top_p": 0.1, "xtc_probability": 1, "min_keep": 7}, [0, 1]),
        # What a list of samplers leaves out is off (spec S1).
        ({"top_k": 2, "min_p": 0.2, "samplers": ["min_p"]}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_the_worked_row(xp, row, survivors):
    """The tables of spec 4.6 and 4.8, and one example of each rule beside them."""
    assert kept(xp, params(**row)) == survivors


def test_h_e12_the_place_of_the_temperature_decides_who_survives(xp):
    """Spec S2: last by default and as the canonical list has it, first where `samplers` says so; never ignored."""
    row = params(min_p=0.2, temperature=2)
    assert kept(xp, row) == kept(xp, row.clone(samplers=("min_p", "temperature"))) == [0, 1, 2, 3]
    first = row.clone(samplers=("temperature", "min_p"))
    assert kept(xp, first) == [0, 1, 2, 3, 4, 5]
    last, early = drawn_from(xp, WORKED, row), drawn_from(xp, WORKED, first)
    assert last[0] - last[1] == pytest.approx(early[0] - early[1], abs=LOG_TOLERANCE)  # one division, in either place


@pytest.mark.on_jax(most=0)
def test_each_stage_sees_the_survivors_of_the_one_before(xp):
    """Spec S4: renormalised. Behind top_k 3 the row .40 .25 .15 weighs .5, .3125, .1875."""
    assert kept(xp, params(top_k=3, top_p=0.49)) == [0]
    assert kept(xp, params(top_k=3, top_p=0.8)) == [0, 1]
    assert kept(xp, params(top_p=0.8)) == [0, 1, 2]
    assert kept(xp, params(top_k=3, typical_p=0.2)) == [1]
    assert kept(xp, params(top_k=4, xtc_probability=1, xtc_threshold=0.16)) == [2, 3]
    assert kept(xp, params(xtc_probability=1, xtc_threshold=0.16)) == [1, 2, 3, 4, 5, 6]


def test_worked_dynamic_temperature(xp):
    """Spec S25: T0 = 1, range 0.5, exponent 1 gives T = 1.29550 on the worked row."""
    found = drawn_from(xp, WORKED, params(dynatemp_range=0.5))
    assert (WORKED[0] - WORKED[6]) / (found[0] - found[6]) == pytest.approx(1.29550, abs=5e-6)  # printed digits


@pytest.mark.parametrize("row", [{"top_k": 2}, {"top_k": 2, "samplers": ["temperature", "top_k"]}])
def test_dynamic_temperature_of_few_survivors(xp, row):
    """Spec S25: over the survivors at its place; one survivor stays as it is; T < 1e-5 is argmax."""
    logits = np.array([3, 3, -np.inf, -np.inf], np.float32)
    assert drawn_from(xp, logits, params(dynatemp_range=0.7, **row))[0] == pytest.approx(-math.log(2), abs=1e-6)
    lone = np.array([-np.inf, 3, -np.inf, -np.inf], np.float32)
    assert drawn_from(xp, lone, params(temperature=0.0, dynatemp_range=0.7, **row)) == {1: 0.0}
    steep = np.array([0, 40, -np.inf, -np.inf], np.float32)
    cold = params(temperature=0.5, dynatemp_range=0.5, **row)
    assert drawn_from(xp, steep, cold) == {1: 0.0}


def test_worked_adaptive_p(xp):
    """Spec S26: the new logits of the worked row, a = 0.3, d = 0.9, up to one constant."""
    found = drawn_from(xp, WORKED, params(adaptive_target=0.3))
    logits = [4.167, 4.762, 3.333, 2.333, 1.444, 0.737, 0.249]
    for token in range(7):
        assert found[token] - found[0] == pytest.approx(logits[token] - logits[0], abs=2e-3)  # printed digits


def test_a_cold_mirostat_row_is_argmax(xp):
    """Spec S29."""
    for version in (1, 2):
        assert drawn_from(xp, WORKED[::-1].copy(), params(mirostat=version, temperature=9e-6)) == {6: 0.0}


# --- XTC --------------------------------------------------------------------------------------------------------------


def test_h_e7_the_top_token_never_appears_at_any_step(xp):
    """Spec S22: XTC with probability 1 at every token, the first included."""
    logits = np.tile(np.log(np.array([0.4, 0.25, 0.15, 0.08, 0.08, 0.04], np.float32)), (60, 1))
    rows = [params(seed=seed % 6, xtc_probability=1, xtc_threshold=0.1) for seed in range(60)]
    tokens = draw(xp, logits, rows, [seed // 6 for seed in range(60)]).tokens.tolist()
    assert not {0, 1} & set(tokens)
    assert {2, 3} <= set(tokens)


def test_xtc_counts_a_probability_at_the_threshold_itself(xp):
    """Spec S22: p >= threshold. The threshold is the very float32 that the stage computes; above it one is too few."""
    z = xp.asarray(np.log(np.array([[0.5, 0.3, 0.2]], np.float32)))
    row = masses(xp, z)
    at = (row.weight / row.whole)[:, 1:2]
    hit, exempt = xp.ones((1, 1), bool), xp.zeros((1, 3), bool)
    for threshold, stays in ((at, [False, True, True]), (xp.nextafter(at, xp.float32(1)), [True, True, True])):
        left = np.asarray(xtc(xp, z, threshold, hit, exempt))
        assert np.isfinite(left[0]).tolist() == stays


def test_ends_and_newlines_are_exempt_from_xtc(xp):
    """Spec S22: neither removed nor counted, so that a reply can still end."""
    texts = ((0, b"\n"), (1, b" \n"), (2, b"\n\n\n"), (3, b""))
    sampler = sampler_for(7, texts)
    row = params(xtc_probability=1, xtc_threshold=0.09)
    assert kept(xp, row, sampler=sampler) == [0, 2, 3, 4, 5, 6]
    assert kept(xp, row, sampler=sampler, eos_ids=(1, 5)) == [0, 1, 2, 3, 4, 5, 6]
    assert kept(xp, row, eos_ids=(0,)) == [0, 3, 4, 5, 6]
    assert kept(xp, row, eos_ids=range(7)) == [0, 1, 2, 3, 4, 5, 6]
    assert kept(xp, row, eos_ids=(10**6,)) == [3, 4, 5, 6]


def test_equal_probabilities_qualify_or_go_together(xp):
    """Spec S4, S22: above the smallest qualifying p goes; equal to it stays, however many."""
    row = params(xtc_probability=1, xtc_threshold=0.2)
    logits = np.log(np.array([0.25, 0.25, 0.25, 0.25], np.float32))
    assert sorted(drawn_from(xp, logits, row)) == [0, 1, 2, 3]
    logits = np.log(np.array([0.3, 0.24, 0.3, 0.16], np.float32))
    assert sorted(drawn_from(xp, logits, row)) == [1, 3]


def test_the_gate_is_a_uniform_of_the_position(xp):
    """Spec 4.9: open iff the uniform of purpose 1 is below the probability, from the seed and the position alone."""
    for position in range(12):
        key = row_keys(np, *(np.array([word], np.uint32) for word in (42, 0, position)), XTC_GATE)
        u = float(uniform(np, words(np, key, 1))[0, 0])
        for probability, open_ in ((u, False), (min(1, np.nextafter(np.float32(u), 2)), True)):
            row = params(seed=42, xtc_probability=float(probability), xtc_threshold=0.09)
            assert kept(xp, row, position=position) == ([3, 4, 5, 6] if open_ else [0, 1, 2, 3, 4, 5, 6])


# --- every stage and any chain of them --------------------------------------------------------------------------------

quarters = st.integers(-160, 160).map(lambda n: n / 4)
values = st.one_of(quarters, st.just(-math.inf), st.sampled_from([1e4, -1e4, 0.0, -0.0]), st.floats(-20, 20, width=32))


def finite_somewhere(row):
    return any(value > -math.inf for value in row)


def random_row(seed, size):
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(size) * rng.choice([0.5, 2, 6])
    if seed % 3 == 0:
        row = np.asarray(jnp.asarray(row, jnp.bfloat16).astype(jnp.float32))
    if seed % 5 == 0:
        row = np.where(rng.random(size) < 0.5, -np.inf, row)
        row[seed % size] = 1.0
    return row.tolist()


def rows_of(size):
    if size > 7:
        return st.integers(0, 10**6).map(lambda seed: random_row(seed, size))
    return st.lists(values, min_size=size, max_size=size).filter(finite_somewhere)


STAGE_FIELDS = {
    "top_n_sigma": st.fixed_dictionaries({"top_n_sigma": st.sampled_from([0.1, 0.7, 1, 2.5, 1e9])}),
    "top_k": st.fixed_dictionaries({"top_k": st.sampled_from([2, 3, 5, 40, 10**6])}),
    "typ_p": st.fixed_dictionaries({"typical_p": st.sampled_from([1e-6, 0.2, 0.5, 0.9, 0.9999])}),
    "top_p": st.fixed_dictionaries({"top_p": st.sampled_from([0, 1e-6, 0.2, 0.5, 0.9, 0.9999])}),
    "min_p": st.fixed_dictionaries({"min_p": st.sampled_from([1e-6, 0.05, 0.5, 1])}),
    "xtc": st.fixed_dictionaries(
        {"xtc_probability": st.sampled_from([0.5, 1]), "xtc_threshold": st.sampled_from([0, 0.02, 0.1, 0.3, 0.5])}
    ),
    "temperature": st.fixed_dictionaries({"temperature": st.sampled_from([1e-6, 1e-3, 0.7, 1, 1.5, 100])}),
    "dynatemp": st.fixed_dictionaries(
        {"temperature": st.sampled_from([0, 0.5, 1]), "dynatemp_range": st.sampled_from([0.5, 2])}
        | {"dynatemp_exponent": st.sampled_from([0.3, 1, 2.5])}
    ),
    "adaptive_p": st.fixed_dictionaries(
        {"adaptive_target": st.sampled_from([1e-3, 0.3, 1]), "adaptive_decay": st.sampled_from([0, 0.5, 0.99])}
    ),
    "mirostat_1": st.fixed_dictionaries({"mirostat": st.just(1), "mirostat_tau": st.sampled_from([0.1, 1, 5])}),
    "mirostat_2": st.fixed_dictionaries({"mirostat": st.just(2), "mirostat_tau": st.sampled_from([0.1, 1, 5])}),
}

MANY = st.lists(
    st.sampled_from([name for name in STAGE_FIELDS if "mirostat" not in name]), min_size=2, max_size=5
).flatmap(
    lambda names: st.tuples(*(STAGE_FIELDS[name] for name in names)).map(
        lambda parts: {key: value for part in parts for key, value in part.items()}
    )
)

KEEP = st.sampled_from([{}, {"min_keep": 2}, {"min_keep": 5}])
FIRST = ["temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "adaptive_p"]
PLACE = st.sampled_from([{}, {}, {"samplers": FIRST}])


def check_against_the_formulas(xp, logits, fields):
    row = params(**fields)
    if row.greedy:
        row = row.clone(top_k=0) if row.top_k == 1 else row
    logits = np.array(logits, np.float32)
    z = {i: float(v) for i, v in enumerate(logits) if v > -math.inf}
    if min(z.values()) < max(z.values()) - FARTHEST and not fields.keys() <= {"top_k", "temperature", "top_n_sigma"}:
        z = {i: v for i, v in z.items() if v >= max(z.values()) - FARTHEST}
        logits = np.where(logits >= logits.max() - FARTHEST, logits, np.float32(-np.inf))
    key = row_keys(np, *(np.array([word], np.uint32) for word in (0, 0, 3)), XTC_GATE)
    gate = float(uniform(np, words(np, key, 1))[0, 0])
    start = (row.adaptive_target / (1 - row.adaptive_decay), 1 / (1 - row.adaptive_decay))
    try:
        expected = reference(row, z, vocab=len(logits), gate=gate, mu=2 * row.mirostat_tau, adaptive=start)
    except Undecided:
        return
    same_distribution(drawn_from(xp, logits, row), expected)


@pytest.mark.parametrize("size", [1, 2, 7, 317])
@pytest.mark.parametrize("stage", STAGE_FIELDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_one_stage_is_its_formula(size, stage, data):
    """Spec 4.6 to 4.8 on NumPy: ties, -inf, one survivor, ±1e4, bf16, values at both ends of their range."""
    fields = data.draw(STAGE_FIELDS[stage]) | data.draw(KEEP)
    check_against_the_formulas(np, data.draw(rows_of(size)), fields)


@pytest.mark.parametrize("stage", STAGE_FIELDS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_one_traced_stage_is_its_formula(stage, data):
    """The same on JAX; one size, since each set of stages compiles."""
    check_against_the_formulas(jnp, data.draw(rows_of(7)), data.draw(STAGE_FIELDS[stage]))


@pytest.mark.parametrize("size", [7, 317])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_chain_of_stages_is_their_formulas_in_order(size, data):
    """Spec 4.1, S2, S4: in the one order, each on the survivors of the one before, temperature in either place."""
    fields = data.draw(MANY) | data.draw(KEEP) | data.draw(PLACE)
    check_against_the_formulas(np, data.draw(rows_of(size)), fields)


@pytest.mark.parametrize("stage", STAGE_FIELDS)
@pytest.mark.parametrize("seed", [2, 3, 5])
def test_a_large_vocabulary(stage, seed):
    """V = 49152, one value of each field."""
    fields = {
        "top_n_sigma": {"top_n_sigma": 2.5},
        "top_k": {"top_k": 700},
        "typ_p": {"typical_p": 0.31},
        "top_p": {"top_p": 0.93},
        "min_p": {"min_p": 0.021},
        "xtc": {"xtc_probability": 1, "xtc_threshold": 0.0003},
        "temperature": {"temperature": 0.8},
        "dynatemp": {"dynatemp_range": 0.5},
        "adaptive_p": {"adaptive_target": 0.3},
        "mirostat_1": {"mirostat": 1},
        "mirostat_2": {"mirostat": 2},
    }[stage]
    check_against_the_formulas(np, random_row(seed, 49152), fields)
