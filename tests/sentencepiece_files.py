"""SentencePiece models for tests: those of data/tokenizers, and any other as a model file or as GGUF metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data/tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2

Piece = tuple[str, float, int]
"""Spelling, score, type."""

SPECIAL: tuple[Piece, ...] = (("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL))
BYTES: tuple[Piece, ...] = tuple((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256))


@cache
def vectors() -> Mapping[str, list[tuple[str, list[int], str]]]:
    """Model name to texts, their ids, and what these decode to, by sentencepiece itself."""
    found: Mapping[str, Any] = json.loads((FOLDER / "vectors.json").read_text())["models"]
    return {name: [(text, ids, decoded) for text, ids, decoded in cases] for name, cases in found.items()}


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def piece_message(piece: Piece) -> bytes:
    spelling, score, kind = piece
    return message(1, message(1, spelling.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind))


def model_bytes(
    pieces: Sequence[Piece],
    *,
    model_type: int = BPE,
    trainer: Mapping[int, int] | None = None,
    normaliser: Mapping[int, int] | None = None,
    charsmap: bytes = b"",
) -> bytes:
    """A model file; `trainer` and `normaliser` are further fields by number. Spaces stay as they are by default."""
    spec = b"".join(number(field, value) for field, value in {3: model_type, **(trainer or {})}.items())
    spaces = b"".join(number(field, value) for field, value in {4: 0, **(normaliser or {})}.items())
    table = message(2, charsmap) if charsmap else b""
    return b"".join(map(piece_message, pieces)) + message(2, spec) + message(3, table + spaces)


def gguf_metadata(pieces: Sequence[Piece], *, model: str = "llama", **changes: Any) -> dict[str, Any]:
    """GGUF metadata of these pieces; a change of None removes a key."""
    keys = {
        "model": model,
        "tokens": [spelling for spelling, _, _ in pieces],
        "scores": [score for _, score, _ in pieces],
        "token_type": [kind for _, _, kind in pieces],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
