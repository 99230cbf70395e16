"""What the engine thread does: one tick after the other (spec 7.1)."""

from __future__ import annotations

from collections.abc import Callable

from mlxcel.core.counters import Counters
from mlxcel.core.deadlines import Deadlines
from mlxcel.core.delivery import Delivery
from mlxcel.core.end_record import EndRecords
from mlxcel.core.engine import Engine
from mlxcel.core.errand import Errand
from mlxcel.core.flights import Flights
from mlxcel.core.inbox import Cancel, Inbox
from mlxcel.core.job import Job, Row, RowState
from mlxcel.core.piecework import Ring
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.core.request import SequenceSpec
from mlxcel.core.reservation import Remedies, Reservation, Work
from mlxcel.core.roster import Roster
from mlxcel.core.row_view import RowView
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.seating import Seating
from mlxcel.core.tick import Action, TickState, decide
from mlxcel.core.watchdog import Watchdog
from mlxcel.errors import (
    EngineUnhealthy,
    MlxcelError,
    RequestTimeout,
    ShuttingDown,
)


class EngineLoop:
    """The order of work, on one thread. Nothing here waits, but for a step's result."""

    def __init__(
        self,
        engine: Engine,
        *,
        settings: SchedulerSettings,
        inbox: Inbox,
        ring: Ring,
        seating: Seating,
        cache: PromptCache | None,
        records: EndRecords,
        counters: Counters,
        watchdog: Watchdog,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._settings, self._inbox, self._ring, self._cache = engine, settings, inbox, ring, cache
        self._records, self._counters, self._watchdog, self._clock = records, counters, watchdog, clock
        self._delivery = Delivery(counters, self.leave)
        self._roster = Roster(
            engine,
            inbox=inbox,
            ring=ring,
            seating=seating,
            cache=cache,
            records=records,
            counters=counters,
            delivery=self._delivery,
            clock=clock,
        )
        remedies = Remedies(self._roster.preempt, self._fail)
        self._reservation = Reservation(engine, cache, counters, remedies, preemption=settings.preemption)
        self._flights = Flights(
            engine,
            roster=self._roster,
            delivery=self._delivery,
            counters=counters,
            watchdog=watchdog,
            clock=clock,
        )
        self._leaving: dict[Row, MlxcelError | None] = {}  # to be ended from outside, for this reason
        self._deadlines = Deadlines()
        self._since_grant = 0

    # --- the tick -----------------------------------------------------------------------------------------------------

    @property
    def sick(self) -> EngineUnhealthy | None:
        """Why no turn will come, once that is so."""
        return self._flights.given_up

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._roster.jobs and not self._flights

    def views(self) -> list[RowView]:
        """See `Scheduler.rows`."""
        return self._roster.views()

    def next_deadline(self) -> float | None:
        """When a tick is due though no message came, on the clock."""
        return self._deadlines.next

    def tick(self) -> bool:
        """One turn. False when there was nothing to do: the next one is due at a message or a deadline. EngineUnhealthy
        when there will be no other."""
        if self.sick is not None:
            raise self.sick
        begun, read = self._clock(), self._flights.reading
        self._receive()
        self._expire()
        ahead = self._ahead() if self._flights else None
        if self._flights and ahead is None:
            self._flights.collect()
        self._let_leave()
        if not self._flights:
            self._roster.admit()
        worked = self._step(ahead)
        self._report()
        if worked:
            self._counters.ticks_total += 1
            self._counters.tick_host_seconds += self._clock() - begun - (self._flights.reading - read)
        if not self._engine.healthy:
            raise EngineUnhealthy(
                f"{self._engine.settings.max_consecutive_faults} steps failed in a row",
                hint="restart; run with -vv for the backend's own trace",
            )
        return worked

    def warm(self, spec: SequenceSpec) -> None:
        """Run a row alone, to its end, before anything else: what serving needs is made then (spec C62)."""
        sequence_id = self._engine.open(spec)
        try:
            outcome = self._engine.prefill(sequence_id, self._ring.plan(spec))
            while outcome.cause is None and outcome.error is None:
                outcome = self._engine.step([sequence_id])[0]
        finally:
            self._engine.close(sequence_id)

    def _receive(self) -> None:
        for message in self._inbox.take():
            if isinstance(message, Cancel):
                self.leave(message.job, None)
            elif isinstance(message, Errand):
                message.run()
            else:
                self._roster.enqueue(message)
                if message.deadline is not None:
                    self._deadlines.add(message.deadline, message)

    def _expire(self) -> None:
        if self._cache is not None:
            self._cache.sweep()
        for job in self._deadlines.due(self._clock()):
            if not job.ended:
                seconds = job.request.timeout
                self.leave(
                    job,
                    RequestTimeout(
                        f"the request took longer than {seconds:g} s", hint="ask for less, or raise --timeout"
                    ),
                )

    def leave(self, job: Job, why: MlxcelError | None) -> None:
        """Have the rest of a job ended at the next turn."""
        for row in job.rows:
            if row.state is not RowState.ENDED:
                self._leaving.setdefault(row, why)

    def leave_all(self) -> None:
        for job in self._roster.jobs.values():
            self.leave(job, ShuttingDown("the server is shutting down: the time for what ran is over"))

    def _let_leave(self) -> None:
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, {}
        for row, why in leaving.items():
            if row.state is RowState.ENDED:
                continue
            if row.sequence_id is None or row.scoring:
                self._roster.end(row, "rejected" if isinstance(why, RequestTimeout) else "cancelled", error=why)
                continue
            self._delivery.outcome(row, self._engine.cancel(row.sequence_id), self._clock())
            self._roster.end(row, "cancelled", error=why)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _ahead(self) -> list[Work] | None:
        """The next step, where it may be submitted before what is in flight is read (spec C51); else None."""
        if not self._settings.run_ahead or self._leaving or self._roster.head_fits:
            return None
        work, closed = self._decodes(), self._engine.closed
        if len(self._ring):  # with nothing that decodes, the next pieces need nothing of those in flight
            return None if work or self._ring.alone else [*self._ring.due(decoding=False)]
        for row, part in work:
            if row.drawing and not closed(part.sequence_id):
                return None
        return work

    def _step(self, ahead: list[Work] | None) -> bool:
        """Run what is due, `ahead` of what is in flight where there is something. A step, or a run of steps, is left
        in flight where the next one may be submitted before it is read."""
        if ahead is not None:
            if ahead:
                self._submit_ahead(ahead)
            self._flights.collect()
            return True
        decodes = self._decodes()
        pieces: list[Work] = [*self._ring.due(bool(decodes))]
        state = TickState(
            decoding=len(decodes),
            parked=len(self._ring),
            since_grant=self._since_grant,
            interval=self._settings.grant_interval,
            mixed=self._settings.mixed and not self._ring.alone,
        )
        for choice in decide(state):
            work = self._work(choice.action, decodes, pieces)
            held = self._reservation.hold(work, self._roster.seated.values())
            if len(held) < len(work):
                kept = {row for row, _ in held}
                self._ring.pass_over(row for row, _ in work if row not in kept)
            if held:
                self._since_grant = choice.since_grant
                self._flights.submit(held)
                if self._ahead() is None:
                    self._flights.collect()
                return True
        self._since_grant = 0
        return bool(decodes or pieces)

    def _decodes(self) -> list[Work]:
        return [(row, row.decode) for row in self._roster.seated.values() if row.can_decode]

    @staticmethod
    def _work(action: Action, decodes: list[Work], pieces: list[Work]) -> list[Work]:
        """The parts of an action, of rows that did not lose their place since they were chosen."""
        wanted = {
            Action.IDLE: [],
            Action.PREFILL: pieces,
            Action.DECODE: decodes,
            Action.MIXED: [*decodes, *pieces],
        }[action]
        return [(row, part) for row, part in wanted if row.state in (RowState.PARKED, RowState.DECODING)]

    def _submit_ahead(self, work: list[Work]) -> None:
        """As many steps of it as may be submitted together and fit; perhaps none."""
        steps = self._engine.run_length([part for _, part in work])
        if steps > 1 and self._reserved(work, steps):
            self._flights.submit_run(work, steps)
        elif self._reserved(work, 1):
            steps = 1
            self._flights.submit(work)
        else:
            return
        self._counters.steps_ahead_total += steps

    def _reserved(self, work: list[Work], steps: int) -> bool:
        try:
            self._engine.reserve([part for _, part in work], steps)
        except EngineUnhealthy:
            raise
        except MlxcelError:  # no room, or a part that no step can take: with nothing in flight it is seen to
            return False
        return True

    def _fail(self, row: Row, error: MlxcelError) -> None:
        self._roster.end(row, "error", error=error)

    # --- when nothing goes on ---------------------------------------------------------------------------------------

    def end_all(self, error: EngineUnhealthy) -> None:
        """Tell every client, from whichever thread: the engine is not touched (spec C36, C37)."""
        self._flights.given_up = error
        jobs = [*self._roster.jobs.values(), *(message for message in self._inbox.take() if isinstance(message, Job))]
        for job in jobs:
            for row in job.rows:
                if row.state is not RowState.ENDED:
                    row.state = RowState.ENDED
                    self._records.end(row, "error", None, error)

    def close_all(self) -> None:
        """Close what is open in the engine, from its own thread: nobody is told any more."""
        self._flights.drop()
        for number in self._engine.open_sequences:
            self._engine.close(number)
        self._roster.forget_all()
        self._report()

    def _report(self) -> None:
        counters = self._counters
        counters.num_requests_running = sum(not job.waits for job in self._roster.jobs.values())
        counters.num_requests_waiting = self._inbox.waiting
        counters.rows_total = self._engine.settings.slots
        counters.rows_busy = len(self._roster.seated)
        self._inbox.count(busy=self._roster.staying)
        self._watchdog.busy(bool(self._roster.seated))
