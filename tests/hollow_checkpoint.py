"""Checkpoints of real sizes that take no disk: true headers, and a hole where the weights would be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tiny_checkpoint import tiny_tokenizer_json, write_json

from mlxcel.core.family import WeightSchema
from mlxcel.plugins.builtin import mlxcel_families

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 4608,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
}


class _Headers:
    """As much of a checkpoint as a family needs to read its config."""

    naming = "hf"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.tensors = {} if config["tie_word_embeddings"] else {"lm_head.weight": None}


def parsed(config: Mapping[str, Any]) -> tuple[Any, Any, WeightSchema]:
    """The family of a config.json, its own config, and the schema."""
    (spec,) = [spec for spec in mlxcel_families() if spec.claims("hf", config["model_type"])]
    family: Any = spec.load()()
    own = family.parse_config(_Headers({"tie_word_embeddings": True, **config}))
    return family, own, family.schema(own)


def write_hollow(
    folder: Path, config: Mapping[str, Any], *, extra: Mapping[str, tuple[int, ...]] | None = None
) -> Path:
    """config.json, a tokenizer, and BF16 tensors by their shapes, those of `extra` too. Returns the folder."""
    folder.mkdir(parents=True)
    schema = parsed(config)[2]
    shapes = {name: place.shape for name, place in schema.tensor_names("hf").items()} | dict(extra or {})
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer.json", tiny_tokenizer_json())
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder
