"""mlxcel/testing/random_checkpoint.py: published shapes, values that a bfloat16 holds, and nothing that repeats."""

import ml_dtypes
import numpy as np
import pytest

from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.qwen import Qwen3
from mlxcel.testing.random_checkpoint import PERIOD, SHAPES, SPAN, random_checkpoint

FAMILIES = {"llama": Llama, "qwen3": Qwen3}

PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
}
"""As the models' own pages count them, a tied head once."""


def made(name, **changed):
    config = {**SHAPES[name], **changed}
    family = FAMILIES[config["model_type"]]()
    return family, random_checkpoint(family, config)


@pytest.mark.parametrize("name", SHAPES)
def test_it_has_the_parameters_of_the_published_model(name):
    _, checkpoint = made(name)
    assert sum(tensor.size for tensor in checkpoint.tensors.values()) == PARAMETERS[name]
    assert all(tensor.nbytes == 2 * tensor.size for tensor in checkpoint.tensors.values())


def test_it_has_the_positions_and_ropes_of_the_published_model():
    family, checkpoint = made("llama-3.2-1b")
    config = family.parse_config(checkpoint)
    assert (config.context, config.vocab_size) == (131072, 128256)
    assert len(config.kinds[0].rope.frequencies(config.context)) == 32


def test_every_value_is_a_bfloat16():
    _, checkpoint = made("qwen3-0.6b")
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_norm.weight"):
        values = checkpoint.read(name)
        assert values.dtype == np.float32
        assert np.array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values)


def test_matrices_have_variance_one_over_their_inputs_and_norms_lie_around_one():
    _, checkpoint = made("qwen3-0.6b")
    matrix = checkpoint.read("model.layers.0.mlp.down_proj.weight")
    assert matrix.shape == (1024, 3072)
    assert float(matrix.var()) * 3072 == pytest.approx(1, rel=0.01)
    norm = checkpoint.read("model.norm.weight")
    assert float(norm.mean()) == pytest.approx(1, abs=0.02)
    assert float(norm.std()) == pytest.approx(0.1, rel=0.2)


def test_a_bias_lies_around_zero():
    _, checkpoint = made("llama-3.2-1b", attention_bias=True, num_hidden_layers=1)
    bias = checkpoint.read("model.layers.0.self_attn.q_proj.bias")
    assert abs(float(bias.mean())) < 0.02


def test_rows_and_tensors_differ():
    """More values than are drawn: no row of a matrix is another one, nor one of its neighbour's."""
    _, checkpoint = made("llama-3.2-1b", num_hidden_layers=2)
    gate, up = (checkpoint.read(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    assert gate.size > 3 * PERIOD
    assert gate.size > SPAN
    beginnings = np.concatenate([gate, up])[:, :8]
    assert len(np.unique(beginnings, axis=0)) == len(beginnings)
    similar = gate[:256] @ gate[256:512].T  # of rows of length about 1
    assert float(np.abs(similar).max()) < 0.15


def test_a_name_and_a_seed_decide_the_values():
    family, checkpoint = made("qwen3-0.6b", num_hidden_layers=1)
    name = "model.layers.0.self_attn.k_proj.weight"
    values = checkpoint.read(name)
    assert np.array_equal(values, made("qwen3-0.6b")[1].read(name))
    other = random_checkpoint(family, checkpoint.config, seed=1).read(name)
    assert float(np.abs(np.corrcoef(values.ravel(), other.ravel())[0, 1])) < 0.01


def test_it_reads_into_what_is_given():
    _, checkpoint = made("llama-3.1-8b", num_hidden_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    alone = checkpoint.read(name)
    fused = np.zeros((2, *alone.shape), np.float32)
    assert checkpoint.read(name, fused[1]) is not None
    assert np.array_equal(fused[1], alone)
    assert not fused[0].any()


def test_an_unknown_name_is_a_key_error():
    _, checkpoint = made("qwen3-0.6b")
    with pytest.raises(KeyError):
        checkpoint.read("model.layers.28.mlp.up_proj.weight")
