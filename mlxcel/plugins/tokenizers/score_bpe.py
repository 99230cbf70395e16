"""Byte-pair encoding by score: of all neighbouring pairs that join to a piece, the best-scored join first.

The pair is not chosen by rank of (left, right), as in byte-level BPE, but by the score of what they join to; of equal
scores the leftmost goes first. Source: sentencepiece, `bpe_model.cc`. The `tokenizers` library has ranked pairs only:
merges derived from scores give the same ids for vocabularies as they are trained, and other ids where two splits of one
piece meet or scores are equal; making them also takes longer than all the rest of reading a vocabulary of 262,144.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

from mlxcel.plugins.tokenizers.pieces import SPACE

CACHED_WORDS: Final = 1 << 15
LONGEST_CACHED: Final = 48  # characters


class ScoreBpe:
    """Segments normalised text, in which a space is ▁. `scores` holds the pieces that text can join to; those in
    `unused` are taken apart again when nothing more joins.

    A text is cut in front of ▁ wherever no piece reaches across, which changes nothing but lets words be remembered.
    """

    def __init__(self, scores: Mapping[str, float], unused: Collection[str] = ()) -> None:
        self._scores = scores
        self._unused = frozenset(unused)
        self._cuts = re.compile(f"(?<![{SPACE}{_before_spaces(scores)}])(?={SPACE})")
        self._remembered = lru_cache(CACHED_WORDS)(self._joined)

    def __call__(self, text: str) -> list[str]:
        """The pieces of a text, in order; characters that are no piece stand alone. Time is n log n at worst."""
        pieces: list[str] = []
        for word in self._cuts.split(text):
            pieces += self._remembered(word) if len(word) <= LONGEST_CACHED else self._joined(word)
        return pieces

    def _joined(self, word: str) -> tuple[str, ...]:
        scores, unused = self._scores, self._unused
        parts = list(word)
        size = len(parts)
        before, after = list(range(-1, size - 1)), list(range(1, size + 1))
        origins: dict[str, tuple[str, str]] = {}
        heap: list[tuple[float, int, int, int]] = []  # the best score first, then the leftmost

        def pair(left: int) -> tuple[float, int, int, int] | None:
            right = after[left]
            joined = parts[left] + parts[right]
            score = scores.get(joined)
            if score is None:
                return None
            if joined in unused:
                origins[joined] = parts[left], parts[right]
            return -score, left, right, len(joined)

        heap = [found for left in range(size - 1) if (found := pair(left)) is not None]
        heapify(heap)
        while heap:
            _, left, right, length = heappop(heap)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
                continue  # one of the two has joined another since
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[right] < size:
                before[after[right]] = left
                if (found := pair(left)) is not None:
                    heappush(heap, found)
            if before[left] >= 0 and (found := pair(before[left])) is not None:
                heappush(heap, found)
        return tuple(_taken_apart((part for part in parts if part), origins))


def _taken_apart(parts: Iterable[str], origins: Mapping[str, tuple[str, str]]) -> list[str]:
    """Unused pieces as what they were joined from, as deep as it takes."""
    if not origins:
        return list(parts)
    done: list[str] = []
    waiting = list(parts)[::-1]
    while waiting:
        part = waiting.pop()
        if part in origins:
            left, right = origins[part]
            waiting += (right, left)
        else:
            done.append(part)
    return done


def _before_spaces(pieces: Iterable[str]) -> str:
    """The characters, as part of a pattern, that stand in front of a ▁ inside some piece."""
    inner = re.compile(f"([^{SPACE}]){SPACE}")
    return "".join(
        sorted({re.escape(found[1]) for piece in pieces if SPACE in piece for found in inner.finditer(piece)})
    )
