"""Which pieces a tick may run: the ring of parked prefills, and the plan of each (spec C5, P10, P11)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from mlxcel.core.engine import Engine
from mlxcel.core.job import Row
from mlxcel.core.plan import Piece, PrefillPlan
from mlxcel.core.request import SequenceSpec
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.score import score_plan
from mlxcel.core.tick import grant


@runtime_checkable
class Planner(Protocol):
    """What cuts prompts into pieces of one chunk: `mlxcel_prefill_planners` factories build it."""

    def build(
        self, ids: np.ndarray, adopted: int = 0, *, draw: bool = True, adopted_prefilled: bool = True
    ) -> PrefillPlan: ...


class Ring:
    """Parked prefills, served in turn. `busy` plans while rows decode, `idle` otherwise; they are one where the chunk
    does not adapt."""

    def __init__(self, engine: Engine, settings: SchedulerSettings, *, idle: Planner, busy: Planner) -> None:
        self._engine, self._settings = engine, settings
        self._idle, self._busy = idle, busy
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def add(self, row: Row) -> None:
        self._rows.append(row)

    def remove(self, row: Row) -> None:
        self._rows.remove(row)

    def ran(self, row: Row) -> None:
        """Its piece is on its way: the others' turn."""
        self._rows.remove(row)
        self._rows.append(row)

    def pass_over(self, rows: Iterable[Row]) -> None:
        """Those whose piece found no room: the others' turn, which may need no page, or may take one."""
        for row in rows:
            if row in self._rows:
                self.ran(row)

    @property
    def alone(self) -> bool:
        """Whether the next piece can share no step: it scores a prompt."""
        return bool(self._rows) and self._rows[0].scoring

    def due(self, decoding: bool) -> list[tuple[Row, Piece]]:
        """The next pieces that one step can take, in their order. `decoding`: rows decode, so that pieces are short."""
        head, found = self.alone, []
        for row in self._rows:
            if row.scoring != head:
                break
            found.append((row, self._piece(row, decoding)))
            if head or not self._settings.flat:
                break
        lengths = [piece.plan.pieces[piece.index].length for _, piece in found]
        count = grant(lengths, budget=self._settings.max_prefill_tokens, flat=self._settings.flat)
        return found[:count]

    def plan(self, spec: SequenceSpec) -> PrefillPlan:
        """Of a row that nothing decodes beside."""
        return self._idle.build(spec.prompt_ids)

    def first(self, row: Row, adopted: int, decoding: bool) -> int:
        """Positions that the row has once its first piece ran behind `adopted` ones: what admission must find room for.
        A row that was preempted wants all of its length and one more token's (spec C21), in its prompt too: with room
        for a piece alone it would be preempted again."""
        if row.sequence_id is not None:
            return row.length
        busy = self._settings.chunk_busy if decoding else None
        chunk = busy or self._engine.settings.chunk
        return min(row.prompt_length, (adopted // chunk + 1) * chunk)

    def _piece(self, row: Row, decoding: bool) -> Piece:
        plan = row.plan
        if plan is None or (row.busy_plan is not decoding and self._busy is not self._idle and not row.scoring):
            plan = row.plan = self._plan(row, decoding)
            row.busy_plan = decoding
        if row.sequence_id is None:
            raise AssertionError("a parked row has a sequence")
        return Piece(row.sequence_id, plan, plan.piece_at(row.at))

    def _plan(self, row: Row, decoding: bool) -> PrefillPlan:
        if row.scoring and row.spec.prompt_scores is not None:
            settings = self._engine.settings
            top = settings.vocab if row.spec.prompt_scores == -1 else row.spec.prompt_scores
            return score_plan(
                row.spec.prompt_ids, 0, top, vocab=settings.vocab, chunk=settings.chunk, level=self._engine.level,
                caps=self._engine.caps,
            )  # fmt: skip
        ids, draw = row.feeds(self._engine.level)
        planner = self._busy if decoding else self._idle
        return planner.build(ids, adopted=row.at, draw=draw, adopted_prefilled=row.adopted_prefilled)
