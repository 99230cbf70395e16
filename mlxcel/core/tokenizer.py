"""What the rest of mlxcel knows of a tokenizer. Nothing above this line knows a file format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

from mlxcel.core.named import Named

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint


class Tokenizer(Protocol):
    """Text to ids and back. Ids are plain ints; no id may make a method raise."""

    @property
    def size(self) -> int:
        """Ids below this are tokens; the model may have more rows (padding)."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Roles to ids, only those that exist: "bos", "eos", "eot", "eom", "unk", "pad"."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that the tokenizer's own files call ends: eos, eot, eom, documented end-of-turn spellings."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether encode(add_special=True) puts a BOS in front."""
        ...

    @property
    def byte_exact(self) -> bool:
        """Whether decode is exactly the UTF-8 decoding, with replacement, of the joined token_bytes (spec T3), those of
        the first token that has any asked for with `first`.

        True for byte-level and byte-fallback tokenizers; else decodes are compared (T4).
        """
        ...

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Ids of a text. `parse_special` recognises the spellings of special tokens inside it. A text that begins with
        the BOS spelling gets no second BOS. Time is linear in the text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ids; ids at or above `size` are "" (spec T6)."""
        ...

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Bytes of one token as `decode` would write it inside a text, with `first` at the beginning of one (where
        SentencePiece drops a space); b"" beyond `size`."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special` leaves it out."""
        ...

    def token_text(self, token_id: int) -> str:
        """The spelling in the vocabulary ("<|im_end|>"), for templates and messages; "" beyond `size`."""
        ...


@attrs.frozen
class TokenizerSpec(Named):
    """A tokenizer factory: `load()` gives `(checkpoint: Checkpoint) -> Tokenizer`.

    `needs` is the key of `Checkpoint.assets` that it reads; the registered factories are asked in `priority` order
    (highest first) and the first whose `needs` is there is taken (spec T21).
    """

    needs: str = attrs.field(kw_only=True)
    priority: int = attrs.field(kw_only=True, default=0)

    def reads(self, checkpoint: Checkpoint) -> bool:
        return self.needs in checkpoint.assets
