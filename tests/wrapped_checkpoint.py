"""Safetensors files of any type, and tiny checkpoints as multimodal releases wrap and name them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from tiny_checkpoint import tiny_config, tiny_weights, write_json, write_tiny_llama

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}


@attrs.frozen
class RawTensor:
    """A tensor by the file's own name of its type; zeros where there are no bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @classmethod
    def of(cls, values: np.ndarray) -> RawTensor:
        return cls("F32", values.shape, values.astype("<f4").tobytes())

    @property
    def content(self) -> bytes:
        return bytes(int(np.prod(self.shape)) * BYTES.get(self.dtype, 1)) if self.data is None else self.data


def write_raw_safetensors(path: Path, tensors: Mapping[str, RawTensor]) -> Path:
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    data = b"".join(tensor.content for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_wrapped(
    folder: Path,
    names: Mapping[str, str],
    *,
    outer: Mapping[str, Any] | None = None,
    key: str = "text_config",
    tie: bool = True,
    more: Mapping[str, np.ndarray] | None = None,
    drop: str | None = None,
) -> Path:
    """The tiny llama as the text model of a wrapper. `names` maps beginnings of canonical names ("model.", "lm_head.")
    to those in the file; `more` are tensors of other towers, `drop` a canonical name that is left out."""
    write_tiny_llama(folder, tie=tie)
    text = tiny_config(tie=tie)
    config = {"model_type": "wrapper", "architectures": ["Wrapper"], **(outer or {}), key: text}
    write_json(folder / "config.json", {name: value for name, value in config.items() if value is not None})
    tensors = {name: values for name, values in tiny_weights(tie=tie).items() if name != drop}
    renamed = {renamed_as(name, names): RawTensor.of(values) for name, values in tensors.items()}
    extra = {name: RawTensor.of(values) for name, values in (more or {}).items()}
    write_raw_safetensors(folder / "model.safetensors", {**renamed, **extra})
    return folder


def renamed_as(name: str, names: Mapping[str, str]) -> str:
    for begin, own in names.items():
        if name.startswith(begin):
            return own + name[len(begin) :]
    return name
