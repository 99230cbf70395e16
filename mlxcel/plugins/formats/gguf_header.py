"""The header of a GGUF file: metadata and tensor table, every number checked against the file before it is used.

Layout of versions 2 and 3, little-endian (ggml's `docs/gguf.md`): magic, version u32, tensor count u64, metadata count
u64; metadata as (key, type u32, value); tensors as (name, n_dims u32, dims u64 fastest first, type u32, offset u64);
zeros up to the alignment; data. A string is its u64 length and its bytes, an array its type u32, its u64 length and its
values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.gguf_blocks import READABLE_TYPES, type_name
from mlxcel.plugins.formats.mapped_file import describe_start

MAX_STRING: Final = 1 << 24  # the longest known chat templates are below 2**18
MAX_NAME: Final = 1 << 16  # the format's own bound of a key
MAX_ELEMENTS: Final = 1 << 22  # array elements of the whole file; the largest known vocabularies need about 2**20
MAX_TENSORS: Final = 1 << 20
MAX_PAIRS: Final = 1 << 16
MAX_DEPTH: Final = 4  # arrays in arrays; no known key nests at all
MAX_DIMS: Final = 4
DEFAULT_ALIGNMENT: Final = 32

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Final[Mapping[int, np.dtype[Any]]] = {
    **{number: np.dtype(code) for number, code in enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1"))},
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@attrs.frozen
class TensorEntry:
    """A row of the tensor table. `start` counts from the beginning of the file; `shape` is slowest first."""

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@attrs.frozen
class GgufHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def read_header(data: np.ndarray, path: Path) -> GgufHeader:
    """`data` is the mapped file [bytes] uint8. Raises CheckpointError for anything that does not hold."""
    return _Reader(data, path).header()


class _Reader:
    def __init__(self, data: np.ndarray, path: Path) -> None:
        self.view = data.data
        self.data = data
        self.path = path
        self.size = len(self.view)
        self.at = 0
        self.elements = 0

    def fail(self, message: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}", hint=hint)

    def header(self) -> GgufHeader:
        if self.data[:4].tobytes() != b"GGUF":
            raise self.fail(f"not a GGUF file: {describe_start(self.data)}", "GGUF files begin with b'GGUF'")
        self.at = 4
        version = self.u32("version")
        if version in (2 << 24, 3 << 24):
            raise self.fail(f"big-endian GGUF (version {version >> 24}) is not read", "convert it to little-endian")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not read, only 2 and 3", "convert the model again")
        tensor_count, key_count = self.u64("tensor count"), self.u64("metadata count")
        # The shortest tensor row is 24 bytes (no name, no dimension), the shortest pair 13 (no key, one byte of value).
        self.bounded(tensor_count, 24, "tensors", MAX_TENSORS)
        self.bounded(key_count, 13, "metadata pairs", MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("metadata key", MAX_NAME)
            if key in metadata:
                raise self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.u32(f"type of {key!r}"), key, MAX_DEPTH)
        self.refuse_split(metadata)
        return GgufHeader(metadata, self.table(tensor_count, self.alignment(metadata)))

    # --- numbers and strings ---------------------------------------------------------------------------------------

    def take(self, nbytes: int, what: str) -> int:
        """Moves past `nbytes` bytes and returns where they begin."""
        start, end = self.at, self.at + nbytes
        if end > self.size:
            raise self.fail(
                f"{what} at byte {start} needs {nbytes} bytes, the file ends after {self.size - start}",
                "the file is truncated or damaged: download it again",
            )
        self.at = end
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.view, self.take(8, what))[0])

    def bounded(self, count: int, nbytes: int, what: str, limit: int) -> None:
        """Refuses a count whose smallest encoding does not fit in the rest of the file."""
        if count * nbytes > self.size - self.at:
            raise self.fail(
                f"the header claims {count} {what}, at least {count * nbytes} bytes, "
                f"where {self.size - self.at} are left",
                "the file is truncated or damaged: download it again",
            )
        if count > limit:
            raise self.fail(f"the header claims {count} {what}, more than the {limit} this reader takes")

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        length = self.u64(f"length of {what}")
        if length > limit:
            raise self.fail(f"{what} at byte {self.at} claims {length} bytes, at most {limit} are taken")
        start = self.take(length, what)
        try:
            return str(self.view[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at byte {start} is not UTF-8: {error.reason}") from error

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self.string(f"value of {key!r}")
        if kind == _ARRAY:
            return self.array(key, depth)
        return self.numbers(kind, 1, key)[0]

    def array(self, key: str, depth: int) -> list[Any]:
        if depth == 0:
            raise self.fail(f"{key!r} nests arrays more than {MAX_DEPTH} deep")
        kind, count = self.u32(f"element type of {key!r}"), self.u64(f"length of {key!r}")
        smallest = {_STRING: 8, _ARRAY: 12}.get(kind) or self.number(kind, key).itemsize
        self.bounded(count, smallest, f"elements in {key!r}", MAX_ELEMENTS)
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self.fail(f"the metadata arrays up to {key!r} hold {self.elements} elements, at most {MAX_ELEMENTS}")
        if kind == _STRING:
            what = f"element of {key!r}"
            return [self.string(what) for _ in range(count)]
        if kind == _ARRAY:
            return [self.array(key, depth - 1) for _ in range(count)]
        return self.numbers(kind, count, key)

    def number(self, kind: int, key: str) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self.fail(f"{key!r} has value type {kind}, known are 0 to 12")
        return _NUMBERS[kind]

    def numbers(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = self.number(kind, key)
        start = self.take(count * dtype.itemsize, f"value of {key!r}")
        values = np.frombuffer(self.view, dtype, count, start)
        return list((values != 0).tolist() if kind == _BOOL else values.tolist())

    # --- what the numbers mean ---------------------------------------------------------------------------------------

    def refuse_split(self, metadata: Mapping[str, Any]) -> None:
        parts = metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise self.fail(
                f"one of {parts} parts of a split GGUF, which is not read",
                "join the parts first: llama-gguf-split --merge FIRST_PART WHOLE.gguf",
            )

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or alignment < 1
            or alignment & (alignment - 1)
        ):
            raise self.fail(f"general.alignment is {alignment!r}, it must be a power of two")
        return alignment

    def table(self, count: int, alignment: int) -> dict[str, TensorEntry]:
        rows = [self.row() for _ in range(count)]
        unreadable = [f"{row.name} ({row.kind})" for row in rows if row.kind not in READABLE_TYPES]
        if unreadable:
            shown = ", ".join(unreadable[:4]) + (" ..." if len(unreadable) > 4 else "")
            raise self.fail(
                f"{len(unreadable)} of {count} tensors have a type that is not read: {shown}",
                f"readable types are {', '.join(sorted(READABLE_TYPES))}: take a file of one of these",
            )
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for row in rows:
            if row.name in tensors:
                raise self.fail(f"tensor {row.name!r} occurs twice")
            tensors[row.name] = self.place(row, base, alignment)
        self.check_extents(tensors)
        return tensors

    def row(self) -> TensorEntry:
        """A row as it stands: `start` is still the offset within the data."""
        name = self.string("tensor name", MAX_NAME)
        dims = self.u32(f"number of dimensions of {name!r}")
        if dims > MAX_DIMS:
            raise self.fail(f"tensor {name!r} claims {dims} dimensions, at most {MAX_DIMS} are possible")
        shape = tuple(self.u64(f"dimension of {name!r}") for _ in range(dims))[::-1]
        if 0 in shape:
            raise self.fail(f"tensor {name!r} has an empty shape {list(shape)}")
        kind = type_name(self.u32(f"type of {name!r}"))
        return TensorEntry(name, shape, kind, self.u64(f"offset of {name!r}"), 0)

    def place(self, row: TensorEntry, base: int, alignment: int) -> TensorEntry:
        """The row with its place and length in the file."""
        block = READABLE_TYPES[row.kind]
        width = row.shape[-1] if row.shape else 1
        if width % block.elements:
            raise self.fail(
                f"tensor {row.name!r} {list(row.shape)} is {row.kind}: "
                f"a row of {width} is not whole blocks of {block.elements}"
            )
        if row.start % alignment:
            raise self.fail(f"tensor {row.name!r} begins at offset {row.start}, which is not a multiple of {alignment}")
        nbytes = prod(row.shape) // block.elements * block.nbytes
        return attrs.evolve(row, start=base + row.start, nbytes=nbytes)

    def check_extents(self, tensors: Mapping[str, TensorEntry]) -> None:
        """Every tensor lies within the file and apart from the others."""
        ordered = sorted(tensors.values(), key=lambda entry: entry.start)
        outside = [entry for entry in ordered if entry.end > self.size]
        if outside:
            first = outside[0]
            raise self.fail(
                f"the tensors need {max(entry.end for entry in outside)} bytes, the file has {self.size}: "
                f"{len(outside)} of {len(ordered)} do not fit, the first is {first.name!r} "
                f"{list(first.shape)} {first.kind} at bytes {first.start} to {first.end}",
                "the file is truncated or damaged: download it again",
            )
        for before, after in pairwise(ordered):
            if after.start < before.end:
                raise self.fail(f"tensors {before.name!r} and {after.name!r} overlap at byte {after.start}")
