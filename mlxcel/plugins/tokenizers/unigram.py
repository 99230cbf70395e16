"""Segmentation of the highest summed score, by the scores that a Unigram model gives to its pieces."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from typing import Final

UNKNOWN_PENALTY: Final = 10.0  # below the worst piece; sentencepiece, `unigram_model.cc`
USER_DEFINED_BONUS: Final = 0.1  # for each byte but the first; as sentencepiece 0.2.3 answers


class Unigram:
    """Segments normalised text, in which a space is ▁.

    The best path over a text's characters (Viterbi, https://arxiv.org/abs/1804.10959), with sums in float32 and, of
    equal sums, the path whose last piece is longest, as sentencepiece has it. A character that is no piece costs the
    penalty; user-defined pieces cost nothing, so that paths around them are rare.
    """

    def __init__(self, scores: Mapping[str, float], user_defined: Collection[str] = ()) -> None:
        bonus = {piece: _float32(USER_DEFINED_BONUS * (len(piece.encode()) - 1)) for piece in user_defined}
        self._scores = {**scores, **bonus}
        self._unknown = _float32(min(scores.values(), default=0.0) - UNKNOWN_PENALTY)
        lengths: dict[str, set[int]] = {}
        for piece in self._scores:
            lengths.setdefault(piece[0], set()).add(len(piece))
        self._lengths = {character: sorted(found) for character, found in lengths.items()}

    def __call__(self, text: str) -> list[str]:
        """The pieces of a text, in order; characters that are no piece stand alone."""
        scores, size = self._scores, len(text)
        best = array("f", bytes(4 * (size + 1)))
        start_of = [-1] * (size + 1)  # of the last piece of the best path to each place
        total = array("f", [0.0])  # a sum that is stored is rounded to float32
        for start, character in enumerate(text):
            single = False
            for length in self._lengths.get(character, ()):
                end = start + length
                if end > size:
                    break
                score = scores.get(text[start:end])
                if score is None:
                    continue
                single = single or length == 1
                total[0] = best[start] + score
                if start_of[end] < 0 or total[0] > best[end]:
                    best[end], start_of[end] = total[0], start
            if not single:
                total[0] = best[start] + self._unknown
                if start_of[start + 1] < 0 or total[0] > best[start + 1]:
                    best[start + 1], start_of[start + 1] = total[0], start
        pieces: list[str] = []
        end = size
        while end > 0:
            pieces.append(text[start_of[end] : end])
            end = start_of[end]
        return pieces[::-1]


def _float32(value: float) -> float:
    return array("f", [value])[0]
