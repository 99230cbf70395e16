"""DRY: a token that would continue a repetition loses the more, the longer the repetition (spec 4.5).

https://github.com/oobabooga/text-generation-webui/pull/5677. The host finds the repetitions, in time linear in the
window; the step subtracts (id, loss) pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.dry_breakers import Breakers, BreakerTable
from mlxcel.plugins.sampling.pairs import NOBODY, change_at, closed_width, pack_lists
from mlxcel.plugins.sampling.stage import RowState

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_LOGARITHM = 88.72283  # of float32
_LEAST_BASE = 1.000001  # a base above it grows out of float32 within a context; one below has no power worth a bound


def longest_matches(history: np.ndarray, limit: int, allowed: int) -> dict[int, int]:
    """For each id that followed an earlier occurrence of the newest ids: how many of them agree there, at most `limit`.

    history: int32 [n], the newest id last. Ids with fewer than `allowed` in common are left out. The Z-function of the
    history read backwards, its values bounded by `limit`: every comparison but one a place moves the box to the right,
    so the time is linear in n. Places where the newest id does not stand are never looked at by Python.
    """
    newest_first = history[::-1]
    starts = np.flatnonzero(newest_first[1:] == newest_first[0]) + 1
    if limit < allowed or not len(starts):
        return {}
    r = newest_first.tolist()
    common = [0] * len(r)
    found: dict[int, int] = {}
    left = right = 0  # r[left:right] equals r[:right - left]
    for k in starts.tolist():
        length = min(common[k - left], right - k) if k < right else 0
        while length < limit and k + length < len(r) and r[k + length] == r[length]:
            length += 1
        common[k] = length
        if k + length > right:
            left, right = k, k + length
        if length >= allowed and length > found.get(r[k - 1], 0):
            found[r[k - 1]] = length
    return found


@attrs.frozen(eq=False)
class DryUse:
    multiplier: float
    base: float
    allowed: int
    window: int
    breakers: Breakers | None

    def losses(self, history: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [U] and what their logits lose, float32 [U], finite. history: int32 [n]."""
        if len(history) <= self.allowed:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        limit = len(history) if self.breakers is None else self.breakers.limit(history[::-1], history)
        matches = longest_matches(history, limit, self.allowed)
        lost = [min(self.multiplier * self._power(length - self.allowed), _LARGEST) for length in matches.values()]
        return np.array(list(matches), np.int32), np.array(lost, np.float32)

    def _power(self, exponent: int) -> float:
        """base ** exponent, the exponent bounded so that float32 holds it."""
        if self.base > _LEAST_BASE:
            exponent = min(exponent, math.floor(_LARGEST_LOGARITHM / math.log(self.base)))
        return float(self.base**exponent)


class Dry:
    """Not closed: the host has to see every token before it can look for repetitions that end with it (spec C51)."""

    name = "dry"
    foreign = None
    lists: Mapping[str, int] = {"dry.ids": NOBODY, "dry.losses": 0}

    def __init__(self, vocab: int, tokenizer: Tokenizer | None) -> None:
        self._vocab = vocab
        self._table = None if tokenizer is None else BreakerTable(tokenizer, vocab)

    def prepare(self, spec: SequenceSpec) -> DryUse | None:
        params = spec.params
        if params.dry_multiplier == 0 or params.dry_penalty_last_n == 0 or not params.runs("dry"):
            return None
        return DryUse(
            multiplier=params.dry_multiplier,
            base=params.dry_base,
            allowed=params.dry_allowed_length,
            window=params.dry_penalty_last_n,
            breakers=self._breakers(params.dry_sequence_breakers),
        )

    def closed(self, prepared: DryUse) -> bool:
        return False

    def pack(self, rows: Sequence[RowState], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
        pairs = []
        for row in rows:
            use: DryUse | None = row.prepared.get(self.name)
            pairs.append(nothing if use is None else use.losses(row.history.last(use.window)))
        width = closed_width(max(len(ids) for ids, _ in pairs), self._vocab)
        return {
            "dry.ids": pack_lists([ids for ids, _ in pairs], width, fill=NOBODY),
            "dry.losses": pack_lists([lost for _, lost in pairs], width),
        }

    def apply(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        return change_at(xp, z, params["dry.ids"], lambda old: old - params["dry.losses"])

    def _breakers(self, strings: Sequence[str]) -> Breakers | None:
        if not strings:
            return None
        if self._table is None:
            raise RequestError(
                "dry_sequence_breakers cannot be found without a tokenizer",
                field="dry_sequence_breakers",
                hint="give an empty list, so that nothing ends a repetition",
            )
        return self._table.breakers(strings)
