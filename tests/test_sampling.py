"""The sampler chain of docs/spec/engine.md chapter 4, as far as its stages are in this version."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from sampling_rows import (
    LIBRARIES,
    NINE,
    WORKED,
    Words,
    assert_same_bits,
    chain,
    draw,
    flat_logits,
    ids,
    params,
    spec,
    told,
)

from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.noise import DRAW, gumbel, row_keys, words
from mlxcel.plugins.sampling.pack import FEATURES

SIZES = [1, 2, 7, 317, 49152]


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return LIBRARIES[request.param]


# --- order and selection ----------------------------------------------------------------------------------------------


def test_the_order_is_the_canonical_one():
    """Spec S1: names as in `samplers`, in its order."""
    order = "penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, adaptive_p"
    assert ", ".join(ChainSampler(vocab=7).stage_order) == order


@pytest.mark.parametrize(
    ("row", "stages"),
    [
        (params(temperature=0, top_k=3, top_p=0.5, min_p=0.5, xtc_probability=1, adaptive_target=0.3), ()),
        (params(top_k=1), ()),
        (params(), ("draw",)),
        (params(top_k=7), ("draw",)),
        (params(top_k=-1, top_n_sigma=0, typical_p=1, xtc_threshold=0.1, min_keep=3), ("draw",)),
        (params(xtc_probability=1, xtc_threshold=0.500001), ("draw",)),
        (params(temperature=0.5), ("temperature", "draw")),
        (params(top_k=6), ("top_k", "draw")),
        (params(top_p=0.5, min_p=0.1, min_keep=1), ("far", "top_p", "min_p", "draw")),
        (params(top_p=0.5, top_k=3), ("top_k", "top_p", "draw")),
        (params(top_p=0.5, min_keep=2), ("far", "top_p", "min_keep", "draw")),
        (params(dynatemp_range=0.5), ("temperature", "dynatemp", "cold", "draw")),
        (params(mirostat=2, top_k=3, xtc_probability=1, adaptive_target=0.3, min_keep=5), ("mirostat_2", "draw")),
        (params(mirostat=1, temperature=0), ("temperature", "cold", "mirostat_1", "draw")),
        (params(temperature=0.5, min_p=0.1, samplers=["temperature", "min_p"]), ("temperature_first", "min_p", "draw")),
        (params(temperature=0.5, min_p=0.1, samplers=["min_p", "temperature"]), ("min_p", "temperature", "draw")),
        (params(temperature=0.5, min_p=0.1, samplers=["temperature"]), ("temperature", "draw")),
        (params(temperature=0.5, min_p=0.1, top_k=3, dynatemp_range=1, samplers=["min_p"]), ("min_p", "draw")),
        (params(logprobs=3, logprobs_mode="processed"), ("draw", "processed_logprobs")),
        (params(temperature=0, logprobs=0), ("raw_logprobs",)),
    ],
)
def test_only_stages_that_a_row_uses_are_in_the_step(row, stages):
    """Spec S2, S3, S32: a stage that no row uses costs nothing; greedy rows use none, mirostat rows no filter."""
    sampler = ChainSampler(vocab=7)
    assert sampler.pack([sampler.open(spec(row))], [5], [False]).stages == stages


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_what_it_is_alone(size):
    """Spec S3, S47: nine unlike rows, shuffled; each alone runs fewer stages and gives the same bits."""
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal((9, size)) * 3).astype(np.float32)
    positions = rng.integers(0, 2**20, 9).tolist()
    alone = [draw(np, logits[r : r + 1], [NINE[r]], positions[r : r + 1]) for r in range(9)]
    for batch in (2, 5, 9):
        order = rng.permutation(9)[:batch]
        crowd = draw(np, np.ascontiguousarray(logits[order]), [NINE[r] for r in order], [positions[r] for r in order])
        for place, r in enumerate(order):
            assert crowd.tokens[place] == alone[r].tokens[0]
            if NINE[r].logprobs is not None:
                found = told(crowd, place, NINE[r])
                assert found == told(alone[r], 0, NINE[r])
                assert len(found.top) == min(NINE[r].logprobs, size)


@pytest.mark.parametrize("size", [7, 317])
def test_traced_rows_do_not_know_their_slot(size):
    """Level R0 on JAX: one executable shape, rows shuffled."""
    logits = (np.random.default_rng(size).standard_normal((9, size)) * 3).astype(np.float32)
    straight = draw(jnp, logits, NINE, range(9))
    order = np.random.default_rng(1).permutation(9)
    shuffled = draw(jnp, logits[order], [NINE[r] for r in order], order)
    for left, right in zip(straight, shuffled, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert_same_bits(left[order], right)


def test_a_superset_of_the_stages_gives_the_same_draws(xp):
    """Spec S44: rows that do not use a stage pass through it by selection."""
    every = tuple(name for name in FEATURES if name not in ("xtc", "raw_logprobs", "processed_logprobs"))
    logits = flat_logits(9, 317, 6)
    rows = [params(temperature=0), *(params(seed=s) for s in range(8))]
    assert ids(xp, logits, rows, range(9)) == ids(xp, logits, rows, range(9), stages=every)


@pytest.mark.parametrize("size", [7, 317])
def test_the_chain_is_the_stages_one_after_another(size):
    """Against the slow way: sort, cut, renormalise, each filter in turn, then the highest of y + n (spec 4.1, S27)."""
    logits = flat_logits(200, size, 8)
    row = {"temperature": 0.8, "top_k": size // 2, "top_p": 0.9, "min_p": 0.05}
    drawn = ids(np, logits, [params(seed=s, **row) for s in range(200)], range(200))
    for r in range(200):
        order = sorted(range(size), key=lambda i, r=r: -logits[r, i])[: row["top_k"]]
        weight = np.exp(logits[r, order].astype(np.float64))
        kept = [i for i, above in zip(order, (weight.cumsum() - weight) / weight.sum(), strict=True) if above < 0.9]
        kept = [i for i in kept if logits[r, i] >= logits[r].max() + math.log(0.05)]
        key = row_keys(np, *(np.array([word], np.uint32) for word in (r, 0, r)), DRAW)
        noise = gumbel(np, words(np, key, size))[0]
        assert drawn[r] == max(kept, key=lambda i, r=r, n=noise: (logits[r, i] - logits[r].max()) / 0.8 + n[i]), r


# --- greedy and temperature -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1e-9, 9.9e-6, 1e-5, 1e-2, 100])
def test_h_m1_tiny_and_huge_temperatures_neither_overflow_nor_divide_by_zero(xp, temperature):
    """Spec S23, S24: bf16 logits up to 1e4. Below 1e-5 a row is greedy; a cold one draws the clear best."""
    scattered = flat_logits(3, 317, 2e4) - 1e4
    logits = np.asarray(jnp.asarray(scattered, jnp.bfloat16).astype(jnp.float32))
    drawn = draw(xp, logits, [params(seed=s, temperature=temperature) for s in range(3)], range(3))
    assert drawn.status.tolist() == [0, 0, 0]
    if temperature < 1:
        assert drawn.tokens.tolist() == logits.argmax(axis=-1).tolist()
    else:
        assert np.all(logits[np.arange(3), drawn.tokens] > logits.max(axis=-1) - 25 * temperature)


@pytest.mark.parametrize("field", ["top_p", "min_p"])
@pytest.mark.parametrize("value", [0, 1e-300, 1e-4, 1 - 1e-12, 1])
def test_h_m1_values_at_the_ends_of_their_range_draw_something_allowed(xp, field, value):
    """A value that float32 rounds to an end of the range means what the end means; top_p 0 keeps the maximum."""
    logits = flat_logits(4, 317, 1e4)
    drawn = draw(xp, logits, [params(seed=s, **{field: value}) for s in range(4)], range(4))
    assert drawn.status.tolist() == [0] * 4
    if field == "top_p" and value < 0.5:
        assert drawn.tokens.tolist() == logits.argmax(axis=-1).tolist()


def test_logits_at_the_ends_of_float32_are_drawn_from(xp):
    """Their distance is more than float32 holds."""
    logits = np.array([[-3e38, 3e38, 2.9e38], [3e38, -3e38, -np.inf]], np.float32)
    drawn = draw(xp, logits, [params(top_p=0.9, logprobs=3), params(min_p=0.1)], [1, 2])
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.logprobs.tolist() == [0, 0]
    assert told(drawn, 0, params(logprobs=3)).top == ((1, 0.0), (2, float(np.float32(2.9e38) - np.float32(3e38))))


def test_h_m3_greedy_rows_are_selected_out_of_the_division(xp):
    """Spec S24: temperatures 0, 0.7, 0, 1 in one step; greedy rows are argmax, the others what they are alone."""
    logits = flat_logits(4, 317, 5)
    rows = [params(temperature=0), params(seed=1, temperature=0.7), params(temperature=0), params(seed=2)]
    with np.errstate(all="raise", under="ignore"):
        drawn = ids(xp, logits, rows, range(4))
    assert [drawn[0], drawn[2]] == [int(logits[0].argmax()), int(logits[2].argmax())]
    for r in range(4):
        assert ids(xp, logits[r : r + 1], rows[r : r + 1], [r]) == [drawn[r]]


def test_h_m8_equal_maxima_give_the_lowest_id(xp):
    """Spec S23: greedy, on every backend, whatever the places; the two zeros are equal."""
    logits = np.array([[1, 5, 5, 0], [5, 1, 1, 5], [2, 2, 2, 2], [-0.0, 0.0, -1, 0.0]], np.float32)
    assert ids(xp, logits, [params(temperature=0)] * 4, range(4)) == [1, 0, 0, 0]
    assert ids(xp, logits, [params(top_k=1, temperature=1)] * 4, range(4)) == [1, 0, 0, 0]


def test_h_m8_equal_maxima_share_a_sampled_draw(xp):
    """Ties stay together in a filter: both of two equal maxima are drawn with top_p 0 and min_p 1."""
    logits = np.tile(np.array([[1, 5, 5, 0]], np.float32), (40, 1))
    for field in ({"top_p": 0.0}, {"min_p": 1.0}):
        assert set(ids(xp, logits, [params(seed=s, **field) for s in range(40)], range(40))) == {1, 2}


@pytest.mark.parametrize("size", [1, 2, 7, 317])
@pytest.mark.parametrize("top_k", [10**6, 2**63 - 1, 0, -1])
def test_h_m5_top_k_beyond_the_vocabulary_is_off(xp, size, top_k):
    """Spec 4.2: clamped to V; odd vocabularies work."""
    logits = flat_logits(5, size, 3)
    rows = [params(seed=s, top_k=top_k) for s in range(5)]
    assert ids(xp, logits, rows, range(5)) == ids(xp, logits, [params(seed=s) for s in range(5)], range(5))


def test_h_m5_more_logprobs_than_the_vocabulary_lists_all_of_it(xp):
    row = params(temperature=0, logprobs=20)
    drawn = draw(xp, WORKED[None], [row], [0])
    assert [token for token, _ in told(drawn, 0, row).top] == list(range(7))


@pytest.mark.on_jax(most=2)
@pytest.mark.parametrize("row", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.01}])
def test_h_l9_ids_beyond_the_tokenizer_are_never_drawn(xp, row):
    """Spec S14: V = 320, 300 ids have text, the logit of 310 towers above all. Filters do not see it either."""
    logits = flat_logits(8, 320, 4)
    logits[:, 310] = 1e4
    rows = [params(seed=s, **row) for s in range(8)]
    drawn = ids(xp, logits, rows, range(8), sampler=chain(320, 300))
    assert max(drawn) < 300
    removed = np.concatenate([logits[:, :300], np.full((8, 20), -np.inf, np.float32)], axis=-1)
    assert drawn == ids(xp, removed, rows, range(8))
    assert ids(xp, logits, rows, range(8)) == [310] * 8


# --- status -----------------------------------------------------------------------------------------------------------


@pytest.mark.on_jax(most=2)
@pytest.mark.parametrize("row", [{"temperature": 0}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_bad_rows_are_marked_and_their_neighbours_unaffected(xp, row, logprobs):
    """Spec S45: NaN and +inf are 1, nothing allowed is 2, the id is -1; -inf beside finite values is legal."""
    nan, inf = np.nan, np.inf
    logits = np.array(
        [
            [1, 2, 3, 0, 9],
            [1, nan, 3, 0, 9],
            [-inf, 2, -inf, 0, -inf],
            [-inf, -inf, -inf, -inf, -inf],
            [1, inf, 3, 0, 9],
            [-inf, -inf, -inf, -inf, 9],
            [1, 2, 3, 0, nan],
            [3, 2, 1, 0, -inf],
        ],
        np.float32,
    )
    sampler = chain(5, 4)
    rows = [params(seed=s, logprobs=logprobs, **row) for s in range(8)]
    drawn = draw(xp, logits, rows, range(8), sampler=sampler)
    assert drawn.status.tolist() == [0, 1, 0, 2, 1, 2, 1, 0]
    assert [token == -1 for token in drawn.tokens.tolist()] == [status != 0 for status in drawn.status]
    for r in (0, 2, 7):
        alone = draw(xp, logits[r : r + 1], rows[r : r + 1], [r], sampler=sampler)
        assert alone.tokens[0] == drawn.tokens[r]
        assert np.isfinite(logits[r, drawn.tokens[r]])
        if logprobs:
            assert_same_bits(alone.logprobs[0], drawn.logprobs[r])


def test_ids_and_status_are_int32(xp):
    drawn = draw(xp, flat_logits(9, 7), NINE, range(9))
    assert drawn.tokens.dtype == drawn.status.dtype == drawn.top_ids.dtype == np.int32
    assert drawn.logprobs.dtype == drawn.top_logprobs.dtype == np.float32


MEMORYLESS = (
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "top_n_sigma": 1},
    {"dynatemp_range": 0.5, "xtc_probability": 0.5, "min_keep": 2},
    {"logprobs": 3},
)
REMEMBERING = (
    {"mirostat": 1},
    {"mirostat": 2, "temperature": 0.7},
    {"adaptive_target": 0.3},
    {"repetition_penalty": 1.2},
    {"temperature": 0, "frequency_penalty": 0.5},
    {"temperature": 0, "presence_penalty": 0.5},
    {"dry_multiplier": 0.8},
    {"bad_words": ("12",)},
    {"min_tokens": 3},
)


@pytest.mark.parametrize("row", [*MEMORYLESS, *REMEMBERING], ids=str)
def test_what_was_said_changes_nothing_that_a_memoryless_row_packs(row):
    """Spec C54: whatever else moves with each token, the row is none."""
    sampler = ChainSampler(vocab=9, tokenizer=Words(9))
    state = sampler.open(spec(params(**row), eos_ids={8}))
    assert sampler.memoryless(state) is (row in MEMORYLESS)
    assert sampler.closed(state) or row in REMEMBERING
    before = sampler.pack([state], [5], [True])
    for token in (1, 2, 1, 2, 1, 2):
        sampler.commit(state, token, 0.25)
    after = sampler.pack([state], [5], [True])
    same = all(np.array_equal(before.params[name], after.params[name]) for name in before.params)
    assert same or row in REMEMBERING
