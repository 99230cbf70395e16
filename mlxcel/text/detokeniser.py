"""Ids to text, one token at a time: one object a row, for every client, stream or not (spec 6.1)."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from mlxcel.text.decode_window import DecodeWindow

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def settle(self) -> str: ...

    def flush(self) -> str: ...


class Detokeniser:
    """Text of a growing list of ids, at a cost a token that does not depend on the length of the list.

    The law (spec T2): the joined results of `push` and then `flush` are `tokenizer.decode(ids, skip_special=...)`, byte
    for byte. What was returned is final; an unfinished character waits for its rest, and `flush` returns it as the
    tokenizer's own decode would write it. Ids beyond the tokenizer's size are "". `flush` ends the text: it is called
    once, after the last `push`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._size, self._is_special = tokenizer.size, tokenizer.is_special
        self._skip_special = skip_special
        self._decoder: _Decoder = _Bytes(tokenizer) if tokenizer.byte_exact else DecodeWindow(tokenizer)

    def push(self, token_id: int) -> str:
        """The text that `token_id` adds, "" while a character is unfinished."""
        if not 0 <= token_id < self._size:
            return ""
        if self._skip_special and self._is_special(token_id):
            return ""
        return self._decoder.push(token_id)

    def hidden(self, token_id: int) -> str:
        """The spelling of a special token that `push` leaves out, for those who look for it (spec T7); "" of others."""
        left_out = self._skip_special and 0 <= token_id < self._size and self._is_special(token_id)
        return self._tokenizer.token_text(token_id) if left_out else ""

    def settle(self) -> str:
        """Whole characters that still waited, where something that `push` leaves out must stand behind them. They are
        final then, even if bytes to come would have made the run they are in no UTF-8."""
        return self._decoder.settle()

    def flush(self) -> str:
        """What still waited."""
        return self._decoder.flush()


class _Bytes:
    """Tokens that are bytes, read as UTF-8 with replacement. Python's decoder replaces each longest beginning of a
    character by one U+FFFD (Unicode, section 3.9)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._waits = False  # whether the decoder holds the beginning of a character

    def push(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        if data and not self._begun:
            self._begun = True
            data = self._tokenizer.token_bytes(token_id, first=True)
        if not self._waits and data.isascii():
            return data.decode("ascii")
        text = self._characters.decode(data)
        self._waits = bool(self._characters.getstate()[0])
        return text

    def settle(self) -> str:
        return ""

    def flush(self) -> str:
        return self._characters.decode(b"", final=True)
