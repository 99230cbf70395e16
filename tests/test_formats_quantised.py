"""Folders of packed weights are refused by name, with the reason and a next step, whatever their numbers say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_llama
from wrapped_checkpoint import RawTensor, write_raw_safetensors

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint

LINEAR = "model.layers.0.mlp.up_proj"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    assert caught.value.hint is not None
    assert "float checkpoint" in caught.value.hint
    assert "GGUF" in caught.value.hint
    return caught.value.message


def said(folder: Path, **fields: Any) -> str:
    return refusal(write_tiny_llama(folder, config_overrides=fields))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "GPTQ"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "GPTQ"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "FP8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "of-next-year"}, "'of-next-year'"),
        ({"quant_method": ["gptq"]}, "list"),
        ({"quant_method": 10**40}, "an integer of"),
        ({"bits": 4, "group_size": 64}, "MLX"),
        ({"load_in_8bit": True}, "a method it does not name"),
        ("gptq", "'gptq'"),
        (True, "True"),
        ([4], "list"),
    ],
)
def test_h_l19_a_quantisation_that_config_json_names_is_refused(tmp_path: Path, settings: Any, words: str) -> None:
    message = said(tmp_path, quantization_config=settings)
    assert f"quantised by {words}" in message
    assert "quantization_config" in message


@pytest.mark.parametrize("group_size", [64, 32, 0, -1, 10**30, None, "64"])
@pytest.mark.parametrize("more", [{}, {"bits": 4}, {"bits": 8, "mode": "mxfp4"}, {"bits": 4, "lm_head": False}])
def test_h_l17_h_l18_mlx_settings_are_refused_whatever_they_are(
    tmp_path: Path, group_size: Any, more: Mapping[str, Any]
) -> None:
    message = said(tmp_path, quantization={"group_size": group_size, **more})
    assert "quantised by MLX (quantization: " in message
    assert str(tmp_path / "config.json") in message


def test_h_l19_the_settings_that_matter_are_shown(tmp_path: Path) -> None:
    message = said(
        tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    )
    assert "quantization_config: bits 4, group_size 128, desc_act True" in message


@pytest.mark.parametrize("settings", [{}, False, 0])
def test_empty_settings_quantise_nothing(tmp_path: Path, settings: Any) -> None:
    folder = write_tiny_llama(tmp_path, config_overrides={"quantization": settings, "quantization_config": settings})
    assert set(SafetensorsCheckpoint(folder).tensors) == set(tiny_weights())


def test_the_inner_config_of_a_wrapper_counts_too(tmp_path: Path) -> None:
    message = said(tmp_path, text_config={"model_type": "llama", "quantization_config": {"quant_method": "awq"}})
    assert "quantised by AWQ" in message


def packed(rows: int, columns: int, bits: int = 4) -> tuple[int, int]:
    return rows, columns * bits // 32


GPTQ = {
    "qweight": RawTensor("I32", (8, 128)),
    "qzeros": RawTensor("I32", (1, 16)),
    "scales": RawTensor("F16", (1, 128)),
    "g_idx": RawTensor("I32", (64,)),
}
WITHOUT_ORDER = {name: tensor for name, tensor in GPTQ.items() if name != "g_idx"}
MLX = {
    "weight": RawTensor("U32", packed(128, 64)),
    "scales": RawTensor("F16", (128, 1)),
    "biases": RawTensor("F16", (128, 1)),
}
NF4 = {"weight": RawTensor("U8", (4096, 1)), "weight.absmax": RawTensor("F32", (128,))}
INT8 = {"weight": RawTensor("I8", (128, 64)), "SCB": RawTensor("F32", (128,))}
COMPRESSED = {"weight_packed": RawTensor("I32", (128, 8)), "weight_scale": RawTensor("BF16", (128, 1))}
FP8 = {"weight": RawTensor("F8_E4M3", (128, 64)), "weight_scale_inv": RawTensor("F32", (1, 1))}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        pytest.param(GPTQ, "GPTQ", id="gptq with activation order"),
        pytest.param(WITHOUT_ORDER, "GPTQ or AWQ", id="gptq or awq"),
        pytest.param(MLX, "MLX", id="mlx"),
        pytest.param({"weight": MLX["weight"], "scales": MLX["scales"]}, "MLX", id="mlx without biases"),
        pytest.param({"weight": MLX["weight"]}, "packs into U32", id="u32 alone"),
        pytest.param(NF4, "packs into U8|bitsandbytes", id="nf4"),
        pytest.param(INT8, "packs into I8|bitsandbytes", id="int8"),
        pytest.param(COMPRESSED, "compressed-tensors", id="compressed-tensors"),
        pytest.param(FP8, "scaled F8_E4M3|FP8", id="fp8 with scales"),
        pytest.param({"weight": RawTensor("F8_E5M2", (128, 64))}, "scaled F8_E5M2", id="fp8 alone"),
        pytest.param({"weight_blocks": RawTensor("U8", (2, 4, 16))}, "MXFP4", id="mxfp4"),
    ],
)
@pytest.mark.parametrize("tower", ["model.", "language_model.model.", "transformer."])
def test_h_l17_h_l19_packed_tensors_are_noticed_where_config_json_is_silent(
    tmp_path: Path, tensors: Mapping[str, RawTensor], words: str, tower: str
) -> None:
    write_tiny_llama(tmp_path)
    weights = {name: RawTensor.of(values) for name, values in tiny_weights().items() if name != f"{LINEAR}.weight"}
    weights |= {f"{LINEAR}.{name}": tensor for name, tensor in tensors.items()}
    renamed = {name.replace("model.", tower, 1): tensor for name, tensor in weights.items()}
    write_raw_safetensors(tmp_path / "model.safetensors", renamed)
    message = refusal(tmp_path)
    assert any(f"quantised by {word}" in message or f"by a method that {word}" in message for word in words.split("|"))
    assert LINEAR.removeprefix("model.") in message


def test_packed_tensors_of_another_tower_are_extra_ones(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    weights = {name: RawTensor.of(values) for name, values in tiny_weights().items()}
    write_raw_safetensors(tmp_path / "model.safetensors", {**weights, "vision.proj.weight": FP8["weight"]})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.tensors["vision.proj.weight"].dtype == "F8_E4M3"
    assert np.array_equal(checkpoint.read(f"{LINEAR}.weight"), tiny_weights()[f"{LINEAR}.weight"])


@pytest.mark.parametrize("dtype", ["F64", "I64", "I16", "BOOL", "F8_E4M3"])
def test_a_type_that_is_not_read_is_named_when_it_is_wanted(tmp_path: Path, dtype: str) -> None:
    write_tiny_llama(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tiny_weights())
    write_raw_safetensors(tmp_path / "more.safetensors", {"vision.scale": RawTensor(dtype, (4,))})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"'vision.scale' \[4\] is {dtype}; F32, F16, BF16 are read"):
        checkpoint.read("vision.scale")
