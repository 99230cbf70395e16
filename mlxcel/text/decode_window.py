"""Incremental decoding where the text of a token depends on its place (spec T4): the difference of two decodes.

Such decoders put spaces between tokens, have rules for the beginning of a text that are more than one dropped space, or
read runs of byte tokens ("<0x0A>") in steps that only the `tokenizers` library knows: it writes a run that is not
entirely UTF-8 as one U+FFFD a byte, so that a byte can still change the ones before it. Such a run is shown when it
ends, soon after it proves to be no UTF-8, or after 256 tokens (one that proves wrong even later keeps what was shown).

The window is a short end of the reply that decodes what follows as the whole reply would: it begins with shown tokens
whose text is not empty, so that the rules for a beginning are used up, and it holds what decides how an open run of
byte tokens goes on.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer

BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
REPLACEMENT: Final = "\ufffd"
MAX_WAIT: Final = 32  # tokens that unfinished text may hold back
MAX_RUN: Final = 256  # tokens that a run of bytes may hold back while it is UTF-8
LONGEST_CHARACTER: Final = 4  # bytes, and so tokens
MIN_CONTEXT: Final = 4  # tokens kept in front: decoders that look back look a token or two
MAX_CONTEXT: Final = 64  # reached only by tokens without text


class DecodeWindow:
    """Ids of visible tokens to text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""  # of the text of _ids
        self._waiting = 0  # how many of _ids, at the end, are not shown
        self._run: _ByteRun | None = None

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._waiting += 1
        byte = self._byte(token_id)
        if byte is None:
            self._run = None
        else:
            self._run = self._run or _ByteRun()
            self._run.push(token_id, byte)
            if self._run.valid and self._waiting <= MAX_RUN - LONGEST_CHARACTER:
                return ""
            if self._waiting < MAX_RUN and not self._run.between_characters:
                return ""
        text = self._decode(self._ids)
        if self._waiting < MAX_WAIT and not self._is_final(text):
            return ""
        new = text[len(self._shown) :]
        self._settle(text)
        return new

    def settle(self) -> str:
        return self.flush() if self._waiting and self._is_final(self._decode(self._ids)) else ""

    def flush(self) -> str:
        if not self._waiting:
            return ""
        text = self._decode(self._ids)
        new = text[len(self._shown) :]
        self._shown, self._waiting = text, 0
        return new

    def _is_final(self, text: str) -> bool:
        return text.startswith(self._shown) and not text.endswith(REPLACEMENT)

    def _settle(self, text: str) -> None:
        """All of the window is shown: it begins anew with what the next tokens need."""
        self._shown, self._waiting = text, 0
        if self._run is not None:
            head = len(self._ids) - self._run.length
            self._keep([*self._ids[:head], *self._run.core], head)
        elif len(self._ids) > 2 * MIN_CONTEXT:
            self._keep(self._ids, len(self._ids) - MIN_CONTEXT)
        if self._run is not None:
            self._run.length = len(self._run.core)

    def _keep(self, ids: list[int], last_start: int) -> None:
        """The shortest end of `ids` that has text and begins at or before `last_start`."""
        for start in range(last_start, -1, -1):
            if start == 0 or self._decode(ids[start:]):
                break
        kept = ids[start:]
        if len(kept) > MAX_CONTEXT:  # tokens without text behind the first ones: the latest decide
            kept = [*kept[:MIN_CONTEXT], *kept[-MIN_CONTEXT:]]
        self._ids, self._shown = kept, self._decode(kept)

    def _byte(self, token_id: int) -> int | None:
        match = BYTE_TOKEN.fullmatch(self._tokenizer.token_text(token_id))
        return int(match[1], 16) if match else None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


class _ByteRun:
    """Neighbouring byte tokens. `core` is what of them decides how the run goes on: the ids of its last character, or
    of the first bytes that are none. `length` counts the ids of the run in the window."""

    def __init__(self) -> None:
        self.core: list[int] = []
        self.length = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self.valid = True
        self.between_characters = True

    def push(self, token_id: int, byte: int) -> None:
        self.length += 1
        if not self.valid:
            return
        if self.between_characters:
            self.core = []
        self.core.append(token_id)
        try:
            self.between_characters = bool(self._utf8.decode(bytes([byte])))
        except UnicodeDecodeError:
            self.valid, self.between_characters = False, True
