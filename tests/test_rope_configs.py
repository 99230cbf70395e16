"""Ropes in every spelling of config.json, a rope for each kind of layers, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_vectors import HEAD, NUMBERS, SCALINGS, hf

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_hf import FULL, SLIDING, ropes_from_hf
from mlxcel.plugins.families.rope_scaling import Linear, LongRope
from mlxcel.plugins.families.rope_yarn import Yarn

# --- spellings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "numbers"), SCALINGS.items(), ids=SCALINGS)
def test_h_l1_every_spelling_of_one_rope(kind, numbers):
    wanted = hf(scaling={"rope_type": kind, **numbers}, rope_theta=5e5)
    assert wanted.base == 5e5
    assert wanted.scaling is not None
    assert hf(scaling={"type": kind, **numbers}, rope_theta=5e5) == wanted
    assert hf(scaling={"type": kind, "rope_type": kind, **numbers}, rope_theta=5e5) == wanted
    assert hf(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **numbers}) == wanted
    assert hf(rope_parameters={"rope_type": kind, **numbers}, rope_theta=5e5) == wanted
    both = {"rope_type": kind, **numbers}
    assert hf(rope_parameters={**both, "rope_theta": 5e5}, scaling=both, rope_theta=1e4) == wanted
    assert hf(rope_parameters={FULL: {"rope_type": kind, "rope_theta": 5e5, **numbers}}) == wanted
    nothing = dict.fromkeys(("attention_factor", "mscale", "truncate", "partial_rotary_factor"))
    assert hf(scaling={"rope_type": kind, **nothing, **numbers}, rope_theta=5e5) == wanted
    if "original_max_position_embeddings" in numbers:
        outside = {name: value for name, value in numbers.items() if name != "original_max_position_embeddings"}
        fields = {"original_max_position_embeddings": numbers["original_max_position_embeddings"]}
        assert hf(scaling={"type": kind, **outside}, rope_theta=5e5, **fields) == wanted
        assert hf(scaling={"type": kind, **numbers}, rope_theta=5e5, **fields) == wanted


@pytest.mark.parametrize("scaling", [{}, {"type": "default"}, {"rope_type": "default"}, {"factor": 1.0}, None])
def test_h_l3_no_scaling(scaling):
    """H-L3: rope_theta as written, else 10000."""
    assert hf(scaling=scaling) == hf(rope_parameters=scaling) == Rope(HEAD, 10000.0)
    assert hf(scaling=scaling, rope_theta=500000) == Rope(HEAD, 500000.0)


@pytest.mark.parametrize("kind", ["su", "longrope", "yarn"])
def test_old_names_of_longrope(kind):
    """`su` is its first name, and the first Phi-3 called it yarn; the lists tell."""
    fields = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    rope = hf(scaling={"type": kind, **NUMBERS}, **fields)
    assert rope.scaling == LongRope((1.0,) * 32, (2.0,) * 32, 4096)
    assert rope.magnitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_yarn_without_an_original_context_stretches_the_config_s():
    assert hf(scaling={"type": "yarn", "factor": 4.0}).scaling == Yarn(4.0, 4096)


def test_keys_of_other_types_and_of_no_effect_on_text():
    extra = {"finetuned": True, "mrope_section": [16, 24, 24], "beta_fast": 32, "mscale_all_dim": 0.0}
    assert hf(scaling={"type": "linear", "factor": 2.0, **extra}).scaling == Linear(2.0, 4096)
    assert hf(rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12]}) == Rope(HEAD)


@pytest.mark.parametrize(("part", "dim"), [(0.25, 16), (0.5, 32), (0.75, 48), (1, 64), (0.4, 32)])
def test_a_part_of_the_head(part, dim):
    """The rest is not turned: the frequencies are those of a head of `dim`."""
    head = 80 if part == 0.4 else HEAD
    assert hf(head, partial_rotary_factor=part) == Rope(dim)
    assert hf(head, rope_parameters={"rope_type": "default", "partial_rotary_factor": part}) == Rope(dim)
    assert hf(head, scaling={"type": "linear", "factor": 2.0}, partial_rotary_factor=part).dim == dim


# --- a rope for each kind of layers -------------------------------------------------------------------------------

KINDS = (FULL, SLIDING)


def kinds_of(config, **options):
    keys = ConfigKeys({"max_position_embeddings": 4096, **config}, "config.json")
    return ropes_from_hf(keys, HEAD, KINDS, **options)


LINEAR8 = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR8},
        {"rope_scaling": LINEAR8},
        {"rope_parameters": {FULL: {**LINEAR8, "rope_theta": 1e6}, SLIDING: {"rope_type": "default"}}},
        {"rope_parameters": {FULL: LINEAR8, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}},
        {"rope_parameters": {FULL: LINEAR8}},
        {"rope_parameters": {FULL: LINEAR8, SLIDING: None}},
    ],
    ids=["older", "defaults", "nested", "nested, local base", "nested, no sliding", "nested, null"],
)
def test_h_l1_gemma_3_turns_its_sliding_layers_otherwise(config):
    """All of global base and scaling for the full layers, and the plain rope of the local base for the others."""
    found = kinds_of({"rope_theta": 1e6, **config}, local_base=1e4)
    assert found == {FULL: Rope(HEAD, 1e6, Linear(8.0, 4096)), SLIDING: Rope(HEAD, 1e4)}


def test_kinds_share_a_rope_where_nothing_says_otherwise():
    config = {"rope_theta": 5e5, "rope_scaling": LINEAR8}
    assert kinds_of(config) == dict.fromkeys(KINDS, Rope(HEAD, 5e5, Linear(8.0, 4096)))
    nested = {"rope_parameters": {kind: {**LINEAR8, "rope_theta": 5e5} for kind in KINDS}}
    assert kinds_of(nested) == kinds_of(config)
    assert hf(**nested) == kinds_of(config)[FULL]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_parameters": {FULL: LINEAR8}}, "rope_parameters, says sliding_attention = None"),
        ({"rope_parameters": {FULL: LINEAR8, SLIDING: {"rope_type": "spiral"}}}, "rope_parameters, sliding_attention"),
        ({"rope_parameters": {FULL: LINEAR8, SLIDING: LINEAR8, "factor": 2.0}}, "says factor = 2.0"),
        ({"rope_local_base_freq": 0.5}, "rope_local_base_freq = 0.5"),
        ({"rope_local_base_freq": "1e4"}, "rope_local_base_freq = '1e4'"),
    ],
)
def test_what_is_wrong_with_one_kind_is_named(config, words):
    with pytest.raises(CheckpointError) as caught:
        kinds_of(config)
    assert words in caught.value.message


def test_one_rope_for_all_layers_is_not_taken_from_two():
    nested = {FULL: {**LINEAR8, "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="full_attention and sliding_attention"):
        hf(rope_parameters=nested)


# --- what is refused ----------------------------------------------------------------------------------------------

NOT_FACTORS = [0, -1.0, 0.5, math.nan, math.inf, "4", True, [4.0], 1e30, 4097.0]


@pytest.mark.parametrize("factor", NOT_FACTORS, ids=str)
@pytest.mark.parametrize("kind", SCALINGS)
def test_h_l1_a_factor_that_cannot_be_is_refused(kind, factor):
    """Below 1 nothing is stretched; 4097 times 4096 positions are more than float32 counts."""
    numbers = {**SCALINGS[kind], "factor": factor, "original_max_position_embeddings": 4096}
    with pytest.raises(CheckpointError, match="factor = ") as caught:
        hf(scaling={"rope_type": kind, **numbers})
    assert repr(factor) in caught.value.message


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *[("yarn", key, value) for key in ("beta_fast", "beta_slow", "attention_factor") for value in (0, -1, "x")],
        *[("yarn", key, math.nan) for key in ("mscale", "mscale_all_dim")],
        ("yarn", "mscale", -0.5),
        ("yarn", "beta_fast", 0.5),
        ("yarn", "beta_slow", 17),
        ("yarn", "truncate", "yes"),
        ("longrope", "attention_factor", math.inf),
        *[("longrope", key, values) for key in NUMBERS for values in ([], [1.0] * 31, [1.0] * 33, 1.0, None, "1")],
        *[("longrope", key, [1.0] * 31 + [value]) for key in NUMBERS for value in (0, -1, math.nan, "1", 1e9, None)],
        *[("llama3", key, value) for key in ("low_freq_factor", "high_freq_factor") for value in (0, -1, math.inf)],
        ("llama3", "low_freq_factor", 4.0),
        *[
            (kind, "original_max_position_embeddings", value)
            for kind in SCALINGS
            for value in (0, -5, 1.5, True, "4096", 1 << 40)
        ],
        *[(kind, "original_max_position_embeddings", 4097) for kind in ("linear", "dynamic", "yarn", "longrope")],
        ("dynamic", "original_max_position_embeddings", 1024),
        ("yarn", "original_max_position_embeddings", 3),
        ("longrope", "original_max_position_embeddings", 1),
        *[(kind, "rope_theta", value) for kind in SCALINGS for value in (0, -1, 1, 1.5, math.inf, 1e31, "x")],
        *[(kind, "partial_rotary_factor", value) for kind in SCALINGS for value in (0, -1, 1.5, 0.01, 0.33, "x")],
    ],
    ids=str,
)
def test_h_l1_a_number_that_cannot_be_is_refused_by_its_key(kind, key, value):
    with pytest.raises(CheckpointError) as caught:
        hf(scaling={"rope_type": kind, **SCALINGS[kind], key: value})
    stem = "beta_fast" if key == "beta_slow" and value == 17 else key
    assert stem in caught.value.message


@pytest.mark.parametrize("kind", SCALINGS)
def test_h_l1_a_half_said_rope_is_refused(kind):
    """Every number that has no default."""
    defaults = {"beta_fast"} | ({"original_max_position_embeddings"} if kind == "yarn" else set())
    for key in SCALINGS[kind].keys() - defaults:
        scaling = {name: value for name, value in SCALINGS[kind].items() if name != key}
        if (kind, key) == ("yarn", "factor"):  # then the config's two contexts say it
            assert hf(scaling={"rope_type": kind, **scaling}) == hf(scaling={"rope_type": kind, **SCALINGS[kind]})
            continue
        with pytest.raises(CheckpointError, match=f"has no {key}"):
            hf(scaling={"rope_type": kind, **scaling})


@pytest.mark.parametrize("kind", ["mrope", "proportional", "ntk", "YARN", "", 3, ["yarn"], True])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_h_l1_an_unknown_rope_is_refused_by_name(key, kind):
    with pytest.raises(CheckpointError, match="default, linear, dynamic, yarn, longrope, su, llama3") as caught:
        hf(scaling={key: kind, "factor": 2.0})
    assert repr(kind) in caught.value.message


def test_h_l1_a_factor_that_no_type_explains_is_refused():
    with pytest.raises(CheckpointError, match=r"factor = 2\.0: it must be 1 or left out where no rope_type says"):
        hf(scaling={"factor": 2.0})
    assert hf(scaling={"factor": 1.0}) == hf(scaling={"rope_type": "default"})


@pytest.mark.parametrize("key", ["llama_4_scaling_beta", "alpha", "short_mscale", "attn_factor", "no_such"])
def test_h_l1_a_key_that_nobody_reads_is_refused(key):
    """Rule 2: effect or refusal. Each of the first four changes the numbers in the model that has it."""
    with pytest.raises(CheckpointError, match=f"{key} = 0.1: it must be left out"):
        hf(scaling={"type": "yarn", **SCALINGS["yarn"], key: 0.1})


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"rope_type": "default"}, {"type": "linear", "factor": 2.0}, "(default, linear)"),
        ({"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2.0}, "scale differently"),
        ({"rope_theta": 1e4}, {"rope_theta": 1e6}, "rope_parameters says rope_theta = 10000"),
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.5"),
    ],
)
def test_h_l1_two_mappings_that_differ_are_refused(first, second, words):
    with pytest.raises(CheckpointError) as caught:
        hf(rope_parameters=first, scaling=second)
    assert words in caught.value.message


def test_two_original_contexts_that_differ_are_refused():
    with pytest.raises(CheckpointError, match="original_max_position_embeddings = 1024: it must be 2048"):
        hf(scaling={"type": "yarn", **SCALINGS["yarn"]}, original_max_position_embeddings=2048)


@pytest.mark.parametrize("value", ["yarn", 4.0, [4.0], True])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaling_that_is_no_mapping_is_refused(key, value):
    with pytest.raises(CheckpointError, match=f"{key} = .*a mapping"):
        hf(**{key: value})


@pytest.mark.parametrize(("dim", "base"), [(2, 1e4), (4, 1e30)])
def test_dynamic_that_has_no_base_is_refused(dim, base):
    """The exponent is dim / (dim - 2), and the base must be one that float32 holds."""
    with pytest.raises(CheckpointError, match=rf"factor = 2\.0: it must be less: {dim} turned dims"):
        hf(dim, scaling={"type": "dynamic", "factor": 2.0}, rope_theta=base)


# --- damage -------------------------------------------------------------------------------------------------------

JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["yarn", "su", "x"]) | st.lists(
    st.floats(), max_size=4
)  # fmt: skip
KEYS = ["rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"]
KEYS += ["mscale_all_dim", "attention_factor", "truncate", "short_factor", "long_factor", "rope_theta"]
KEYS += ["low_freq_factor", "high_freq_factor", "partial_rotary_factor", FULL]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(list(SCALINGS)), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), st.integers(1, 9000))
def test_any_config_gives_finite_numbers_or_a_checkpoint_error(kind, damage, context):
    """Nothing else is raised, no warning is given, and what is read can be computed with."""
    try:
        rope = hf(scaling={"rope_type": kind, **SCALINGS[kind], **damage})
    except CheckpointError:
        return
    frequencies = rope.frequencies(context)
    assert np.all(np.isfinite(frequencies))
    assert np.all(frequencies >= 0)
    assert 0 < rope.attention_factor(context) < math.inf
    assert 4096 <= rope.window(4096) <= 1 << 24
