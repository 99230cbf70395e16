"""The prompt of the measuring tools: one text of ours, repeated and cut to an exact number of tokens."""

from __future__ import annotations

from typing import Final

import numpy as np

from mlxcel.core.tokenizer import Tokenizer

PARAGRAPH: Final = (
    "The lighthouse keeper wrote one line a day into a grey book: wind, tide, ships, and what he had mended. On most "
    "days nothing broke, so he wrote about birds. A tern came back to the same rock for eleven years, and he gave it "
    'a name: "Captain". When the lamp was changed from oil to current, in 1931, he counted the steps once more (there '
    "were 212) and found that he no longer needed to climb them at night. He went up anyway. From the gallery the "
    "coast looked like a torn page, and the harbour lights were its letters: two red, one green, a row of white. "
    "* Order rope * Oil the door * Answer the letter of the harbour master. That was the list for Monday, and by "
    "Thursday two things of it were done.\n\n"
)
"""With line breaks, quotes, digits and marks, so that tokens of every kind come up."""


def built_in_prompt(tokenizer: Tokenizer, length: int) -> np.ndarray:
    """int32 [`length`]: PARAGRAPH over and over, behind the tokenizer's special tokens."""
    ids: list[int] = []
    repeats = max(1, 5 * length // len(PARAGRAPH))
    while len(ids) < length:
        ids = tokenizer.encode(PARAGRAPH * repeats, add_special=True, parse_special=False)
        repeats *= 2
    return np.array(ids[:length], np.int32)


def random_prompt(vocab: int, length: int, *, seed: int = 0) -> np.ndarray:
    """int32 [`length`] of the V = `vocab` ids, for weights to which no text means anything."""
    return np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)
