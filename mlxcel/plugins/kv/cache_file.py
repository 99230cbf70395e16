"""The file of a prompt cache: valid positions alone, what they are the KV of, and a digest over everything (spec V16).

Layout: MAGIC; the length of the header, 8 bytes little-endian; the header, JSON; arrays one behind the other, as the
header lists them; BLAKE2b-256 of all before it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import numpy as np

from mlxcel.core.prefix import KVKey, ModelIdentity
from mlxcel.core.saved_prefix import SavedPrefix, SavedState
from mlxcel.errors import CacheFileError
from mlxcel.plugins.kv.whole_file import remove_left_behind, replace_whole

MAGIC: Final = b"MLXCELKV"
DIGEST_BYTES: Final = 32
DTYPES: Final = ("float32", "float16", "uint16", "int8", "uint8")
"""Of the arrays of a file; others are a start of something else."""
_BLOCK: Final = 1 << 20


def write_cache_file(path: Path, saved: Sequence[SavedPrefix]) -> None:
    """Under a temporary name beside `path`, mode 0600, and then in its place; of a link, in that of the file it points
    to. CacheFileError where that cannot be."""
    arrays = [array for prefix in saved for array in _arrays(prefix)]
    header = json.dumps([_described(prefix) for prefix in saved]).encode()
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise OSError(errno.EEXIST, "what is there is no file")
        replace_whole(target, lambda file: _write(file, header, arrays))
    except OSError as error:
        raise CacheFileError(
            f"the prompt cache could not be written to {path}: {error.strerror or error}",
            hint="check --prompt-cache-file",
        ) from error


def read_cache_file(path: Path) -> list[SavedPrefix]:
    """What a file holds; arrays stay mapped. CacheFileError when it is damaged, whatever is in it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would be to wait for whoever writes to it
            raise _Damaged("it is no file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_end = _check(file, size)
            file.seek(len(MAGIC) + 8)
            header = file.read(header_end - len(MAGIC) - 8)
    except OSError as error:
        raise CacheFileError(f"{path} cannot be read: {error.strerror or error}", hint="check its mode") from error
    except _Damaged as error:
        raise _damaged(path, str(error)) from None
    try:
        return _parsed(path, header, header_end, size - DIGEST_BYTES)
    except (_Damaged, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"its header makes no sense: {error!r}") from error


def remove_unfinished(path: Path) -> list[Path]:
    """What processes that were killed while they wrote the file have left beside it."""
    return remove_left_behind(Path(os.path.realpath(path)))


class _Damaged(Exception):
    """What is wrong with a file."""


def _damaged(path: Path, what: str) -> CacheFileError:
    return CacheFileError(f"{path} is no prompt cache that can be used: {what}", hint="remove the file")


def _write(file: BinaryIO, header: bytes, arrays: Sequence[np.ndarray]) -> None:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for block in _blocks(header, arrays):
        digest.update(block)
        file.write(block)
    file.write(digest.digest())


def _blocks(header: bytes, arrays: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    yield MAGIC + len(header).to_bytes(8, "little")
    yield header
    for array in arrays:
        if array.size:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _check(file: BinaryIO, size: int) -> int:
    """Where the header ends, of a file whose digest is right."""
    head = file.read(len(MAGIC) + 8)
    if len(head) < len(MAGIC) + 8 or head[: len(MAGIC)] != MAGIC or size < len(head) + DIGEST_BYTES:
        raise _Damaged("it does not begin as one, or is too short")
    header_end = len(head) + int.from_bytes(head[len(MAGIC) :], "little")
    if header_end > size - DIGEST_BYTES:
        raise _Damaged(f"its header would end at byte {header_end} of {size}")
    digest, left = hashlib.blake2b(head, digest_size=DIGEST_BYTES), size - DIGEST_BYTES - len(head)
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            raise _Damaged("it became shorter while it was read")
        digest.update(block)
        left -= len(block)
    if file.read(DIGEST_BYTES) != digest.digest():
        raise _Damaged("its bytes are not those that were written")
    return header_end


def _arrays(prefix: SavedPrefix) -> list[np.ndarray]:
    return [*prefix.arrays, *(() if prefix.state is None else prefix.state.arrays)]


def _described(prefix: SavedPrefix) -> dict[str, Any]:
    key = attrs.asdict(prefix.key)
    key["isolation"] = None if prefix.key.isolation is None else prefix.key.isolation.hex()
    state = prefix.state
    return {
        "ids": prefix.ids.tolist(),
        "key": key,
        "prefilled": prefix.prefilled,
        "arrays": [[str(array.dtype), list(array.shape)] for array in prefix.arrays],
        "state": None
        if state is None
        else {
            "reach": state.reach,
            "written": state.written,
            "arrays": [[str(array.dtype), list(array.shape)] for array in state.arrays],
        },
    }


def _parsed(path: Path, header: bytes, begin: int, end: int) -> list[SavedPrefix]:
    """The prefixes of a header, whose arrays lie in bytes [begin, end) of the file and fill them."""
    at = begin

    def array(described: Any) -> np.ndarray:
        nonlocal at
        dtype, shape = str(described[0]), tuple(int(length) for length in described[1])
        if dtype not in DTYPES or len(shape) > 4 or any(length < 0 for length in shape):
            raise _Damaged(f"an array of {dtype} {shape}")
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if at + nbytes > end:
            raise _Damaged(f"{nbytes} bytes at {at} of {end}")
        made = np.memmap(path, dtype, "r", at, shape) if nbytes else np.zeros(shape, dtype)
        at += nbytes
        return made

    found: list[SavedPrefix] = []
    entries = json.loads(header)
    if not isinstance(entries, list):
        raise _Damaged("no list of prefixes")
    for entry in entries:
        ids = np.array(entry["ids"], np.int32).reshape(-1)
        raw = dict(entry["key"])
        model = ModelIdentity(**raw.pop("model"))
        isolation = raw.pop("isolation")
        raw["rings"] = tuple(raw.get("rings", ()))
        key = KVKey(model=model, isolation=None if isolation is None else bytes.fromhex(isolation), **raw)
        key.root()  # raises for a field of another kind
        arrays = tuple(array(each) for each in entry["arrays"])
        if not len(ids) or any(each.ndim != 3 or len(each) != len(ids) for each in arrays):
            raise _Damaged(f"arrays of another length than the {len(ids)} ids")
        state = None
        if (raw_state := entry["state"]) is not None:
            rings = tuple(array(each) for each in raw_state["arrays"])
            state = SavedState(rings, int(raw_state["reach"]), int(raw_state["written"]))
        prefilled = int(entry["prefilled"])
        if not 0 <= prefilled <= len(ids):
            raise _Damaged(f"{prefilled} of {len(ids)} positions were prefilled")
        found.append(SavedPrefix(ids, key, prefilled, arrays, state))
    if at != end:
        raise _Damaged(f"{end - at} bytes belong to nothing")
    return found
