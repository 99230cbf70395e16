"""A tokenizer without files: one id a byte, then a few special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BOS, EOS, TURN_END = 256, 257, 258
SPECIALS: Mapping[int, str] = {BOS: "<|bos|>", EOS: "<|eos|>", TURN_END: "<|im_end|>"}


class ByteTokenizer:
    """Ids 0 … 255 are bytes, then BOS, EOS and TURN_END."""

    def __init__(self, *, adds_bos: bool = False) -> None:
        self._adds_bos = adds_bos

    size = 259
    byte_exact = True
    special_ids: Mapping[str, int] = {"bos": BOS, "eos": EOS, "eot": TURN_END}
    eos_ids = frozenset({EOS, TURN_END})

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        ids = [BOS] if add_special and self._adds_bos and not text.startswith(SPECIALS[BOS]) else []
        while text:
            special = next((i for i, word in SPECIALS.items() if parse_special and text.startswith(word)), None)
            if special is None:
                ids.extend(text[0].encode())
                text = text[1:]
            else:
                ids.append(special)
                text = text[len(SPECIALS[special]) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        kept = (b"" if skip_special and self.is_special(i) else self.token_bytes(i) for i in ids)
        return b"".join(kept).decode(errors="replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return bytes([token_id]) if 0 <= token_id < 256 else SPECIALS.get(token_id, "").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIALS

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")
