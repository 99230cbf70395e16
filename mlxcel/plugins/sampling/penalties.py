"""Penalties on ids that occurred: repetition; frequency and presence, over output and over window (spec 4.3, 4.4).

The host packs what each id's logit loses as it stands, and what it would lose with one occurrence more: the device
picks, so that the newest id may still be in flight, and never multiplies, so that no compiler can round otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling.history import History
from mlxcel.plugins.sampling.pairs import NOBODY, change_at, closed_width, pack_lists, with_newest
from mlxcel.plugins.sampling.stage import RowState

_LARGEST = np.finfo(np.float32).max

_NO_IDS, _NO_COUNTS = np.zeros(0, np.int32), np.zeros(0, np.int32)


@attrs.frozen
class RepetitionUse:
    penalty: float
    window: int


@attrs.frozen
class Repetition:
    """l / r for l > 0, else l * r, once for each id of `last(repeat_last_n)` of prompt and output (spec S12)."""

    vocab: int
    name: str = "repetition"
    foreign: None = None

    @property
    def lists(self) -> Mapping[str, int]:
        return {"repetition.ids": NOBODY}

    def prepare(self, spec: SequenceSpec) -> RepetitionUse | None:
        params = spec.params
        if params.repetition_penalty == 1 or params.repeat_last_n == 0 or not params.runs("penalties"):
            return None
        return RepetitionUse(params.repetition_penalty, params.repeat_last_n)

    def closed(self, prepared: RepetitionUse) -> bool:
        return True

    def pack(self, rows: Sequence[RowState], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        uses: list[RepetitionUse | None] = [row.prepared.get(self.name) for row in rows]
        lists = [
            _NO_IDS if use is None else _window(row.history, use.window, coming)[0]
            for row, use, coming in zip(rows, uses, pending, strict=True)
        ]
        width = closed_width(max(len(ids) for ids in lists), self.vocab)
        return {
            "repetition.ids": pack_lists(lists, width, fill=NOBODY),
            "repetition.penalty": np.array([1 if use is None else use.penalty for use in uses], np.float32),
            "repetition.pending": _pending(uses, pending),
        }

    def apply(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        """A quotient beyond float32 becomes its largest number."""
        ids, _ = with_newest(xp, params["repetition.ids"], params["repetition.pending"], carry.tokens)
        # XLA divides by one number for a whole row with its reciprocal, which rounds otherwise: so each has its own.
        penalty = xp.where(ids == NOBODY, xp.float32(1), params["repetition.penalty"][:, None])
        largest = xp.float32(_LARGEST)
        return change_at(xp, z, ids, lambda old: xp.where(old > 0, xp.minimum(old / penalty, largest), old * penalty))


@attrs.frozen
class CountUse:
    frequency: float
    presence: float
    window: int | None  # None: the whole output


@attrs.frozen
class _Losses:
    """What the ids of a row lose: float32 [U] each."""

    ids: np.ndarray
    now: np.ndarray
    next: np.ndarray
    first: float  # what an id that is not among them loses when it comes


class CountPenalty:
    """l - (f * count + p) for each id that occurs, in the output or in the window of prompt and output (spec S13)."""

    foreign = None

    def __init__(self, vocab: int, *, windowed: bool) -> None:
        self._vocab = vocab
        self._windowed = windowed
        self.name = "window_frequency" if windowed else "frequency"
        self.lists = {f"{self.name}.ids": NOBODY, f"{self.name}.now": 0, f"{self.name}.next": 0}

    def prepare(self, spec: SequenceSpec) -> CountUse | None:
        params = spec.params
        if self._windowed:
            use = CountUse(params.window_frequency_penalty, params.window_presence_penalty, params.repeat_last_n)
        else:
            use = CountUse(params.frequency_penalty, params.presence_penalty, None)
        idle = (use.frequency == 0 and use.presence == 0) or use.window == 0
        return None if idle or not params.runs("penalties") else use

    def closed(self, prepared: CountUse) -> bool:
        return True

    def pack(self, rows: Sequence[RowState], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        uses: list[CountUse | None] = [row.prepared.get(self.name) for row in rows]
        losses = [_losses(use, row.history, coming) for row, use, coming in zip(rows, uses, pending, strict=True)]
        width = closed_width(max(len(row.ids) for row in losses), self._vocab)
        return {
            f"{self.name}.ids": pack_lists([row.ids for row in losses], width, fill=NOBODY),
            f"{self.name}.now": pack_lists([row.now for row in losses], width),
            f"{self.name}.next": pack_lists([row.next for row in losses], width),
            f"{self.name}.first": np.array([row.first for row in losses], np.float32),
            f"{self.name}.pending": _pending(uses, pending),
        }

    def apply(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        now, coming = params[f"{self.name}.now"], params[f"{self.name}.next"]
        first = params[f"{self.name}.first"][:, None]
        ids, newest = with_newest(xp, params[f"{self.name}.ids"], params[f"{self.name}.pending"], carry.tokens)
        loss = xp.where(
            newest, xp.concatenate([coming, first], axis=-1), xp.concatenate([now, xp.zeros_like(first)], axis=-1)
        )
        return change_at(xp, z, ids, lambda old: old - loss)


def _losses(use: CountUse | None, history: History, pending: bool) -> _Losses:
    if use is None:
        nothing = np.zeros(0, np.float32)
        return _Losses(_NO_IDS, nothing, nothing, 0.0)
    if use.window is None:
        counted = history.output_counts()
        ids, counts = counted.ids, counted.counts
    else:
        ids, counts = _window(history, use.window, pending)
    return _Losses(ids, _loss(use, counts), _loss(use, counts + 1), float(_loss(use, np.array([1]))[0]))


def _loss(use: CountUse, counts: np.ndarray) -> np.ndarray:
    """f * count + p in float32."""
    return np.float32(use.frequency) * counts.astype(np.float32) + np.float32(use.presence)


def _window(history: History, window: int, pending: bool) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids of the window and their counts, without the id that a draw in flight pushes out of it."""
    counted = history.window_counts(window)
    leaving = history.leaving(window) if pending else None
    if leaving is None:
        return counted.ids, counted.counts
    counts = counted.counts - (counted.ids == leaving)
    stays = counts > 0
    return counted.ids[stays], counts[stays]


def _pending(uses: Sequence[Any | None], pending: Sequence[bool]) -> np.ndarray:
    return np.array([coming and use is not None for use, coming in zip(uses, pending, strict=True)], bool)
