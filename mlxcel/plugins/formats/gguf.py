"""GGUF checkpoints: one file with metadata, tokenizer and weights, read in place through a memory map."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlxcel.core.checkpoint import TensorInfo
from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.floats import checked_out, dominant_type
from mlxcel.plugins.formats.gguf_blocks import READABLE_TYPES
from mlxcel.plugins.formats.gguf_header import read_header
from mlxcel.plugins.formats.mapped_file import map_bytes

if TYPE_CHECKING:
    import numpy as np


class GgufCheckpoint:
    """A `Checkpoint` over a little-endian GGUF file of version 2 or 3 whose tensors are all of `READABLE_TYPES`.

    Raises CheckpointError when the file is damaged, truncated, one part of a split, big-endian, or holds a tensor of
    another type; nothing is allocated for a number that the file itself cannot back.
    """

    format = "gguf"
    naming = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: np.ndarray | None = map_bytes(path)
        header = read_header(self._data, path)
        self._entries = header.tensors
        architecture = header.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise CheckpointError(
                f"{path}: general.architecture is {architecture!r}, it must name the model's architecture",
                hint="convert the model again; a GGUF without it cannot be loaded by anything",
            )
        self.architecture: str = architecture
        prefix = f"{architecture}."
        self.config: Mapping[str, Any] = MappingProxyType(
            {key.removeprefix(prefix): value for key, value in header.metadata.items()}
        )
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {e.name: TensorInfo(e.name, e.shape, e.kind, e.nbytes) for e in header.tensors.values()}
        )
        self.assets: Mapping[str, Any] = MappingProxyType({"gguf": MappingProxyType(dict(header.metadata))})

    @property
    def quantisation(self) -> str:
        return dominant_type(self.tensors)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        entry = self._entries[name]
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        out = checked_out(name, entry.shape, out)
        raw = self._data[entry.start : entry.end]
        READABLE_TYPES[entry.kind].dequantise(raw, out.reshape(-1))
        return out

    def close(self) -> None:
        self._data = None  # the map goes with its last view
