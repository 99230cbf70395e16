"""Logits of reference-numpy against two independent forwards, and the ropes at far positions."""

import json

import gguf
import nnx_llama
import numpy as np
import pytest
import reference_forward
from real_engine import real_engine
from tiny_checkpoint import tiny_config, tiny_weights, write_json, write_safetensors, write_tiny_gguf, write_tiny_llama

from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.qwen import Qwen3
from mlxcel.plugins.families.rope import Rope
from mlxcel.plugins.families.rope_gguf import rope_from_gguf
from mlxcel.plugins.families.rope_hf import rope_from_hf
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint

ROUNDING = 2e-5
"""Logits are of order 1; float32 sums of at most 128 terms over two layers, in another order, part by a few 1e-6."""

ANOTHER_LIBRARY = 1e-4
"""Relative, of the largest logit: the tolerance the specification gives to an independent implementation."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS = {
    "tied": {},
    "untied": {"tie": False},
    "head_dim 24": {"head_dim": 24},
    "one KV head": {"kv_heads": 1},
    "no grouping": {"kv_heads": 4},
    "theta": {"config_overrides": {"rope_theta": 500000.0}},
    "llama3": {"config_overrides": {"rope_scaling": LLAMA3}},
}


def ours(checkpoint, ids, family=None):
    """Logits [T, V] at every position of a prompt, by feeding its prefixes."""
    real = real_engine(checkpoint, family)
    return np.concatenate([real.alone(ids[: end + 1], 0)[0] for end in range(len(ids))])


def described(folder, options):
    """(tensors, config) of a written TINY, for an independent forward."""
    shape = {name: value for name, value in options.items() if name != "config_overrides"}
    return tiny_weights(**shape), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_h_l7_h_l3_h_l5_logits_are_the_formula(tmp_path, options):
    """H-L3 rope_theta, H-L5 tied and untied heads, H-L7 an explicit head_dim, H-L1 llama3."""
    folder = write_tiny_llama(tmp_path, **options)
    tensors, config = described(folder, options)
    ids = np.random.default_rng(0).integers(0, 320, 40)
    expected = reference_forward.forward(tensors, config, ids, dtype=np.float64)
    np.testing.assert_allclose(ours(SafetensorsCheckpoint(folder), ids), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("options", [VARIANTS["tied"], VARIANTS["untied"], VARIANTS["theta"]])
def test_logits_are_those_of_flax(tmp_path, options):
    folder = write_tiny_llama(tmp_path, **options)
    tensors, config = described(folder, options)
    ids = np.random.default_rng(1).integers(0, 320, 40)
    expected = np.asarray(nnx_llama.forward(tensors, config, ids))
    mine = ours(SafetensorsCheckpoint(folder), ids)
    assert np.abs(mine - expected).max() <= ANOTHER_LIBRARY * np.abs(expected).max()


def write_family(folder, model_type, extra, config):
    """A TINY folder of another model type, with more tensors."""
    write_json(folder / "config.json", {**tiny_config(), "model_type": model_type, **config})
    tensors = {**tiny_weights(), **extra}
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors, json.loads((folder / "config.json").read_text())


def random_tensors(shapes, seed=3):
    rng = np.random.default_rng(seed)
    return {name: (1 + 0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def test_qwen3_normalises_q_and_k(tmp_path):
    shapes = {f"model.layers.{i}.self_attn.{n}_norm.weight": (16,) for i in range(2) for n in "qk"}
    tensors, config = write_family(tmp_path, "qwen3", random_tensors(shapes), {"head_dim": 16})
    ids = np.random.default_rng(0).integers(0, 320, 24)
    expected = reference_forward.forward(tensors, config, ids, dtype=np.float64)
    np.testing.assert_allclose(ours(SafetensorsCheckpoint(tmp_path), ids, Qwen3()), expected, rtol=0, atol=ROUNDING)


def test_biases_are_added(tmp_path):
    sizes = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32, "self_attn.o_proj": 64}
    sizes |= {"mlp.gate_proj": 128, "mlp.up_proj": 128, "mlp.down_proj": 64}
    shapes = {f"model.layers.{i}.{name}.bias": (size,) for i in range(2) for name, size in sizes.items()}
    flags = {"attention_bias": True, "mlp_bias": True}
    tensors, config = write_family(tmp_path, "llama", random_tensors(shapes), flags)
    ids = np.random.default_rng(0).integers(0, 320, 24)
    expected = reference_forward.forward(tensors, config, ids, dtype=np.float64)
    mine = ours(SafetensorsCheckpoint(tmp_path), ids)
    # The biases of 1 make activations, and so rounding, several times larger.
    np.testing.assert_allclose(mine, expected, rtol=0, atol=ROUNDING * 10)


@pytest.mark.parametrize("options", [{}, {"tie": False}, {"head_dim": 24}, {"kv_heads": 1}])
def test_h_l21_gguf_gives_the_bits_of_its_folder(tmp_path, options):
    """GGUF keeps q and k rows of `llama` in pair order; un-permuted they are the same numbers."""
    folder = SafetensorsCheckpoint(write_tiny_llama(tmp_path / "hf", **options))
    file = GgufCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf", **options))
    ids = np.random.default_rng(0).integers(0, 320, 20)
    assert ours(folder, ids).tobytes() == ours(file, ids).tobytes()


def rope_of(tmp_path, **overrides):
    """The rope of a checkpoint whose heads have 16 dims."""
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path, config_overrides=overrides))
    return rope_from_hf(ConfigKeys(checkpoint.config, "config.json"), 16)


SPELLINGS = {
    "rope_type": {"rope_scaling": LLAMA3},
    "type": {"rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}},
    "both": {"rope_scaling": {"type": "llama3", **LLAMA3}},
    "rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}, "rope_theta": None},
}


@pytest.mark.parametrize("overrides", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("position", [0, 1000, 9000])
def test_h_l1_llama3_at_far_positions(tmp_path, overrides, position):
    """Each spelling, against the published formula written out wave by wave, in radians at that position."""
    frequencies = rope_of(tmp_path, **overrides).frequencies(2048)
    expected = reference_forward.inverse_frequencies(16, 10000.0, LLAMA3)
    np.testing.assert_allclose(frequencies * np.float64(position), expected * position, rtol=2e-7, atol=0)
    assert not np.allclose(frequencies, reference_forward.inverse_frequencies(16, 10000.0), rtol=1e-3)


def test_h_l3_theta_has_a_documented_default(tmp_path):
    assert rope_of(tmp_path, rope_theta=None) == Rope(16, 10000.0)
    assert rope_of(tmp_path / "b", rope_theta=500000.0) == Rope(16, 500000.0)


def test_h_l1_gguf_keeps_llama3_as_a_tensor(tmp_path, monkeypatch):
    """`rope_freqs.weight` divides pair by pair; the result is the folder's own llama3."""
    plain = reference_forward.inverse_frequencies(16, 10000.0)
    bent = reference_forward.inverse_frequencies(16, 10000.0, LLAMA3)
    written = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer, *args, **options):
        writer.add_tensor("rope_freqs.weight", (plain / bent).astype(np.float32))
        return written(writer, *args, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    file = GgufCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf"))
    rope = rope_from_gguf(ConfigKeys(file.config, "the GGUF metadata"), 16, file)
    np.testing.assert_allclose(rope.frequencies(2048), bent, rtol=3e-7)
    folder = SafetensorsCheckpoint(write_tiny_llama(tmp_path / "hf", config_overrides={"rope_scaling": LLAMA3}))
    ids = np.random.default_rng(0).integers(0, 320, 30)
    np.testing.assert_allclose(ours(file, ids), ours(folder, ids), rtol=0, atol=ROUNDING)
