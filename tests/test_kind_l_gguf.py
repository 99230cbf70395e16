"""GGUF files with tensors that change the answer and that no key of the metadata tells of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_checkpoint import gguf_name, interleave_rope_rows, tiny_weights, write_tiny_gguf

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.gguf import GgufCheckpoint


def write_with(path: Path, extra: Mapping[str, tuple[int, ...]]) -> Path:
    """The tiny llama's metadata with its tensors and `extra` ones by their shapes, all of them ones."""
    plain = gguf.GGUFReader(write_tiny_gguf(path.with_suffix(".plain")))
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in plain.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    for name, values in tiny_weights().items():
        heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(name.rpartition("self_attn.")[2])
        writer.add_tensor(gguf_name(name), values if heads is None else interleave_rope_rows(values, heads))
    for name, shape in extra.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q_norm.weight", (16,)),
        ("blk.1.attn_q.bias", (64,)),
        ("blk.0.attn_v.bias", (32,)),
        ("blk.0.ffn_down.bias", (64,)),
        ("blk.1.attn_sinks.weight", (4,)),
        ("blk.0.ffn_gate_shexp.weight", (8, 64)),
        ("blk.0.attn_norm.bias", (64,)),
        ("blk.0.attn_q.scale", (1,)),
        ("output_norm.bias", (64,)),
    ],
)
def test_h_l1_a_gguf_tensor_that_nobody_reads_is_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """As H-L1 has it of a key: what would change the answer is never dropped, and a GGUF model's tensors say it."""
    path = write_with(tmp_path / "m.gguf", {name: shape})
    with pytest.raises(CheckpointError, match=f"a tensor '{name}'"):
        Llama().parse_config(GgufCheckpoint(path))


@pytest.mark.parametrize(
    ("name", "shape"), [("blk.2.attn_q.weight", (64, 64)), ("blk.0.attn_rot_embd.weight", (8,)), ("v.blk.0.x", (4,))]
)
def test_h_l5_what_is_no_part_of_the_text_model_may_lie_there(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """Draft layers, tables of angles, other towers."""
    path = write_with(tmp_path / "m.gguf", {name: shape})
    assert Llama().parse_config(GgufCheckpoint(path)).layers == 2


def test_h_l5_biases_of_all_layers_are_read(tmp_path: Path) -> None:
    extra = {f"blk.{layer}.attn_{name}.bias": (64 if name == "q" else 32,) for layer in (0, 1) for name in "qkv"}
    assert Llama().parse_config(GgufCheckpoint(write_with(tmp_path / "m.gguf", extra))).qkv_bias
