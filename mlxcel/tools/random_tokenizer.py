"""A tokenizer for random weights: every id of the vocabulary is a token, and texts are written in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class RandomTokenizer:
    """Ids 0 … 255 are bytes, the text of any other is its number, as ⟨300⟩. None is special, and none is an end."""

    byte_exact = True
    adds_bos = False
    special_ids: Mapping[str, int] = {}
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, vocab: int) -> None:
        """`vocab` is V."""
        self.size = vocab

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """As bytes: with a V below 256, those that it has."""
        return [byte for byte in text.encode() if byte < self.size]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        return bytes([token_id]) if token_id < 256 else f"⟨{token_id}⟩".encode()

    def is_special(self, token_id: int) -> bool:
        return False

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")
