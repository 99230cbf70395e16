"""The one `Tokenizer` of mlxcel's own formats: the `tokenizers` library encodes, a table of bytes decodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Final

import tokenizers

from mlxcel.plugins.tokenizers.pieces import PieceTable, byte_token

LONG: Final = 1 << 14
"""Characters from which a text is encoded as a batch of one: only batches let other threads run meanwhile, and only a
text that takes its time is worth the library's threads."""


class LibraryTokenizer:
    """A `Tokenizer` over a `tokenizers.Tokenizer`, whose truncation and padding are switched off.

    `tokens` are the spellings by id ("" where an id is unused). `prefix` and `suffix` are the ids that `add_special`
    puts around a text. `table`, where given, has the bytes of each token: then decoding is their join, `byte_exact`.
    Without it the library decodes: the text of a token depends on its place.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        tokens: Sequence[str],
        special: Collection[int],
        special_ids: Mapping[str, int],
        eos_ids: frozenset[int],
        prefix: Sequence[int],
        suffix: Sequence[int],
        table: PieceTable | None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self.size = len(tokens)
        self.special_ids = dict(special_ids)
        self.eos_ids = eos_ids
        self.byte_exact = table is not None
        self._library = library
        self._tokens = tokens
        self._special = frozenset(special)
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self._table = table
        bos = self.special_ids.get("bos")
        self.adds_bos = bos is not None and self._prefix[:1] == [bos]

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy that takes the spellings of special tokens as ordinary text: a switch would not be thread-safe."""
        literal = tokenizers.Tokenizer.from_str(self._library.to_str())
        literal.encode_special_tokens = True
        return literal

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        source = self._library if parse_special else self._literal
        if len(text) < LONG:
            ids = list(source.encode(encodable(text), add_special_tokens=False).ids)
        else:
            ids = list(source.encode_batch_fast([encodable(text)], add_special_tokens=False)[0].ids)
        if not add_special:
            return ids
        bos_is_written = self.adds_bos and ids[:1] == self._prefix[:1]
        prefix = self._prefix[1:] if bos_is_written else self._prefix
        return [*prefix, *ids, *self._suffix]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        skipped = self._special if skip_special else ()
        kept = [index for index in ids if 0 <= index < self.size and index not in skipped]
        if self._table is not None:
            return self._table.text(kept)
        return str(self._library.decode(kept, skip_special_tokens=False))

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        if self._table is not None:
            return self._table.piece(token_id, first=first)
        if first:
            return self.decode([token_id], skip_special=False).encode()
        byte = byte_token(self._tokens[token_id])
        if byte is not None:
            return byte
        anchor = self._anchor
        before = self.decode(anchor, skip_special=False)
        text = self.decode([*anchor, token_id], skip_special=False)
        return text.removeprefix(before).encode()

    @cached_property
    def _anchor(self) -> list[int]:
        """Tokens to put in front, so that rules for the beginning of a text do not touch the token in question."""
        return self.encode("a", add_special=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        return self._tokens[token_id] if 0 <= token_id < self.size else ""

    def as_library(self) -> tokenizers.Tokenizer:
        """A tokenizer of the library's own that encodes as this one does, `prefix` and `suffix` included."""
        from mlxcel.plugins.tokenizers.as_library import surrounded

        return surrounded(tokenizers.Tokenizer.from_str(self._library.to_str()), self._prefix, self._suffix)


def encodable(text: str) -> str:
    """The text with lone surrogates, which have no UTF-8, as U+FFFD; pairs become the character they stand for."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def spellings_by_id(library: tokenizers.Tokenizer) -> list[str]:
    """Every token's spelling at the place of its id, "" where the vocabulary has a hole."""
    vocabulary = library.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    return tokens
