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
    """A step, or a run of steps over the same parts, that was submitted and not collected."""

    tickets: tuple[Ticket, ...]
    rows: tuple[Row, ...]
    drew: tuple[bool, ...]
    lost: bool = False  # its rows start over: what is read of it from now on says nothing of them
    kv_lost: bool = False  # a step of it took the KV of all rows with it


class Flights:
    """Submits reserved work, reads the oldest of what is in flight. `reading` adds up the seconds that went into
    reading."""

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
        self._flights: deque[_Flight] = deque()
        self.reading = 0.0
        self.given_up: EngineUnhealthy | None = None  # by the watchdog, while a step was read: it counts no more

    def __len__(self) -> int:
        return len(self._flights)

    def submit(self, work: list[Work]) -> None:
        """One step."""
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
        self._flights.append(_Flight((ticket,), tuple(row for row, _ in work), tuple(drew)))
        kind = "decode" if not pieces else "prefill" if pieces == len(work) else "mixed"
        self._counters.steps_total[kind] += 1

    def submit_run(self, decodes: list[Work], steps: int) -> None:
        """So many steps of the same decodes, each of which draws."""
        tickets = self._engine.submit_run([row.decode for row, _ in decodes], steps)
        for row, _ in decodes:
            row.at += steps
            row.drawing += steps
            row.in_flight += steps
        self._flights.append(_Flight(tickets, tuple(row for row, _ in decodes), (True,) * len(decodes)))
        self._counters.steps_total["decode"] += steps

    def _piece_left(self, row: Row, piece: Piece) -> None:
        """Behind its last piece a row decodes, from the next step on (spec C6)."""
        if not piece.plan.is_terminal(piece.index):
            self._roster.ring.ran(row)
            return
        self._roster.ring.remove(row)
        if not row.scoring:
            row.state = RowState.DECODING

    def collect(self) -> None:
        """Read the oldest step, or all steps of a run, and what each makes of its rows."""
        flight = self._flights.popleft()
        for ticket in flight.tickets:
            self._collect(flight, ticket)
        if flight.kv_lost:
            while self._flights:
                self.collect()
            self._roster.start_over()

    def _collect(self, flight: _Flight, ticket: Ticket) -> None:
        asked = self._clock()
        outcomes = self._engine.collect(ticket)
        now, fault, ended = self._clock(), None, RowState.ENDED
        self.reading += now - asked
        self._watchdog.step_finished()
        if self.given_up is not None:
            raise self.given_up
        for row, drew, part, outcome in zip(flight.rows, flight.drew, ticket.parts, outcomes, strict=True):
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
                self._lose_kv(flight)

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

    def _lose_kv(self, flight: _Flight) -> None:
        """What is in flight builds on nothing any more, and every row starts over once it was read (spec E18)."""
        flight.kv_lost = True
        for behind in (flight, *self._flights):
            behind.lost = True

    def drop(self) -> None:
        """Wait for what is in flight; it counts for nothing."""
        self._flights.clear()
        self._engine.drop_steps()
