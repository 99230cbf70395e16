"""Writes the toy model `tiny`: a checkpoint as Hugging Face would hold one, with the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from mlxcel.core.source import Progress
from mlxcel.plugins.tokenizers.pieces import byte_characters

LAYERS: Final = 2
HIDDEN: Final = 64
HEADS: Final = 4
KV_HEADS: Final = 2
FFN: Final = 128
CONTEXT: Final = 2048

END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS: Final = (END, TURN_START, TURN_END)
VOCAB: Final = 256 + len(SPECIALS)
"""The id of a byte is the byte; the special tokens follow."""

CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LICENSE: Final = (
    "The files of this folder were written by mlxcel and are licensed under the Apache License, Version 2.0:\n"
    "https://www.apache.org/licenses/LICENSE-2.0\n"
)


def fetch(target: Path, progress: Progress) -> None:
    """Writes the files into `target`; it takes no network and too little time to show progress."""
    (target / "LICENSE").write_bytes(LICENSE.encode())
    _write_json(target / "config.json", _config())
    ends = [VOCAB - len(SPECIALS) + SPECIALS.index(token) for token in (END, TURN_END)]
    _write_json(target / "generation_config.json", {"eos_token_id": ends})
    _write_json(target / "tokenizer.json", _tokenizer())
    roles = {"eos_token": TURN_END, "chat_template": CHATML, "add_bos_token": False}
    _write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles})
    _write_weights(target / "model.safetensors")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes((json.dumps(value, indent=1) + "\n").encode())


def _config() -> dict[str, Any]:
    return {
        "model_type": "mlxcel-tiny",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _tokenizer() -> dict[str, Any]:
    """tokenizer.json: one token a byte, no merges."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {**byte_characters(), **{token: 256 + place for place, token in enumerate(SPECIALS)}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": vocabulary[token], "content": token, **flags} for token in SPECIALS],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])), "merges": []},
    }


def _write_weights(path: Path) -> None:
    """One shard of float32 tensors. https://github.com/huggingface/safetensors#format"""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for name, values in _weights():
        parts.append(values.astype("<f4").tobytes())
        start, end = end, end + len(parts[-1])
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _weights() -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values; a matrix is [out, in]. Scales are powers of two, so that every value is exact."""
    head_dim = HIDDEN // HEADS
    yield "model.embed_tokens.weight", uniform("model.embed_tokens.weight", VOCAB, HIDDEN)
    for index in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * head_dim, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * head_dim),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        for short, (rows, columns) in shapes.items():
            name = f"model.layers.{index}.{short}.weight"
            yield name, uniform(name, rows, columns) / np.float32(4)  # variance 1/48, about 1/in
        for short in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{index}.{short}.weight", np.ones(HIDDEN, np.float32)
    yield "model.norm.weight", np.ones(HIDDEN, np.float32)
    head = uniform("lm_head.weight", VOCAB, HIDDEN)
    # Text that can be read: other bytes than printable ASCII, and what begins a turn, are unlikely.
    readable = [*range(0x20, 0x7F), 256 + SPECIALS.index(TURN_END)]
    head[np.setdiff1d(np.arange(VOCAB), readable)] /= np.float32(16)
    yield "lm_head.weight", head


def uniform(name: str, rows: int, columns: int) -> np.ndarray:
    """float32 [rows, columns] in [-1, 1), multiples of 2**-23, from the name and the place alone.

    The mixing function of SplitMix64 (https://doi.org/10.1145/2660193.2660195): NumPy's own streams of floats may
    change between its versions, and integers cannot.
    """
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    z = seed + np.arange(rows * columns, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
    values: np.ndarray = bits.astype(np.float32) / np.float32(2**23) - np.float32(1)
    return values.reshape(rows, columns)
