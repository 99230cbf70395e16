"""Ropes: against transformers' numbers and the papers' formulas, and how far they reach."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_vectors import LLAMA3, NUMBERS, hf, rope_vectors

from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_hf import rope_from_hf
from mlxcel.plugins.families.rope_scaling import Dynamic, Linear, Llama3Scaling, LongRope
from mlxcel.plugins.families.rope_yarn import Yarn

ULPS = 2
"""The vectors' float32 powers are off by a unit in a few places, and a product after them by two; all else is equal."""

ROUNDING = 2e-6
"""Relative, of a frequency: the exponent is rounded to float32 before the power, 2**-24 * ln(base) of it at most."""

# --- transformers' numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", rope_vectors(), ids=lambda vector: vector.name)
def test_h_l1_frequencies_are_those_of_transformers(vector):
    """Every type, with every key, for heads and parts of heads of many sizes."""
    rope = rope_from_hf(ConfigKeys(vector.config, "config.json"), vector.config["head_dim"])
    frequencies = rope.frequencies(vector.context)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == vector.frequencies.shape
    apart = np.abs(frequencies.view(np.int32).astype(np.int64) - vector.frequencies.view(np.int32))
    assert apart.max() <= ULPS
    assert rope.attention_factor(vector.context) == vector.attention_factor


# --- the papers' formulas -----------------------------------------------------------------------------------------

BASES = st.sampled_from([100.0, 10000.0, 500000.0, 1e6, 1e9])
DIMS = st.integers(2, 128).map(lambda pairs: 2 * pairs)
FACTORS = st.floats(1, 64)
CONTEXTS = st.integers(256, 1 << 17)


def plain(base, dim):
    return np.array([math.exp(-2 * i / dim * math.log(base)) for i in range(dim // 2)])


def close(ours, formula):
    np.testing.assert_allclose(ours, formula, rtol=ROUNDING, atol=0)


@settings(deadline=None)
@given(BASES, DIMS, CONTEXTS)
def test_h_l3_the_plain_rope(base, dim, context):
    close(Rope(dim, base).frequencies(context), plain(base, dim))


@settings(deadline=None)
@given(BASES, DIMS, FACTORS, CONTEXTS)
def test_linear_divides_positions(base, dim, factor, context):
    """2306.15595: position p is read as p / factor."""
    positions = np.arange(100)
    turned = np.outer(positions, Rope(dim, base, Linear(factor, context)).frequencies(context))
    close(turned, np.outer(positions / factor, plain(base, dim)))


@settings(deadline=None)
@given(BASES, DIMS, FACTORS, CONTEXTS)
def test_dynamic_keeps_the_fastest_pair_and_interpolates_the_slowest(base, dim, factor, context):
    """The base is chosen so that the slowest pair turns as if positions were divided by factor² - factor + 1."""
    rope = Rope(dim, base, Dynamic(factor, context))
    close(rope.frequencies(context), plain(base, dim))
    long = rope.frequencies(context + 1)
    stretch = factor**2 - factor + 1
    assert long[0] == 1
    np.testing.assert_allclose(long[-1], plain(base, dim)[-1] / stretch, rtol=4 * ROUNDING)


@settings(deadline=None)
@given(BASES, DIMS, CONTEXTS, st.booleans())
def test_yarn_of_factor_1_is_the_plain_rope(base, dim, context, truncate):
    close(Rope(dim, base, Yarn(1.0, context, truncate=truncate)).frequencies(context), plain(base, dim))


@settings(deadline=None)
@given(BASES, DIMS, FACTORS, CONTEXTS, st.booleans())
def test_yarn_by_the_turns_of_each_wave(base, dim, factor, context, truncate):
    """2309.00071 3.2: waves of many turns are kept, of few are interpolated, and nothing leaves that range."""
    yarn = Yarn(factor, context, truncate=truncate)
    frequencies = Rope(dim, base, yarn).frequencies(context)
    unscaled = plain(base, dim)
    turns = context * unscaled / (2 * math.pi)
    # Whole pairs: the ramp begins one early and ends one late at most.
    step = base ** (2 / dim) if truncate else 1
    close(frequencies[turns > 32 * step * 1.001], unscaled[turns > 32 * step * 1.001])
    close(frequencies[turns < 1 / step / 1.001], unscaled[turns < 1 / step / 1.001] / factor)
    assert np.all(frequencies <= unscaled * (1 + ROUNDING))
    assert np.all(frequencies >= unscaled / factor * (1 - ROUNDING))


@settings(deadline=None)
@given(BASES, DIMS, FACTORS, CONTEXTS)
def test_yarn_mixes_in_a_straight_line_over_the_pairs(base, dim, factor, context):
    """Without `truncate`, pair i of those between: by how far i is from the pair of 32 turns to the pair of 1."""

    def pair(turns):  # the i whose wave turns so often: context * base ** (-2 i / dim) = 2 pi turns
        return dim / 2 * math.log(context / (2 * math.pi * turns), base)

    first, last = max(pair(32), 0), min(pair(1), dim - 1)
    share = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    ours = Rope(dim, base, Yarn(factor, context, truncate=False)).frequencies(context)
    np.testing.assert_allclose(
        ours, plain(base, dim) * (1 - share + share / factor), rtol=10 * ROUNDING * max(1, dim / (last - first))
    )


@settings(deadline=None)
@given(BASES, DIMS, FACTORS, CONTEXTS)
def test_llama3_by_the_length_of_each_wave(base, dim, factor, context):
    ours = Rope(dim, base, Llama3Scaling(factor, 1.0, 4.0, context)).frequencies(context)
    for frequency, unscaled in zip(ours, plain(base, dim), strict=True):
        turns = context * unscaled / (2 * math.pi)
        kept = min(max((turns - 1) / 3, 0), 1)
        assert frequency == pytest.approx(kept * unscaled + (1 - kept) * unscaled / factor, rel=20 * ROUNDING)


@settings(deadline=None)
@given(BASES, DIMS, CONTEXTS, st.data())
def test_longrope_divides_each_pair_by_its_own_number(base, dim, context, data):
    numbers = st.lists(st.floats(0.5, 100), min_size=dim // 2, max_size=dim // 2)
    short, long = data.draw(numbers), data.draw(numbers)
    rope = Rope(dim, base, LongRope(tuple(short), tuple(long), context))
    for bound, divisors in ((1, short), (context, short), (context + 1, long), (context * 8, long)):
        close(rope.frequencies(bound), plain(base, dim) / divisors)


def test_attention_factors_of_the_papers():
    """YaRN 3.4: sqrt(1/t) = 0.1 ln(s) + 1. LongRoPE: sqrt(1 + ln(s) / ln(original))."""
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
    assert hf(scaling=yarn).attention_factor(4096) == pytest.approx(0.1 * math.log(16) + 1)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    rope = hf(scaling=longrope, original_max_position_embeddings=256)
    assert rope.attention_factor(256) == rope.attention_factor(4096) == pytest.approx(math.sqrt(1.5))
    for kind in ("default", "linear", "dynamic"):
        assert hf(scaling={"rope_type": kind, "factor": 2.0}).attention_factor(4096) == 1.0


# --- how far ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "window"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "dynamic", "factor": 2.5}, 10240),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "longrope", "original_max_position_embeddings": 1024, **NUMBERS}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 4096),
    ],
)
def test_positions_that_the_model_may_be_run_with(scaling, window):
    assert hf(scaling=scaling).window(4096) == window


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_regime_is_chosen_by_the_bound_and_never_by_a_row(kind):
    """Row invariance: one set of frequencies for every N on the same side of the original context."""
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        scaling |= {**NUMBERS, "original_max_position_embeddings": 4096}
    rope = hf(scaling=scaling, max_position_embeddings=4096)
    for bounds in ((1, 100, 4096), (4097, 9000, 16384)):
        assert len({rope.frequencies(bound).tobytes() for bound in bounds}) == 1
    assert rope.frequencies(4096).tobytes() != rope.frequencies(4097).tobytes()


def test_a_rope_can_be_a_key():
    assert len({hf(scaling={"type": "longrope", "original_max_position_embeddings": 9, **NUMBERS}) for _ in "ab"}) == 1
