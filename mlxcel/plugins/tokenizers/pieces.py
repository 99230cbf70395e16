"""From the spelling of a token in the vocabulary to the bytes it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs

SPACE: Final = "▁"  # how SentencePiece vocabularies write a space
LEADING_SPACE: Final[Mapping[str, Any]] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
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


def sentencepiece_pieces(tokens: Sequence[str]) -> list[bytes]:
    """Bytes of each token of a SentencePiece vocabulary, where ▁ is a space and "<0x0A>" a byte."""
    return [byte_token(token) or token.replace(SPACE, " ").encode() for token in tokens]


def byte_token(token: str) -> bytes | None:
    """The byte of "<0x0A>", None for any other token."""
    match = BYTE_TOKEN.fullmatch(token) if token.startswith("<0x") else None
    return bytes([int(match[1], 16)]) if match else None


@attrs.frozen
class PieceTable:
    """The bytes of each token by id, and those it has as the first of a text, where a space may be dropped.

    A text is the joined bytes, read as UTF-8 with replacement: each longest beginning of a character that is not
    finished, and each byte that can begin none, is one U+FFFD (Unicode, section 3.9). That is one rule for a text that
    grows and for a whole one, with an end inside a character or without. (The `tokenizers` library and sentencepiece
    write one U+FFFD a byte, the library for every byte of a run that is not UTF-8 throughout: nobody could show a
    character of such a run before its end.)
    """

    pieces: Sequence[bytes]
    first: Sequence[bytes]

    def piece(self, token_id: int, *, first: bool) -> bytes:
        return (self.first if first else self.pieces)[token_id]

    def text(self, ids: Sequence[int]) -> str:
        """Of ids in the table. The first is the first that has any bytes, whether or not some are left."""
        parts = [self.pieces[index] for index in ids]
        begin = next((place for place, part in enumerate(parts) if part), None)
        if begin is not None:
            parts[begin] = self.first[ids[begin]]
        return b"".join(parts).decode("utf-8", "replace")


def byte_level_table(tokens: Sequence[str], literal: Collection[int]) -> PieceTable:
    pieces = byte_level_pieces(tokens, literal)
    return PieceTable(pieces, pieces)


def dropping_one_space(pieces: Sequence[bytes]) -> PieceTable:
    """The space that was put in front of a text is taken away again."""
    return PieceTable(pieces, [piece.removeprefix(b" ") for piece in pieces])


def decoder_table(decoder: bytes, tokens: Sequence[str], literal: Collection[int]) -> PieceTable | None:
    """The table of a tokenizer.json, or None where its decoder does more than to join bytes and to drop a space.

    `decoder` is its JSON; `literal` are the ids of added tokens. "Strip" is Llama 2's rule and drops one space in front
    of a text; "Metaspace" drops every ▁ of the first token.
    """
    steps = flat_steps(json.loads(decoder))
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return byte_level_table(tokens, literal)
    if kinds[:2] == ["Replace", "ByteFallback"] and _is_space_rule(steps[0]):
        pieces = sentencepiece_pieces(tokens)
        if kinds[2:] == []:
            return PieceTable(pieces, pieces)
        strip, before = steps[-1], steps[-2]  # in front of "Fuse" it would drop a space of every token
        if kinds[2:] == ["Strip"] and strip == LEADING_SPACE and before["type"] == "Fuse":
            return dropping_one_space(pieces)
    if sorted(kinds) == ["ByteFallback", "Metaspace"]:
        metaspace = next(step for step in steps if step["type"] == "Metaspace")
        if metaspace["replacement"] == SPACE:
            pieces = sentencepiece_pieces(tokens)
            kept = metaspace["prepend_scheme"] == "never"
            return PieceTable(pieces, pieces if kept else sentencepiece_pieces([t.replace(SPACE, "") for t in tokens]))
    return None


def _is_space_rule(step: Mapping[str, Any]) -> bool:
    return step.get("pattern") == {"String": SPACE} and step.get("content") == " "


def flat_steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's steps in order, sequences opened."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in flat_steps(inner)]
    return [decoder]
