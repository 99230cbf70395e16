"""Damaged and hostile weight files: refused with the numbers, in flat memory (clients 1.9, test 10 of 1.10)."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import write_tiny_gguf, write_tiny_llama

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.gguf_blocks import READABLE_TYPES
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint

FLAT = 1 << 20  # 1 MiB: no claim of a file of a few hundred bytes may take more
U32, STRING, ARRAY = 4, 8, 9
HUGE = (2**31, 2**60, 2**63, 2**64 - 1)


def text(value: str, length: int | None = None) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + value


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    sizes = b"".join(struct.pack("<Q", dim) for dim in dims)
    return (
        text(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


LLAMA = pair("general.architecture", STRING, text("llama"))


def gguf_bytes(
    pairs: Sequence[bytes] = (LLAMA,),
    tensors: Sequence[bytes] = (),
    *,
    data: int = 256,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
) -> bytes:
    """A GGUF file by hand, with any count overridden."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def shown(value: str | bytes) -> str:
    """Names a case by the words it expects, not by its bytes."""
    return value if isinstance(value, str) else "file"


def refused(opener: Callable[[Path], Any], path: Path) -> CheckpointError:
    """The error of opening, which must come in flat memory and name the file."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            opener(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < FLAT
    assert str(path) in caught.value.message
    return caught.value


def refused_gguf(tmp_path: Path, content: bytes) -> CheckpointError:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    return refused(GgufCheckpoint, path)


def test_the_builder_makes_files_that_open(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf_bytes(tensors=[tensor("w", [4, 2]), tensor("v", [8], offset=32)]))
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.tensors["w"].shape == (2, 4)
    assert checkpoint.read("v").tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"GG", "it begins with b'GG'"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"PK\x03\x04 and more", "a zip archive"),
        (b"<!DOCTYPE html><html>", "an HTML or XML page"),
        (b"tjgg\x01\x00\x00\x00", "GGJT"),
        (gguf_bytes(magic=b"FUGG"), "it begins with b'FUGG"),
        (gguf_bytes(version=1), "GGUF version 1 is not read, only 2 and 3"),
        (gguf_bytes(version=4), "GGUF version 4 is not read"),
        (gguf_bytes(version=3 << 24), r"big-endian GGUF (version 3) is not read"),
        (b"GGUF", "version at byte 4 needs 4 bytes, the file ends after 0"),
        (gguf_bytes()[:20], "metadata count at byte 16 needs 8 bytes, the file ends after 4"),
    ],
    ids=shown,
)
def test_what_is_no_readable_gguf_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refused_gguf(tmp_path, content).message


@pytest.mark.parametrize("claim", HUGE)
@pytest.mark.parametrize(
    "build",
    [
        lambda claim: gguf_bytes(n_tensors=claim),
        lambda claim: gguf_bytes(n_pairs=claim),
        lambda claim: gguf_bytes([text("key", claim)]),
        lambda claim: gguf_bytes([pair("key", STRING, text("value", claim))]),
        lambda claim: gguf_bytes([pair("key", ARRAY, array(U32, claim))]),
        lambda claim: gguf_bytes([pair("key", ARRAY, array(0, claim))]),
        lambda claim: gguf_bytes([pair("key", ARRAY, array(STRING, claim))]),
        lambda claim: gguf_bytes([pair("key", ARRAY, array(ARRAY, claim))]),
        lambda claim: gguf_bytes([pair("key", ARRAY, array(STRING, 1, text("x", claim)))]),
        lambda claim: gguf_bytes(tensors=[text("name", claim)]),
        lambda claim: gguf_bytes(tensors=[tensor("w", [claim])]),
        lambda claim: gguf_bytes(tensors=[tensor("w", [claim] * 4)]),
        lambda claim: gguf_bytes(tensors=[tensor("w", [32, claim], kind=8)]),
        lambda claim: gguf_bytes(tensors=[tensor("w", [4], offset=claim & ~31)]),
    ],
)
def test_a_claim_beyond_the_file_is_refused_in_flat_memory(
    tmp_path: Path, build: Callable[[int], bytes], claim: int
) -> None:
    """Test 10 of clients 1.10: a count, length or offset beyond the file."""
    refused_gguf(tmp_path, build(claim))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf_bytes(n_tensors=2**27), "more than the 1048576"),
        (gguf_bytes(n_pairs=2**27), "more than the 65536"),
        (gguf_bytes([text("key", 2**30)]), "at most 65536 are taken"),
        (gguf_bytes([pair("key", STRING, text("value", 2**30))]), "at most 16777216 are taken"),
        (gguf_bytes([pair("key", ARRAY, array(STRING, 2**27))]), "more than the 4194304"),
        (gguf_bytes([pair("key", ARRAY, array(0, 2**30))]), "more than the 4194304"),
        (
            gguf_bytes([pair(f"key{i}", ARRAY, array(0, 2**21, bytes(2**21))) for i in range(3)]),
            "hold 6291456 elements",
        ),
    ],
    ids=shown,
)
def test_a_claim_that_a_large_file_could_back_is_bounded_too(tmp_path: Path, content: bytes, words: str) -> None:
    """The file is 8 GiB of holes, so that the size of the file refuses nothing."""
    path = tmp_path / "large.gguf"
    path.write_bytes(content)
    with path.open("r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(CheckpointError, match=words):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gguf_bytes([LLAMA, LLAMA]), "'general.architecture' occurs twice"),
        (gguf_bytes([pair("key", 13, b"")]), "'key' has value type 13"),
        (gguf_bytes([pair("key", ARRAY, array(77, 1))]), "'key' has value type 77"),
        (gguf_bytes([pair("key", ARRAY, array(ARRAY, 1) * 60)]), "nests arrays more than 4 deep"),
        (gguf_bytes([pair("key", STRING, struct.pack("<Q", 2) + b"\xff\xfe")]), "is not UTF-8"),
        (gguf_bytes([]), "general.architecture is None"),
        (gguf_bytes([pair("general.architecture", U32, bytes(4))]), "general.architecture is 0"),
        (gguf_bytes([LLAMA, pair("general.alignment", U32, struct.pack("<I", 0))]), "alignment is 0"),
        (gguf_bytes([LLAMA, pair("general.alignment", U32, struct.pack("<I", 48))]), "alignment is 48"),
        (gguf_bytes([LLAMA, pair("general.alignment", STRING, text("32"))]), "alignment is '32'"),
        (gguf_bytes([LLAMA, pair("split.count", 2, struct.pack("<H", 3))]), "one of 3 parts of a split GGUF"),
        (gguf_bytes(tensors=[tensor("w", [1] * 5)]), "claims 5 dimensions, at most 4"),
        (gguf_bytes(tensors=[tensor("w", [4], n_dims=2**32 - 1)]), "claims 4294967295 dimensions"),
        (gguf_bytes(tensors=[tensor("w", [4, 0])]), "'w' has an empty shape [0, 4]"),
        (gguf_bytes(tensors=[tensor("w", [4]), tensor("w", [4], offset=32)]), "'w' occurs twice"),
        (gguf_bytes(tensors=[tensor("w", [4]), tensor("v", [4])]), "'w' and 'v' overlap"),
        (gguf_bytes(tensors=[tensor("w", [16]), tensor("v", [4], offset=32)]), "'w' and 'v' overlap"),
        (gguf_bytes(tensors=[tensor("w", [4], offset=8)]), "offset 8, which is not a multiple of 32"),
        (gguf_bytes(tensors=[tensor("w", [48], kind=3)]), "a row of 48 is not whole blocks of 32"),
        (gguf_bytes(tensors=[tensor("w", [128], kind=12)]), "Q4_K: a row of 128 is not whole blocks of 256"),
        (gguf_bytes(tensors=[tensor("w", [2**40], kind=14)]), "the tensors need"),
        (gguf_bytes(tensors=[tensor("w", [65])]), "needs bytes|the tensors need"),
    ],
    ids=shown,
)
def test_what_does_not_hold_is_explained(tmp_path: Path, content: bytes, words: str) -> None:
    message = refused_gguf(tmp_path, content).message
    assert any(word in message for word in words.split("|"))


@pytest.mark.parametrize(
    ("number", "name"), [(15, "Q8_K"), (16, "IQ2_XXS"), (23, "IQ4_XS"), (39, "MXFP4"), (28, "F64"), (99, "type 99")]
)
def test_unreadable_types_are_listed_by_name_when_the_file_is_opened(tmp_path: Path, number: int, name: str) -> None:
    rows = [tensor(f"w{index}", [256], kind=number, offset=2**40) for index in range(6)]
    error = refused_gguf(tmp_path, gguf_bytes(tensors=[tensor("fine", [4]), *rows]))
    assert f"6 of 7 tensors have a type that is not read: w0 ({name}), w1 ({name})" in error.message
    assert error.hint is not None
    assert all(known in error.hint for known in READABLE_TYPES)


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.999])
def test_a_truncated_gguf_says_expected_and_actual_bytes(tmp_path: Path, kept: float) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    size = int(len(whole) * kept)
    message = refused_gguf(tmp_path, whole[:size]).message
    assert f"the tensors need {len(whole)} bytes, the file has {size}" in message


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 900),
)
def test_any_damage_to_a_gguf_header_is_a_checkpoint_error_or_none(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    pairs = [
        LLAMA,
        pair("a.list", ARRAY, array(STRING, 3, text("x") + text("yy") + text(""))),
        pair("n", U32, bytes(4)),
    ]
    data = bytearray(gguf_bytes(pairs, [tensor("w", [4, 2]), tensor("v", [32], kind=8, offset=32)]))
    for at, value in changes:
        data[at % len(data)] = value
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(data[: len(data) - cut] if cut < len(data) else data)
    try:
        checkpoint = GgufCheckpoint(path)
    except CheckpointError:
        return
    for name, info in checkpoint.tensors.items():
        assert checkpoint.read(name).shape == info.shape


# --- safetensors -----------------------------------------------------------------------------------------------------


def shard_bytes(header: Any, data: int = 64, length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + bytes(data)


def entry(shape: Any = (4, 4), begin: Any = 0, end: Any = 64, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused_shard(tmp_path: Path, content: bytes) -> CheckpointError:
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    error = refused(SafetensorsCheckpoint, folder)
    assert "model.safetensors" in error.message
    return error


def test_the_shard_builder_makes_files_that_open(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(shard_bytes({"w": entry()}))
    assert SafetensorsCheckpoint(folder).read("w").tolist() == [[0.0] * 4] * 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes"),
        (b"\x00" * 7, "has 7 bytes"),
        (shard_bytes({"w": entry()}, length=2**60), f"the header claims {2**60} bytes"),
        (shard_bytes({"w": entry()}, length=2**64 - 1), f"the header claims {2**64 - 1} bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (shard_bytes(b"{"), "is not valid JSON"),
        (shard_bytes(b"[]"), "holds a JSON list"),
        (shard_bytes(b"[" * 50_000), "is not valid JSON"),
        (shard_bytes(b'{"w": {}, "w": {}}'), "'w' occurs twice"),
        (shard_bytes({"w": 3}), "unknown dtype None"),
        (shard_bytes({"w": entry(dtype="F12")}), "unknown dtype 'F12'"),
        (shard_bytes({"w": entry(dtype=["F32"])}), "unknown dtype ['F32']"),
        (shard_bytes({"w": entry(shape=None)}), "has the shape None"),
        (shard_bytes({"w": entry(shape=[4, -4])}), "has the shape [4, -4]"),
        (shard_bytes({"w": entry(shape=[16.0])}), "has the shape [16.0]"),
        (shard_bytes({"w": entry(shape=[True])}), "has the shape [True]"),
        (shard_bytes({"w": entry(shape=[1] * 9)}), "at most 8 sizes"),
        (shard_bytes({"w": entry(begin=64, end=0)}), "data_offsets [64, 0]"),
        (shard_bytes({"w": entry(begin=-64, end=0)}), "data_offsets [-64, 0]"),
        (shard_bytes({"w": entry(end="64")}), "data_offsets [0, '64']"),
        (shard_bytes({"w": entry(shape=[4, 5])}), "needs 80 bytes, its offsets 0 to 64 hold 64"),
        (shard_bytes({"w": entry(shape=[2**60, 2**60])}), "bytes, its offsets 0 to 64 hold 64"),
        (
            shard_bytes({"w": entry(shape=[2**60], end=2**62)}),
            f"the tensors need {2**62} bytes of data, the file has 64",
        ),
        (shard_bytes({"w": entry(), "v": entry([4], 48, 64)}), "'w' and 'v' overlap at byte 48"),
        (shard_bytes({"w": entry([4], 48, 64)}), "bytes 0 to 48 of the data belong to no tensor"),
        (shard_bytes({"w": entry()}, data=80), "bytes 64 to 80 of the data belong to no tensor"),
    ],
    ids=shown,
)
def test_a_bad_shard_is_explained(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refused_shard(tmp_path, content).message


@pytest.mark.parametrize("kept", [0.2, 0.9, 0.999])
def test_a_truncated_shard_says_expected_and_actual_bytes(tmp_path: Path, kept: float) -> None:
    whole = (write_tiny_llama(tmp_path / "whole") / "model.safetensors").read_bytes()
    base = 8 + int.from_bytes(whole[:8], "little")
    size = int(len(whole) * kept)
    message = refused_shard(tmp_path, whole[:size]).message
    assert f"the tensors need {len(whole) - base} bytes of data, the file has {size - base}" in message


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    changes=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 200),
)
def test_any_damage_to_a_shard_is_a_checkpoint_error_or_none(
    tmp_path: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    data = bytearray(shard_bytes({"w": entry(), "v": entry([2, 4], 64, 80, "BF16")}, data=80))
    for at, value in changes:
        data[at % len(data)] = value
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut % len(data)])
    try:
        checkpoint = SafetensorsCheckpoint(folder)
    except CheckpointError:
        return
    for name, info in checkpoint.tensors.items():
        if info.dtype in ("F32", "F16", "BF16"):
            assert checkpoint.read(name).shape == info.shape
