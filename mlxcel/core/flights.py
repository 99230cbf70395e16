"""Steps between submit and collect, and what each makes of its rows (spec 1.3, E14, E18)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

from mlxcel.core.counters import Counters
from mlxcel.core.delivery import Delivery
from mlxcel.core.engine import Engine
from mlxcel.core.job import Row, RowState
from mlxcel.core.parts import part_length
from mlxcel.core.plan import Part, Piece, RowOutcome, Ticket
from mlxcel.core.reservation import Work
from mlxcel.core.roster import Roster
from mlxcel.core.watchdog import Watchdog
from mlxcel.errors import BackendFault, EngineUnhealthy


@attrs.define(eq=False)
class _Flight:
    """A step that was submitted and not collected."""

    ticket: Ticket
    rows: tuple[Row, ...]
    drew: tuple[bool, ...]
    lost: bool = False  # its rows start over: its result says nothing of them


class Flights:
    """Submits reserved work, reads the oldest step. `reading` adds up the seconds that went into reading."""

    def __init__(
        self,
        engine: Engine,
        *,
        roster: Roster,
        delivery: Delivery,
        counters: Counters,
        watchdog: Watchdog,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._roster, self._delivery = engine, roster, delivery
        self._counters, self._watchdog, self._clock = counters, watchdog, clock
        self._steps: deque[_Flight] = deque()
        self.reading = 0.0
        self.given_up: EngineUnhealthy | None = None  # by the watchdog, while a step was read: it counts no more

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, work: list[Work]) -> None:
        ticket = self._engine.submit([part for _, part in work])
        drew, pieces = [], 0
        for row, part in work:
            if isinstance(part, Piece):
                pieces += 1
                draws = part.plan.draw and part.plan.is_terminal(part.index)
                row.at += part_length(part)
                self._piece_left(row, part)
            else:
                draws = row.draws
                row.at += 1
            drew.append(draws)
            row.drawing += draws
            row.in_flight += 1
        self._steps.append(_Flight(ticket, tuple(row for row, _ in work), tuple(drew)))
        kind = "decode" if not pieces else "prefill" if pieces == len(work) else "mixed"
        self._counters.steps_total[kind] += 1

    def _piece_left(self, row: Row, piece: Piece) -> None:
        """Behind its last piece a row decodes, from the next step on (spec C6)."""
        if not piece.plan.is_terminal(piece.index):
            self._roster.ring.ran(row)
            return
        self._roster.ring.remove(row)
        if not row.scoring:
            row.state = RowState.DECODING

    def collect(self) -> None:
        """Read the oldest step, and what it makes of its rows."""
        flight = self._steps.popleft()
        asked = self._clock()
        outcomes = self._engine.collect(flight.ticket)
        now, fault, ended = self._clock(), None, RowState.ENDED
        self.reading += now - asked
        self._watchdog.step_finished()
        if self.given_up is not None:
            raise self.given_up
        for row, drew, part, outcome in zip(flight.rows, flight.drew, flight.ticket.parts, outcomes, strict=True):
            row.in_flight -= 1
            if not flight.lost:
                row.drawing -= drew
            if outcome.error is not None and isinstance(outcome.error, BackendFault):
                fault = outcome.error
            if row.state is ended:
                self._roster.retire(row)
            elif not flight.lost:
                self._take(row, part, outcome, now)
        if fault is not None:
            self._counters.step_faults_total += 1
            if not fault.kv_intact:
                self._lose_kv()

    def _take(self, row: Row, part: Part, outcome: RowOutcome, now: float) -> None:
        if isinstance(part, Piece) and outcome.error is None:
            if row.scoring:
                if outcome.scores is not None:
                    row.scores.append(outcome.scores)
                if part.plan.is_terminal(part.index):
                    self._roster.scored(row)
                return
            row.pieces.append(part.plan.pieces[part.index])
            self._delivery.progress(row)
            if part.plan.is_terminal(part.index):
                self._roster.prefilled(row)
        self._delivery.outcome(row, outcome, now)
        if outcome.error is not None:
            self._roster.end(row, "error", error=outcome.error)
        elif outcome.cause is not None:
            self._roster.end(row, outcome.cause, outcome.detail)

    def _lose_kv(self) -> None:
        """What is in flight builds on nothing any more, and every row starts over (spec E18)."""
        for flight in self._steps:
            flight.lost = True
        while self._steps:
            self.collect()
        self._roster.start_over()

    def drop(self) -> None:
        """Wait for what is in flight; it counts for nothing."""
        while self._steps:
            self._engine.collect(self._steps.popleft().ticket)
