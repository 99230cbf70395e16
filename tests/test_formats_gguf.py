"""GGUF files: metadata and values against the gguf package."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_rows import random_rows, reference, same_bits
from tiny_checkpoint import CHATML, gguf_name, interleave_rope_rows, tiny_vocabulary, tiny_weights, write_tiny_gguf

from mlxcel.plugins.formats.detect import is_gguf, is_safetensors_folder
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.gguf_blocks import READABLE_TYPES, TYPE_NAMES, type_name

QUANTISED_BY_GGUF = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
WORKING_MEMORY = 8 << 20  # blocks of 1 MiB with their fields as bytes; the tensor of the test has 16 MiB


def write_one_tensor(path: Path, kind: str, raw: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", READABLE_TYPES)
def test_a_tensor_is_read_into_its_place(tmp_path: Path, kind: str) -> None:
    raw = random_rows(kind, 300, 1024)  # 307,200 weights: more than one block of the reader
    checkpoint = GgufCheckpoint(write_one_tensor(tmp_path / "m.gguf", kind, raw))
    info = checkpoint.tensors["w"]
    assert (info.shape, info.dtype, info.nbytes) == ((300, 1024), kind, raw.size)
    assert same_bits(checkpoint.read("w"), reference(raw, kind))
    larger = np.full((2, 300, 1024), -1, np.float32)
    checkpoint.read("w", larger[1])
    assert same_bits(larger[1], reference(raw, kind))
    assert (larger[0] == -1).all()


@pytest.mark.parametrize("kind", READABLE_TYPES)
def test_reading_needs_a_block_and_not_a_tensor(tmp_path: Path, kind: str) -> None:
    checkpoint = GgufCheckpoint(write_one_tensor(tmp_path / "m.gguf", kind, random_rows(kind, 2048, 2048)))
    out = np.zeros((2048, 2048), np.float32)
    tracemalloc.start()
    try:
        checkpoint.read("w", out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < WORKING_MEMORY


@pytest.mark.parametrize("kind", QUANTISED_BY_GGUF)
def test_a_whole_model_equals_the_gguf_package(tmp_path: Path, kind: str) -> None:
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", dtype=kind, tie=False))
    tensors = gguf.GGUFReader(checkpoint.path).tensors
    assert [tensor.name for tensor in tensors] == list(checkpoint.tensors)
    for tensor in tensors:
        assert same_bits(checkpoint.read(tensor.name), reference(tensor.data, tensor.tensor_type.name)), tensor.name
    prose = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert checkpoint.quantisation == prose.get(kind, kind)


def test_h_l21_rows_of_q_and_k_come_as_the_file_holds_them(tmp_path: Path) -> None:
    """The schema of the family undoes the interleaving; the reader must not, or it would be undone twice."""
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf"))
    weights = tiny_weights()
    q, k = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert same_bits(checkpoint.read("blk.0.attn_q.weight"), interleave_rope_rows(q, 4))
    assert same_bits(checkpoint.read("blk.0.attn_k.weight"), interleave_rope_rows(k, 2))
    assert np.array_equal(checkpoint.read("blk.0.attn_q.weight")[:2], q[[0, 8]])  # head 0, d = 16: pairs (0, 8) ...
    for name, values in weights.items():
        if "q_proj" not in name and "k_proj" not in name:
            assert same_bits(checkpoint.read(gguf_name(name)), values), name


def test_facts_and_config(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf", head_dim=24))
    assert (checkpoint.format, checkpoint.naming, checkpoint.architecture) == ("gguf", "gguf", "llama")
    config = checkpoint.config
    assert (config["block_count"], config["attention.head_count"], config["attention.key_length"]) == (2, 4, 24)
    assert config["attention.layer_norm_rms_epsilon"] == float(np.float32(1e-5))
    assert config["general.name"] == "tiny"
    metadata = checkpoint.assets["gguf"]
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.chat_template"] == CHATML
    assert metadata["tokenizer.ggml.tokens"] == tiny_vocabulary()[0]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert set(checkpoint.assets) == {"gguf"}


def test_every_kind_of_metadata_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_string("a.text", "naïve 日本 🙂")
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_array("a.flags", [True, False])
    writer.add_array("a.texts", ["a", "b c", "é"])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    values = {
        key.removeprefix("a."): value for key, value in GgufCheckpoint(tmp_path / "m.gguf").assets["gguf"].items()
    }
    assert values | {"general.architecture": "llama"} == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": float(np.float32(0.1)),
        "f64": 0.1,
        "yes": True,
        "no": False,
        "text": "naïve 日本 🙂",
        "numbers": [1, -2, 3],
        "floats": [0.5, -1.0],
        "flags": [True, False],
        "texts": ["a", "b c", "é"],
        "nested": [[1, 2], [3]],
    }
    assert values["yes"] is True
    assert values["flags"][1] is False


def test_version_2_has_the_layout_of_version_3(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = (2).to_bytes(4, "little")
    path.write_bytes(data)
    checkpoint = GgufCheckpoint(path)
    assert same_bits(checkpoint.read("token_embd.weight"), tiny_weights()["model.embed_tokens.weight"])


def test_the_alignment_of_the_file_is_obeyed(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    for index in range(3):
        writer.add_tensor(f"w{index}", np.full(5, index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    assert [checkpoint.read(f"w{index}").tolist() for index in range(3)] == [[index] * 5 for index in range(3)]


def test_out_must_fit(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf"))
    with pytest.raises(KeyError):
        checkpoint.read("nothing")
    with pytest.raises(ValueError, match=r"token_embd\.weight must be writable float32 \[320, 64\]"):
        checkpoint.read("token_embd.weight", np.empty((320, 64), np.float16))
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("token_embd.weight")


def test_type_names_are_ggmls() -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind < len(TYPE_NAMES):  # the package may know newer ones
            assert type_name(kind) == kind.name
    assert type_name(99) == "type 99"


def test_block_sizes_are_ggmls() -> None:
    for name, block in READABLE_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (block.elements, block.nbytes)


def test_detection_looks_at_names_and_the_first_bytes(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    blob = path.rename(tmp_path / "a1b2c3")
    assert is_gguf(blob)
    (tmp_path / "broken.GGUF").write_bytes(b"")
    assert is_gguf(tmp_path / "broken.GGUF")
    (tmp_path / "text").write_bytes(b"GGU")
    assert not is_gguf(tmp_path / "text")
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "nowhere")
    assert not is_safetensors_folder(blob)


def test_the_default_model_equals_the_gguf_package(smollm2_path: Path) -> None:
    checkpoint = GgufCheckpoint(smollm2_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    assert set(tensors) == set(checkpoint.tensors)
    assert len(tensors) == 272
    assert checkpoint.quantisation == "Q4_1"
    chosen = [name for name in tensors if not name.startswith("blk.") or name.startswith(("blk.0.", "blk.29."))]
    for name in chosen:
        raw = tensors[name]
        assert same_bits(checkpoint.read(name), reference(raw.data, raw.tensor_type.name)), name
