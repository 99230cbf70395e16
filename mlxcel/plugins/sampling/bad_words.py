"""bad_words: the last id of a sequence is removed where the output ends with the ids before it (spec S17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import MaskedRow
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.bits import WORD, words_of_ids


@attrs.frozen(eq=False)
class _Words:
    single: np.ndarray  # uint32 words without the ids that are a bad word alone
    longer: tuple[tuple[int, np.ndarray], ...]  # (last id, int32 ids before it)


@attrs.frozen
class BadWords:
    """A word is spelt in two ways, with a space before it and without."""

    vocab: int
    tokenizer: Tokenizer | None
    stage: str = "masks"

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> _Words | None:
        if not spec.params.bad_words:
            return None
        if self.tokenizer is None:
            raise RequestError("bad_words cannot be found without a tokenizer", field="bad_words")
        sequences = dict.fromkeys(
            tuple(self.tokenizer.encode(text, add_special=False, parse_special=False))
            for word in spec.params.bad_words
            for text in (word, f" {word}")
        )
        single = [ids[0] for ids in sequences if len(ids) == 1]
        longer = [(ids[-1], np.array(ids[:-1], np.int32)) for ids in sequences if len(ids) > 1 and ids[-1] < self.vocab]
        return _Words(words_of_ids(single, self.vocab, without=True), tuple(longer))

    def closed(self, prepared: _Words) -> bool:
        """Only words of one id are masked whatever came before."""
        return not prepared.longer

    def mask(self, prepared: _Words, row: MaskedRow) -> np.ndarray:
        words = prepared.single.copy()
        for last, before in prepared.longer:
            if len(before) <= len(row.output) and np.array_equal(row.output[len(row.output) - len(before) :], before):
                words[last // WORD] &= np.uint32(0xFFFFFFFF ^ 1 << last % WORD)
        return words
