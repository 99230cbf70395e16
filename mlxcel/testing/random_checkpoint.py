"""Checkpoints of published shapes with random weights: made in memory about as fast as memory is written, no file."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from mlxcel.core.checkpoint import TensorInfo

if TYPE_CHECKING:
    from mlxcel.core.family import ModelFamily

PERIOD: Final = 4_194_301
"""Values that are drawn; every tensor walks over them from a place of its own. A prime, so that no two rows of a matrix
begin at the same place: 4096 rows of 2048 values would, were it a power of two."""
SPAN: Final = 1 << 20
"""Values that one thread writes at a time, 4 MiB: a memory that is new is written no faster than its pages come, and
those of one thread come slowly."""
MOST_THREADS: Final = 16
NORM_SPREAD: Final = 0.1

_LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
_QWEN3: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": _llama3_rope(32.0),
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": _llama3_rope(8.0),
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
}
"""config.json by name, as published."""


@attrs.frozen(eq=False)
class RandomCheckpoint:
    """Every tensor follows from `seed`, its name and its shape, and every value is a bfloat16.

    Matrices [F, D] have variance 1/D, so that a product of values of variance 1 has variance 1 and logits spread by
    about 1; norm weights lie around 1, biases around 0. Rows of a matrix are different stretches of the same values.
    """

    config: Mapping[str, Any]
    architecture: str
    seed: int = 0
    tensors: Mapping[str, TensorInfo] = attrs.field(factory=dict)
    path: Path = Path("random")
    format: str = "random"
    naming: str = "hf"
    assets: Mapping[str, Any] = attrs.field(factory=dict)
    quantisation: str = "bfloat16"
    _made: dict[tuple[float, float], np.ndarray] = attrs.field(factory=dict, init=False, repr=False)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        info = self.tensors[name]
        values = np.empty(info.shape, np.float32) if out is None else out
        flat, source = values.reshape(-1), self._values(info)
        start = zlib.crc32(name.encode()) % PERIOD
        spans = [(first, min(first + SPAN, flat.size)) for first in range(0, flat.size, SPAN)]

        def fill(span: tuple[int, int]) -> None:
            at, end = span
            while at < end:
                place = (start + at) % PERIOD
                count = min(PERIOD - place, end - at)
                flat[at : at + count] = source[place : place + count]
                at += count

        if len(spans) == 1:
            fill(spans[0])
        else:
            list(self._writers.map(fill, spans))
        return values

    def _values(self, info: TensorInfo) -> np.ndarray:
        """float32 [PERIOD] of the centre and spread that a tensor has; kept, since many have the same."""
        if len(info.shape) > 1:
            centre, spread = 0.0, 1 / math.sqrt(info.shape[-1])
        else:
            centre, spread = 0.0 if info.name.endswith("bias") else 1.0, NORM_SPREAD
        if (centre, spread) not in self._made:
            values = self._drawn * np.float32(spread)
            values += np.float32(centre)
            self._made[centre, spread] = _bfloat16(values)
        return self._made[centre, spread]

    @cached_property
    def _writers(self) -> ThreadPoolExecutor:
        """Threads that end with this checkpoint."""
        return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="mlxcel-random")

    @cached_property
    def _drawn(self) -> np.ndarray:
        """float32 [PERIOD] of variance 1 around 0."""
        return np.random.default_rng(self.seed).standard_normal(PERIOD, np.float32)

    def close(self) -> None:
        """Holds no file."""


def random_checkpoint(family: ModelFamily, config: Mapping[str, Any], *, seed: int = 0) -> RandomCheckpoint:
    """With the tensors that the family's schema asks for by a config.json. Raises as the family does."""
    bare = RandomCheckpoint(config, config["model_type"], seed)
    wanted = family.schema(family.parse_config(bare)).tensor_names("hf")
    tensors = {
        name: TensorInfo(name, place.shape, "BF16", 2 * math.prod(place.shape)) for name, place in wanted.items()
    }
    return attrs.evolve(bare, tensors=tensors)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Finite float32 values rounded to the nearest bfloat16, ties to even; still float32."""
    bits = values.view(np.uint32)
    rounded: np.ndarray = ((bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000).astype(np.uint32)
    return rounded.view(np.float32)
