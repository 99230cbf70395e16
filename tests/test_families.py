"""Families: configs that are refused, schemas that are complete, weights that are all used."""

import re

import attrs
import numpy as np
import pytest
from real_engine import assert_same_bits, real_engine
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_gguf, write_tiny_llama

from mlxcel.core.family import WeightSpec
from mlxcel.core.kv import SlidingKV
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.testing.byte_tokenizer import ByteTokenizer

IDS = np.random.default_rng(5).integers(0, 320, 12)


def logits(folder):
    return real_engine(SafetensorsCheckpoint(folder)).alone(IDS, 1)[0]


REQUIRED = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]


@pytest.mark.parametrize("key", [*REQUIRED, "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "64", True, [64], 2**60])
def test_a_size_that_is_none_is_refused_by_its_key(tmp_path, key, value):
    """Checked before memory is taken: a size of 2**60 allocates nothing."""
    folder = write_tiny_llama(tmp_path, config_overrides={key: value})
    with pytest.raises(CheckpointError, match=key):
        Llama().parse_config(SafetensorsCheckpoint(folder))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head dimension 15 must be even"),
        ({"head_dim": 0}, "head_dim"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"hidden_act": "swish9"}, "hidden_act = 'swish9'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers = 1048576"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_theta": 1e-300}, "rope_theta"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(tmp_path, overrides, words):
    folder = write_tiny_llama(tmp_path, config_overrides=overrides)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Llama().parse_config(SafetensorsCheckpoint(folder))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vocab_size", 321, "vocab_size = 321: it must be 320"),
        ("vocab_size", 0, "vocab_size = 0"),
        ("block_count", 1 << 20, "block_count = 1048576"),
        ("expert_count", 8, "no expert_used_count"),
        ("attn_logit_softcapping", 30, "attn_logit_softcapping = 30: it must be left out or 0"),
        ("residual_scale", 2, "residual_scale = 2: it must be left out or 1"),
        ("attention.value_length", 8, "attention.value_length = 8"),
        ("rope.dimension_count", 7, "rope.dimension_count = 7"),
        ("attention.head_count", True, "attention.head_count = True"),
    ],
)
def test_a_gguf_value_that_cannot_be_is_refused_by_its_key(tmp_path, key, value, words):
    """What would change the answer is refused, never dropped; a count is bounded before names are made of it."""
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value})
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Llama().parse_config(GgufCheckpoint(path))


def test_a_gguf_window_is_obeyed(tmp_path):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 16})
    config = Llama().parse_config(GgufCheckpoint(path))
    assert Llama().kv_spec(config).layers == (SlidingKV(2, 16, 16, window=16),) * 2


@pytest.mark.parametrize("metadata", [{"attention.sliding_window": 2048}, {"attention.sliding_window": 0}])
def test_a_gguf_window_that_hides_nothing_is_none(tmp_path, metadata):
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata={f"llama.{key}": value for key, value in metadata.items()})
    config = Llama().parse_config(GgufCheckpoint(path))
    assert config.context == 2048
    assert not Llama().kv_spec(config).windowed


@pytest.mark.parametrize("name", tiny_weights(tie=False))
def test_every_weight_of_the_schema_is_used(tmp_path, name):
    folder = write_tiny_llama(tmp_path, tie=False)
    before = logits(folder)
    weights = tiny_weights(tie=False)
    weights[name] = weights[name] * np.float32(1.25)
    write_safetensors(folder / "model.safetensors", weights)
    assert not np.array_equal(before, logits(folder))


def test_the_schema_names_what_the_checkpoint_holds(tmp_path):
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path, tie=False))
    family = Llama()
    names = family.schema(family.parse_config(checkpoint)).tensor_names("hf")
    assert {name: place.shape for name, place in names.items()} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }


def test_h_l5_tied_embeddings_ignore_a_stray_head(tmp_path):
    folder = write_tiny_llama(tmp_path)
    before = logits(folder)
    stray = {"lm_head.weight": np.full((320, 64), 9, np.float32), "rotary.inv_freq": np.ones(8, np.float32)}
    write_safetensors(folder / "model.safetensors", {**tiny_weights(), **stray})
    assert_same_bits(before, logits(folder))


@pytest.mark.parametrize(("has_head", "tied"), [(True, False), (False, True)])
def test_h_l5_a_config_that_says_nothing_is_tied_iff_there_is_no_head(tmp_path, has_head, tied):
    folder = write_tiny_llama(tmp_path, tie=not has_head, config_overrides={"tie_word_embeddings": None})
    assert Llama().parse_config(SafetensorsCheckpoint(folder)).tied is tied


class HeadWithBias(Llama):
    """As GPT-J and Phi have it."""

    def schema(self, config):
        schema = super().schema(config)
        names = {"hf": "lm_head.bias"}
        bias = WeightSpec("unembed_bias", "V", (config.vocab_size,), names, "bias", False, bias_of="unembed")
        return attrs.evolve(schema, weights=(*schema.weights, bias))


@pytest.mark.parametrize("tie", [True, False])
def test_a_bias_of_the_head_is_added_to_the_logits(tmp_path, tie):
    """Of a tied head too: the family names the weight, however it is held."""
    folder = write_tiny_llama(tmp_path, tie=tie)
    before = logits(folder)
    bias = np.linspace(-1, 1, 320, dtype=np.float32)
    write_safetensors(folder / "model.safetensors", {**tiny_weights(tie=tie), "lm_head.bias": bias})
    first = real_engine(SafetensorsCheckpoint(folder), HeadWithBias()).alone(IDS, 0)[0]
    assert_same_bits(before[:1] + bias, first)


def test_missing_tensors_are_named_in_one_error(tmp_path):
    folder = write_tiny_llama(tmp_path, tie=False)
    weights = {name: value for name, value in tiny_weights(tie=False).items() if "mlp" not in name}
    write_safetensors(folder / "model.safetensors", weights)
    with pytest.raises(CheckpointError, match=r"6 of 21 tensors are missing: model\.layers\.0\.mlp\.gate_proj\.weight"):
        logits(folder)


def test_a_tensor_of_another_shape_names_both(tmp_path):
    folder = write_tiny_llama(tmp_path)
    weights = tiny_weights()
    weights["model.layers.1.self_attn.k_proj.weight"] = np.zeros((48, 64), np.float32)
    write_safetensors(folder / "model.safetensors", weights)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight is \[48, 64\].*\[32, 64\]"):
        logits(folder)


class Sized(ByteTokenizer):
    """A tokenizer that is smaller than the model's vocabulary."""

    size = 300


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_h_l9_ids_beyond_the_tokenizer_are_never_drawn(tmp_path, temperature):
    """Spec S14: vocab 320, tokenizer 300, a huge logit on 310."""
    folder = write_tiny_llama(tmp_path, tie=False)
    weights = tiny_weights(tie=False)
    weights["model.norm.weight"] = np.ones(64, np.float32)
    weights["lm_head.weight"][310] = 50 * np.sign(weights["lm_head.weight"][310])
    write_safetensors(folder / "model.safetensors", weights)
    drawn = {}
    for tokenizer in (None, Sized()):
        real = real_engine(SafetensorsCheckpoint(folder), tokenizer=tokenizer)
        drawn[tokenizer is None] = real.alone(IDS, 19, temperature=temperature, seed=1)[1]
    assert 310 in drawn[True], "the logit is huge where nothing masks it"
    assert max(drawn[False]) < 300


def test_h_l25_rows_of_two_lengths_know_no_nan(tmp_path):
    real = real_engine(SafetensorsCheckpoint(write_tiny_llama(tmp_path)))
    prompts = [IDS[:2], IDS[:9]]
    together = real.together(prompts, [3, 3], [64, 64], [[0, 1]] * 6)
    for index, prompt in enumerate(prompts):
        assert np.all(np.isfinite(together[index][0]))
        assert_same_bits(real.alone(prompt, 3)[0], together[index][0])


def test_weights_of_nan_fail_the_row_and_nothing_else(tmp_path):
    folder = write_tiny_llama(tmp_path)
    weights = tiny_weights()
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
    write_safetensors(folder / "model.safetensors", weights)
    real = real_engine(SafetensorsCheckpoint(folder))
    outcome = real.engine.prefill(real.open(IDS), real.plan(IDS))
    assert outcome.error is not None
    assert outcome.error.code == "numeric"
    assert real.engine.healthy
