"""One safetensors file: its header, checked against the file's size before anything is trusted.

Layout (https://github.com/huggingface/safetensors, "Format"): u64 header length N, N bytes of JSON
{name: {dtype, shape, data_offsets [begin, end)}}, then the data, which the tensors cover without holes or overlaps.

The safetensors library maps files too, but its NumPy side has no bfloat16 and copies whole tensors; a `Checkpoint`
reads into memory of the caller, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import attrs

from mlxcel.core.checkpoint import TensorInfo
from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.floats import BLOCK_ELEMENTS, FLOATS, checked_out
from mlxcel.plugins.formats.json_file import parse_json_object
from mlxcel.plugins.formats.mapped_file import describe_start, map_bytes

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER: Final = 100_000_000  # the format's own bound
MAX_DIMS: Final = 8

DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Every type the format names: others may lie in a file as long as nothing reads them."""


@attrs.frozen
class Shard:
    """An opened file. `starts` says where each tensor's bytes begin, counted from the beginning of the file."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    starts: Mapping[str, int]
    data: np.ndarray = attrs.field(eq=False, repr=False)

    def read(self, name: str, out: np.ndarray | None) -> np.ndarray:
        """As `Checkpoint.read`. Raises CheckpointError for a tensor that is not F32, F16 or BF16."""
        info = self.tensors[name]
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} {list(info.shape)} is {info.dtype}; {', '.join(FLOATS)} are read",
                hint="take the checkpoint in float32, float16 or bfloat16, or a GGUF of it",
            )
        nbytes, widen = FLOATS[info.dtype]
        out = checked_out(name, info.shape, out)
        values, start = out.reshape(-1), self.starts[name]
        for begin in range(0, values.size, BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, values.size)
            widen(self.data[start + begin * nbytes : start + end * nbytes], values[begin:end])
        return out


def open_shard(path: Path) -> Shard:
    """Maps the file and checks its header. Raises CheckpointError with the file's name and the numbers concerned."""
    data = map_bytes(path)
    size = data.size
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, a safetensors file has at least 8", hint=_AGAIN)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > size - 8:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes, the file has {size - 8} behind its first 8 "
            f"({describe_start(data)})",
            hint=_AGAIN,
        )
    if length > MAX_HEADER:
        raise CheckpointError(f"{path}: the header claims {length} bytes, the format allows {MAX_HEADER}")
    header = parse_json_object(data[8 : 8 + length].tobytes(), f"the header of {path}")
    header.pop("__metadata__", None)
    base = 8 + length
    placed = {name: _entry(path, name, entry) for name, entry in header.items()}
    _check_extents(path, {name: (begin, end) for name, (_, begin, end) in placed.items()}, size - base)
    infos = {name: info for name, (info, _, _) in placed.items()}
    return Shard(path, infos, {name: base + begin for name, (_, begin, _) in placed.items()}, data)


_AGAIN: Final = "the file is truncated or damaged: download it again"


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """The tensor and its begin and end within the data."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{path}: tensor {name!r} has the shape {shape!r}, at most {MAX_DIMS} sizes are expected")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {name!r} has data_offsets {offsets!r}, [begin, end] is expected")
    begin, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise CheckpointError(
            f"{path}: tensor {name!r} {shape} {dtype} needs {-(-bits // 8)} bytes, its offsets {begin} to {end} "
            f"hold {end - begin}"
        )
    return TensorInfo(name, tuple(shape), dtype, end - begin), begin, end


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extents(path: Path, extents: Mapping[str, tuple[int, int]], size: int) -> None:
    """The tensors cover the data: nothing outside, no overlap, no hole."""
    expected, owner = 0, "the header"
    furthest = max((end for _, end in extents.values()), default=0)
    if furthest > size:
        outside = [name for name, (_, end) in extents.items() if end > size]
        raise CheckpointError(
            f"{path}: the tensors need {furthest} bytes of data, the file has {size}: {len(outside)} of {len(extents)} "
            f"do not fit, the first is {outside[0]!r}",
            hint=_AGAIN,
        )
    for name, (begin, end) in sorted(extents.items(), key=lambda item: item[1]):
        if begin < expected:
            raise CheckpointError(f"{path}: tensors {owner!r} and {name!r} overlap at byte {begin} of the data")
        if begin > expected:
            raise CheckpointError(f"{path}: bytes {expected} to {begin} of the data belong to no tensor")
        expected, owner = end, name
    if expected < size:
        raise CheckpointError(f"{path}: bytes {expected} to {size} of the data belong to no tensor", hint=_AGAIN)
