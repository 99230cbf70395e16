"""The elementwise ops of reference-numpy against jax.nn, by the names that configs use."""

import jax
import numpy as np
import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel_reference_numpy.context import ACTIVATIONS

TOLERANCE = 1e-6
"""Of max(1, |x|): a few roundings of float32 in another order; exact and tanh GELU differ by 4e-4."""

EXPECTED = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

SPELLINGS = {**{name: name for name in EXPECTED}, "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def test_there_is_an_expectation_for_each():
    assert EXPECTED.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_jax(name):
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, -80.0, 80.0]]).astype(np.float32)
    ours, expected = ACTIVATIONS[name](x), np.asarray(EXPECTED[name](x))
    assert ours.dtype == np.float32
    assert np.max(np.abs(ours - expected) / np.maximum(1, np.abs(x))) <= TOLERANCE


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_an_extreme_value_is_no_nan(name):
    """exp(100) is infinite in float32: what is divided by it must come out as 0, not as NaN."""
    with np.errstate(all="ignore"):
        low, high = ACTIVATIONS[name](np.array([-1000, 1000], np.float32))
    assert (low, high) == (0, 1000)


@pytest.mark.parametrize(("written", "meant"), SPELLINGS.items())
def test_the_config_chooses_the_activation(tmp_path, written, meant):
    folder = write_tiny_llama(tmp_path, config_overrides={"hidden_act": written})
    assert Llama().parse_config(SafetensorsCheckpoint(folder)).activation == meant
