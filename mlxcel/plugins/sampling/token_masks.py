"""Masks that come with the chain: ids never drawn, ids allowed alone, ends ignored or too early (spec S15, S16)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import MaskedRow
from mlxcel.plugins.sampling.bits import words_of_ids
from mlxcel.plugins.sampling.ends import MOST, ignored_ends


@attrs.frozen
class _FixedMask:
    """One set of ids for the whole reply: `prepare` makes its words, and nothing changes them."""

    vocab: int
    stage: str = "masks"

    def closed(self, prepared: np.ndarray) -> bool:
        return True

    def mask(self, prepared: np.ndarray, row: MaskedRow) -> np.ndarray:
        return prepared


class NeverDrawn(_FixedMask):
    """Entries of `logit_bias` that are false."""

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> np.ndarray | None:
        never = [token for token, added in spec.params.logit_bias if added is None and isinstance(token, int)]
        return words_of_ids(never, self.vocab, without=True) if never else None


class AllowedIds(_FixedMask):
    """`allowed_token_ids`: every other id is removed."""

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> np.ndarray | None:
        allowed = spec.params.allowed_token_ids
        return None if allowed is None else words_of_ids(allowed, self.vocab)


class IgnoreEnds(_FixedMask):
    """`ignore_eos` of a model with more ends than are numbers of a row (`ends.py`)."""

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> np.ndarray | None:
        ends = ignored_ends(spec)
        return words_of_ids(ends, self.vocab, without=True) if _many(ends, self.vocab) else None


def _many(ends: Collection[int], vocab: int) -> bool:
    return sum(token < vocab for token in ends) > MOST


@attrs.frozen
class _EarlyEnds:
    least: int
    words: np.ndarray


@attrs.frozen
class MinTokens:
    """Before `min_tokens` are there, E and U cannot be drawn."""

    vocab: int
    stage: str = "masks"

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> _EarlyEnds | None:
        ends = spec.eos_ids.union(spec.params.stop_token_ids)
        if spec.params.min_tokens == 0 or not ends:
            return None
        return _EarlyEnds(spec.params.min_tokens, words_of_ids(ends, self.vocab, without=True))

    def closed(self, prepared: _EarlyEnds) -> bool:
        """It counts tokens, and looks at none."""
        return True

    def mask(self, prepared: _EarlyEnds, row: MaskedRow) -> np.ndarray:
        return prepared.words if row.generated < prepared.least else np.full_like(prepared.words, 0xFFFFFFFF)
