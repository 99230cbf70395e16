"""What a checkpoint holds beside the model is named and hinders nothing."""

import numpy as np
import pytest
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_gguf, write_tiny_llama

from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.unused_tensors import unused_line, unused_tensors


def unused(checkpoint):
    return unused_tensors(Llama().schema(Llama().parse_config(checkpoint)), checkpoint)


def test_h_l5_a_stray_head_beside_tied_embeddings_is_named(tmp_path):
    write_tiny_llama(tmp_path)
    stray = {"lm_head.weight": np.ones((320, 64), np.float32), "vision.bias": np.ones(3, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", {**stray, **tiny_weights()})
    assert unused(SafetensorsCheckpoint(tmp_path)) == ("lm_head.weight", "vision.bias")


@pytest.mark.parametrize("tie", [True, False])
def test_a_plain_checkpoint_has_none(tmp_path, tie):
    assert unused(SafetensorsCheckpoint(write_tiny_llama(tmp_path / "folder", tie=tie))) == ()
    assert unused(GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", tie=tie))) == ()


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("a",), "1 tensor is not used: a"),
        (("a", "b", "c"), "3 tensors are not used: a, b, c"),
        (tuple("abcdefg"), "7 tensors are not used: a, b, c, d, e and 2 more"),
    ],
)
def test_the_line_names_a_few(names, line):
    assert unused_line(names) == line
