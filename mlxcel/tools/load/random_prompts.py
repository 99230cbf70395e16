"""Prompts of random words with exactly so many tokens, whoever counts them."""

from __future__ import annotations

import math
import random
from typing import Final

import attrs

from mlxcel.tools.load.dataset import Asked
from mlxcel.tools.load.lengths import Counter
from mlxcel.tools.load.options import RandomSizes

WORDS: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did many off before must well back through years much where your way down should "
    "because long each just state people those too good world"
)
"""Common ones: most vocabularies have each as one token, with the space before it."""

ENOUGH: Final = 16
"""So many words of one token make prompts that differ; with fewer, longer ones are taken too."""

TRIES: Final = 8
"""Times that a prompt is written anew until its length is right; mostly the first or second is."""


@attrs.define
class Writer:
    """Texts of so many tokens. What a text has beside the pieces that are drawn for it is learned from the first one:
    what a tokenizer puts around it, the prefix, and less where its first word has no space before it."""

    counter: Counter
    chance: random.Random
    _costs: dict[str, int] = attrs.field(factory=dict)
    _beside: dict[str, int] = attrs.field(factory=dict)  # by prefix

    def __attrs_post_init__(self) -> None:
        """Where all words together are one token each, that is one question instead of a hundred."""
        words = WORDS.split()
        alone = self.counter.count("the")
        together = self.counter.count(" ".join(["the", *words])) - alone
        costs = {
            f" {word}": 1 if together == len(words) else self.counter.count(f"the {word}") - alone for word in words
        }
        self._costs = {piece: 1 for piece, cost in costs.items() if cost == 1}
        if len(self._costs) < ENOUGH:  # a tokenizer of bytes, or of another language: a dot fills what words leave
            costs["."] = self.counter.count("the.") - alone
            self._costs = {piece: cost for piece, cost in costs.items() if cost > 0} or {" the": 1}

    def write(self, length: int, prefix: str = "") -> tuple[str, int]:
        """A text that begins with `prefix`, and its tokens: `length` unless the tokenizer gives no such text."""
        if prefix not in self._beside:
            self._beside[prefix] = self.counter.count(prefix) if prefix else 0
        tried: list[tuple[str, int]] = []
        for _ in range(TRIES):
            text = (prefix + "".join(self._draw(length - self._beside[prefix]))).strip()
            tried.append((text, self.counter.count(text)))
            if tried[-1][1] == length:
                break
            self._beside[prefix] += tried[-1][1] - length
        return min(tried, key=lambda each: abs(each[1] - length))

    def _draw(self, tokens: int) -> list[str]:
        """Pieces that cost so many tokens in all, at least one."""
        pieces, left = [], max(tokens, 1)
        names = list(self._costs)
        while left > 0:
            piece = self.chance.choice(names)
            if self._costs[piece] > left:
                names = [name for name in names if self._costs[name] <= left]
                if not names:
                    break
                continue
            pieces.append(piece)
            left -= self._costs[piece]
        return pieces or [min(self._costs, key=self._costs.__getitem__)]


def random_prompts(count: int, sizes: RandomSizes, counter: Counter, seed: int) -> tuple[list[Asked], int]:
    """`count` prompts that the seed fixes, and how many of them have another length than was drawn."""
    chance = random.Random(f"prompts {seed}")
    writer = Writer(counter, chance)
    prefix = writer.write(sizes.prefix_len)[0] if sizes.prefix_len else ""
    made, missed = [], 0
    for _ in range(count):
        wanted = sizes.prefix_len + _drawn(sizes.input_len, sizes.range_ratio, chance)
        text, counted = writer.write(wanted, prefix)
        missed += counted != wanted
        made.append(Asked(text, counted, _drawn(sizes.output_len, sizes.range_ratio, chance)))
    return made, missed


def _drawn(length: int, ratio: float, chance: random.Random) -> int:
    return chance.randint(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))
