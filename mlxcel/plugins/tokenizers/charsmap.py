"""The normalisation table of a SentencePiece model: replacements for strings of characters, longest first."""

from __future__ import annotations

import struct
from typing import Final

MAX_KEY: Final = 64  # bytes; the longest of NFKC have about 20
MAX_REPLACEMENT: Final = 256  # bytes; the longest of NFKC has 33
_LABEL: Final = 0x800000FF


class CharsMap:
    """`precompiled_charsmap`: u32 length of a trie, the trie, and replacements that end with a zero byte.

    The trie is a double array of little-endian u32 units: bits 0 to 7 are the label (the last byte of the key so far),
    bit 8 says that a value follows, bits 10 to 30 (times 256 when bit 9 is set) are the offset of the children, and a
    unit with bit 31 is a value, where its replacement begins. Source: darts-clone, https://github.com/s-yata/darts-clone,
    `DoubleArrayUnit`; sentencepiece, `normalizer.cc`. Raises ValueError for a blob that is no such table.
    """

    def __init__(self, blob: bytes) -> None:
        if len(blob) < 8:
            raise ValueError(f"{len(blob)} bytes hold no table")
        size = int.from_bytes(blob[:4], "little")
        if size < 4 or size % 4 or 4 + size >= len(blob):
            raise ValueError(f"a trie of {size} bytes does not fit in {len(blob)} bytes")
        self._units = struct.unpack_from(f"<{size // 4}I", blob, 4)
        self._replacements = blob[4 + size :]

    def __call__(self, text: str) -> str:
        """The text with each longest known string replaced, from left to right."""
        data = text.encode()
        parts: list[bytes] = []
        at = copied = 0
        while at < len(data):
            found = self._longest(data, at)
            if found is None:
                at += 1
                while at < len(data) and data[at] & 0xC0 == 0x80:  # whole characters only
                    at += 1
                continue
            end, replacement = found
            parts += (data[copied:at], replacement)
            at = copied = end
        parts.append(data[copied:])
        return b"".join(parts).decode("utf-8", "replace")

    def _longest(self, data: bytes, at: int) -> tuple[int, bytes] | None:
        """Where the longest key at a place ends, and what replaces it."""
        units = self._units
        node = _children(units[0])
        found: tuple[int, bytes] | None = None
        for place in range(at, min(at + MAX_KEY, len(data))):
            node ^= data[place]
            if node >= len(units) or units[node] & _LABEL != data[place]:
                break
            unit = units[node]
            node ^= _children(unit)
            if unit >> 8 & 1 and node < len(units):
                replacement = self._replacement(units[node] & 0x7FFFFFFF)
                if replacement is not None:
                    found = place + 1, replacement
        return found

    def _replacement(self, start: int) -> bytes | None:
        end = self._replacements.find(0, start, start + MAX_REPLACEMENT)
        return None if end < 0 else self._replacements[start:end]


def _children(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
