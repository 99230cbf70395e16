"""A checkpoint as the engine sees it: a config, named tensors, and the assets beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from mlxcel.core.named import Named

if TYPE_CHECKING:  # plugins import this module to register: no numpy
    import numpy as np


@attrs.frozen
class TensorInfo:
    """One tensor of a checkpoint. `shape` is row-major, as NumPy would hold it, whatever order the file uses."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # the file's own name for it: "F32", "BF16", "Q4_1" ...
    nbytes: int  # bytes in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Checkpoint(Protocol):
    """An opened checkpoint: headers are read and checked against the file, weights stay memory-mapped."""

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> str:
        """Name of the format plugin: "safetensors", "gguf"."""
        ...

    @property
    def naming(self) -> str:
        """Which checkpoint names of a WeightSchema apply: "hf" or "gguf"."""
        ...

    @property
    def architecture(self) -> str:
        """`model_type` of config.json, `general.architecture` of GGUF metadata."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Under "hf" naming the parsed config.json; under "gguf" naming the metadata with the architecture's prefix
        removed ("block_count", "attention.head_count") and the rest by its full key ("general.name")."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def assets(self) -> Mapping[str, Any]:
        """What is not a weight, parsed where it is JSON. Keys, each only when present: "tokenizer.json" and
        "tokenizer.model" (Paths), "tokenizer_config.json", "generation_config.json", "special_tokens_map.json" (dicts),
        "chat_template.jinja" (str), "chat_template.json" (dict), "gguf" (the metadata mapping, full keys)."""
        ...

    @property
    def quantisation(self) -> str:
        """For people: the dominant weight type, "Q4_1", "bfloat16"."""
        ...

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """A tensor's values as float32 [shape], dequantised. With `out` (float32, C-contiguous, same shape; may be a
        slice of a larger array) the values are written there and `out` is returned. Needs working memory of a bounded
        block, not of the tensor. Raises KeyError for an unknown name."""
        ...

    def close(self) -> None: ...


@attrs.frozen
class FormatSpec(Named):
    """A checkpoint reader: `load()` gives `(path: Path) -> Checkpoint`, which raises CheckpointError.

    `detect` is a lazy "module:function" `(path: Path) -> bool` that looks at names and magic bytes only.
    """

    detect: str = attrs.field(kw_only=True)
