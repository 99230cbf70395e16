"""Ropes of GGUF files: metadata, and the small tensors that hold divisors of pairs."""

import math

import attrs
import gguf
import numpy as np
import pytest
from rope_vectors import HEAD, LLAMA3, hf

from mlxcel.core.checkpoint import TensorInfo
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_gguf import rope_from_gguf, ropes_from_gguf
from mlxcel.plugins.families.rope_hf import FULL, SLIDING
from mlxcel.plugins.families.rope_scaling import Linear, LongRope, PairDivisors
from mlxcel.plugins.families.rope_yarn import Yarn


@attrs.frozen
class SmallTensors:
    """A checkpoint that holds these tensors, as far as a rope looks at one."""

    values: dict[str, np.ndarray]

    @property
    def tensors(self):
        return {name: TensorInfo(name, value.shape, "F32", value.nbytes) for name, value in self.values.items()}

    def read(self, name):
        return self.values[name].astype(np.float32)


def of_gguf(metadata=(), tensors=(), head_dim=HEAD):
    keys = ConfigKeys({"context_length": 4096, **dict(metadata)}, "the GGUF metadata")
    return rope_from_gguf(keys, head_dim, SmallTensors(dict(tensors)))


def yarn_of(**numbers):
    named = {f"rope.scaling.{name}": value for name, value in numbers.items()}
    return of_gguf({"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 1024, **named})


def scaled(**numbers):
    return hf(scaling={"type": "yarn", "original_max_position_embeddings": 1024, **numbers})


def test_gguf_names_its_keys_as_the_gguf_package_does():
    """Of the keys that are read, and of the tensors."""
    keys = gguf.Keys.Rope
    names = {value.removeprefix("{arch}.") for name, value in vars(keys).items() if name.isupper()}
    read = ("dimension_count", "dimension_count_swa", "freq_base", "freq_base_swa", "scaling.type", "scaling.factor")
    more = ("original_context_length", "attn_factor", "yarn_log_multiplier", "yarn_attn_factor", "yarn_ext_factor")
    beta = ("yarn_beta_fast", "yarn_beta_slow")
    assert {f"rope.{name}" for name in (*read, *(f"scaling.{name}" for name in (*more, *beta)))} <= names
    tensors = [gguf.MODEL_TENSOR.ROPE_FREQS, gguf.MODEL_TENSOR.ROPE_FACTORS_LONG, gguf.MODEL_TENSOR.ROPE_FACTORS_SHORT]
    assert [gguf.TENSOR_NAMES[tensor] for tensor in tensors] == [
        "rope_freqs",
        "rope_factors_long",
        "rope_factors_short",
    ]


def test_h_l3_gguf_plain():
    """A type of none is the last word."""
    assert of_gguf({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}) == Rope(HEAD)
    assert of_gguf() == of_gguf({"rope.scaling.type": "none"}) == Rope(HEAD, 10000.0)
    assert of_gguf({"rope.freq_base": 1e6, "rope.dimension_count": 16}) == Rope(16, 1e6)


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {"rope.scaling.factor": 8.0},
        {"rope.scale_linear": 8.0},
        {"rope.scaling.type": "linear", "rope.scale_linear": 8.0},
    ],
)
def test_h_l1_gguf_linear(metadata):
    """A file without a type that has a factor is linear: the type is younger than the factor."""
    assert of_gguf(metadata) == hf(scaling={"type": "linear", "factor": 8.0})


@pytest.mark.parametrize("metadata", [{"rope.scaling.factor": 0.0}, {"rope.scale_linear": 1.0}])
def test_gguf_factors_that_do_nothing(metadata):
    assert of_gguf(metadata) == of_gguf({**metadata, "rope.scaling.type": "linear"}) == Rope(HEAD)


def test_h_l1_gguf_yarn():
    assert yarn_of(factor=4.0) == scaled(factor=4.0)
    assert of_gguf({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}).scaling == Yarn(4.0, 4096)
    beta = scaled(factor=4.0, beta_fast=20.0, beta_slow=2.0)
    assert yarn_of(factor=4.0, yarn_beta_fast=20.0, yarn_beta_slow=2.0, yarn_ext_factor=1.0) == beta
    assert yarn_of(factor=4.0, yarn_log_multiplier=0.0) == scaled(factor=4.0)
    assert yarn_of(factor=4.0, yarn_log_multiplier=1.0).magnitude == 1.0
    assert yarn_of(factor=4.0, yarn_log_multiplier=0.7) == scaled(factor=4.0, mscale=1.0, mscale_all_dim=0.7)
    assert yarn_of(factor=4.0, yarn_attn_factor=0.9) == scaled(factor=4.0, attention_factor=0.9)
    assert yarn_of(factor=4.0, attn_factor=1.5).magnitude == pytest.approx(1.5 * (0.1 * math.log(4) + 1))


def test_h_l1_gguf_longrope():
    """Phi-3: two tensors, the attention factor as a number, and in older files no type."""
    factors = {"rope_factors_short.weight": np.ones(24), "rope_factors_long.weight": np.arange(1, 25)}
    metadata = {"rope.dimension_count": 48, "rope.scaling.original_context_length": 512}
    metadata["rope.scaling.attn_factor"] = 1.19
    wanted = Rope(48, 1e4, LongRope((1.0,) * 24, tuple(float(i) for i in range(1, 25)), 512), 1.19)
    assert of_gguf(metadata, factors) == of_gguf({**metadata, "rope.scaling.type": "longrope"}, factors) == wanted


def test_h_l1_gguf_llama3():
    """`rope_freqs.weight` as the file of a llama3 config has it: that config's own frequencies."""
    wanted = hf(scaling={"rope_type": "llama3", "factor": 8.0, **LLAMA3}, rope_theta=5e5).frequencies(4096)
    plain = 5e5 ** (-np.arange(0, HEAD, 2) / HEAD)
    divisors = (plain / wanted).astype(np.float32)
    rope = of_gguf({"rope.freq_base": 5e5}, {"rope_freqs.weight": divisors})
    assert isinstance(rope.scaling, PairDivisors)
    np.testing.assert_allclose(rope.frequencies(4096), wanted, rtol=2e-6)  # powers of float32 exponents
    assert rope.window(4096) == 4096


KINDS = (FULL, SLIDING)


def test_gguf_ropes_by_kind():
    metadata = {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    linear = Linear(8.0, 4096)

    def by_kind(extra, **options):
        keys = ConfigKeys({"context_length": 4096, **metadata, **extra}, "the GGUF metadata")
        return ropes_from_gguf(keys, HEAD, SmallTensors({}), KINDS, **options)

    full = Rope(HEAD, 1e6, linear)
    assert by_kind({}, local_base=1e4) == {FULL: full, SLIDING: Rope(HEAD, 1e4)}
    assert by_kind({"rope.freq_base_swa": 5e3}, local_base=1e4) == {FULL: full, SLIDING: Rope(HEAD, 5e3)}
    assert by_kind({}) == {FULL: full, SLIDING: full}
    assert by_kind({"rope.freq_base_swa": 5e3}) == {FULL: full, SLIDING: Rope(HEAD, 5e3, linear)}
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count_swa = 32"):
        by_kind({"rope.dimension_count_swa": 32})


ONES = np.ones(HEAD // 2)


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"rope.scaling.type": "mrope"}, {}, "rope.scaling.type = 'mrope'"),
        *[({"rope.scaling.factor": value}, {}, "rope.scaling.factor = ") for value in (-1.0, 0.5, math.nan, 1e9)],
        ({"rope.scale_linear": 0.25}, {}, "rope.scale_linear = 0.25"),
        *[({"rope.freq_base": value}, {}, "rope.freq_base = ") for value in (0.0, -1.0, 1.0, math.inf, math.nan)],
        *[({"rope.dimension_count": value}, {}, "rope.dimension_count = ") for value in (0, 7, 66, -2)],
        *[({"rope.scaling.attn_factor": value}, {}, "attn_factor = ") for value in (0.0, -1.0, math.nan)],
        ({"rope.scaling.type": "longrope"}, {}, "no divisors"),
        ({}, {"rope_factors_long.weight": ONES}, "longrope needs"),
        ({}, {"rope_freqs.weight": ONES, "rope_factors_long.weight": ONES}, "longrope needs"),
        ({"rope.scaling.type": "longrope"}, {"rope_factors_short.weight": ONES}, "longrope needs"),
        ({}, {"rope_freqs.weight": np.ones(8)}, "rope_freqs.weight is [8]"),
        ({}, {"rope_freqs.weight": np.ones((2, 16))}, "rope_freqs.weight is [2, 16]"),
        *[({}, {"rope_freqs.weight": ONES * value}, "rope_freqs.weight[0]") for value in (0, -1, math.nan, math.inf)],
        ({"rope.scaling.factor": 4.0}, {"rope_freqs.weight": ONES}, "rope_freqs.weight beside linear"),
        ({"rope.scaling.type": "yarn"}, {"rope_freqs.weight": ONES}, "rope_freqs.weight beside yarn"),
        *[
            ({"rope.scaling.type": "yarn", f"rope.scaling.{key}": value}, {}, key)
            for key, value in (
                *[("original_context_length", value) for value in (0, 4097, 3)],
                *[("yarn_beta_fast", value) for value in (0.0, 0.5, math.nan)],
                *[("yarn_log_multiplier", value) for value in (-1.0, math.nan)],
                ("yarn_beta_slow", -1.0),
                ("yarn_attn_factor", 0.0),
                ("yarn_ext_factor", 0.5),
            )
        ],
    ],
    ids=str,
)
def test_h_l1_gguf_what_cannot_be_is_refused_by_its_key(metadata, tensors, words):
    with pytest.raises(CheckpointError) as caught:
        of_gguf(metadata, tensors)
    assert words in caught.value.message
