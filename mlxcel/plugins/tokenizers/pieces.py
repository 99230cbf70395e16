"""From the spelling of a token in the vocabulary to the bytes it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

SPACE: Final = "▁"  # how SentencePiece vocabularies write a space
BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> Mapping[str, int]:
    """The 256 characters that stand for bytes in byte-level vocabularies, and their bytes.

    Printable Latin-1 characters stand for themselves, the other bytes in order for U+0100 and up. Source: GPT-2,
    https://github.com/openai/gpt-2, `encoder.py`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return MappingProxyType({**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}})


def byte_level_pieces(tokens: Sequence[str], literal: Collection[int]) -> list[bytes]:
    """Bytes of each token of a byte-level vocabulary. Ids in `literal`, the added tokens, are spelled as they are."""
    alphabet = byte_characters()

    def piece(token: str) -> bytes:
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:  # no byte-level spelling: a token that was added to the vocabulary itself
            return token.encode()

    return [token.encode() if index in literal else piece(token) for index, token in enumerate(tokens)]


def byte_fallback_pieces(tokens: Sequence[str]) -> list[bytes]:
    """Bytes of each token of a SentencePiece vocabulary with byte fallback and no rule for spaces but ▁.

    Joined bytes that are no UTF-8 become U+FFFD as UTF-8 decoders do it, one for each broken sequence; the library
    writes one for each byte of such a run, which cannot be done while a text grows.
    """
    return [byte_token(token) or token.replace(SPACE, " ").encode() for token in tokens]


def byte_token(token: str) -> bytes | None:
    """The byte of "<0x0A>", None for any other token."""
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


def decoder_pieces(decoder: bytes, tokens: Sequence[str], literal: Collection[int]) -> list[bytes] | None:
    """The bytes of each token where the decoder of a tokenizer.json is a plain joining of bytes, else None.

    `decoder` is its JSON. A rule for spaces at the ends, as in Llama 2, makes a token's text depend on its place.
    """
    steps = flat_steps(json.loads(decoder))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_pieces(tokens, literal)
    if kinds == ["Replace", "ByteFallback", "Fuse"]:
        replace = steps[0]
        if replace.get("pattern") == {"String": SPACE} and replace.get("content") == " ":
            return byte_fallback_pieces(tokens)
    return None


def flat_steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's steps in order, sequences opened."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in flat_steps(inner)]
    return [decoder]
