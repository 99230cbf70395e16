"""What the engine thread does: one tick after the other (spec 7.1)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from mlxcel.core.counters import Counters
from mlxcel.core.deadlines import Deadlines
from mlxcel.core.end_record import EndRecords
from mlxcel.core.engine import Engine
from mlxcel.core.errand import Errand
from mlxcel.core.events import Delta, Started
from mlxcel.core.inbox import Cancel, Inbox
from mlxcel.core.job import Job, Row, RowState
from mlxcel.core.parts import part_length
from mlxcel.core.piecework import Ring
from mlxcel.core.plan import Decode, Part, Piece, RowOutcome, Scores, Ticket, TokenLogprobs
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.core.request import SequenceSpec
from mlxcel.core.reservation import Remedies, Reservation, Work
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.seating import Seating, needs_score
from mlxcel.core.sequence import SequenceState
from mlxcel.core.tick import Action, TickState, decide
from mlxcel.core.waiting import WaitingLine
from mlxcel.core.watchdog import Watchdog
from mlxcel.errors import (
    BackendFault,
    CapacityError,
    EngineUnhealthy,
    MlxcelError,
    RequestTimeout,
    ShuttingDown,
    SlowClient,
)

log = logging.getLogger("mlxcel.scheduler")


@attrs.define(eq=False)
class _Flight:
    """A step that was submitted and not collected."""

    ticket: Ticket
    rows: tuple[Row, ...]
    drew: tuple[bool, ...]
    lost: bool = False  # its rows start over: its result says nothing of them


class EngineLoop:
    """Queues and order, of one thread. Nothing here waits, but for a step's result."""

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
        self._engine, self._settings, self._inbox = engine, settings, inbox
        self._ring, self._seating, self._cache = ring, seating, cache
        self._records, self._counters, self._watchdog, self._clock = records, counters, watchdog, clock
        self._reservation = Reservation(
            engine, cache, counters, Remedies(self._preempt, self._fail), preemption=settings.preemption
        )
        self._jobs: dict[int, Job] = {}  # by number
        self._line = WaitingLine()
        self._behind: dict[int, list[Row]] = {}  # by job, choices that wait for what the first one shares with them
        self._seated: dict[int, Row] = {}  # by sequence id, in the order they were admitted: rows with a slot
        self._flights: deque[_Flight] = deque()
        self._leaving: dict[Row, MlxcelError | None] = {}  # to be ended from outside, for this reason
        self._deadlines = Deadlines()
        self._since_grant = 0
        self.sick: EngineUnhealthy | None = None

    # --- the tick -----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._jobs and not self._flights

    def next_deadline(self) -> float | None:
        """When a tick is due though no message came, on the clock."""
        return self._deadlines.next

    def tick(self) -> bool:
        """One turn. False when there was nothing to do: the next one is due at a message or a deadline. EngineUnhealthy
        when there will be no other."""
        if self.sick is not None:
            raise self.sick
        self._receive()
        self._expire()
        if self._flights and not self._runs_ahead():
            self._collect()
        self._let_leave()
        if not self._flights:
            self._admit()
        worked = self._step()
        self._report()
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
                self._enqueue(message)

    def _enqueue(self, job: Job) -> None:
        self._jobs[job.number] = job
        first, *others = job.rows
        self._line.add(first)
        shares = self._cache is not None and job.request.cache_prompt
        if others and (shares or needs_score(first)):
            self._behind[job.number] = others
        else:
            for row in others:
                self._line.add(row)
        if job.deadline is not None:
            self._deadlines.add(job.deadline, job)

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
        for job in self._jobs.values():
            self.leave(job, ShuttingDown("the server is shutting down: the time for what ran is over"))

    def _let_leave(self) -> None:
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, {}
        for row, why in leaving.items():
            if row.state is RowState.ENDED:
                continue
            if row.sequence_id is None or row.scoring:
                self._end(row, "rejected" if isinstance(why, RequestTimeout) else "cancelled", error=why)
                continue
            self._deliver(row, self._engine.cancel(row.sequence_id), self._clock())
            self._end(row, "cancelled", error=why)

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (row := self._line.head) is not None and self._seating.fits(row, self._seated.values()):
            try:
                if not self._seating.seat(row):
                    if self._seated:
                        return
                    raise CapacityError("the KV storage has no room for one row", hint="raise --kv-cache-budget")
            except EngineUnhealthy:
                raise
            except Exception as error:
                self._end(row, "rejected" if row.sequence_id is None else "error", error=error)
                continue
            self._line.remove(row)
            self._begin(row)

    def _begin(self, row: Row) -> None:
        if row.sequence_id is None:
            raise AssertionError("a row that was seated has a sequence")
        self._seated[row.sequence_id] = row
        row.state = RowState.PARKED
        if row.started is None:
            row.started = self._clock()
            self._waits_no_more(row.job)
            self._counters.prompt_tokens_total += row.prompt_length
        if not row.scoring and not row.announced:
            row.announced = True
            self._counters.prompt_tokens_cached_total += row.cached
            self._put(row, Started(row.spec.choice, row.cached))
            if row.job.request.before:
                row.text.append(row.job.request.before)
                self._put(row, Delta(row.spec.choice, text=row.job.request.before))
        if row.scoring and row.prompt_length == 1:
            self._scored(row)
        elif row.max_new == 0 and not row.scoring:
            self._end(row, "max_tokens")
        else:
            self._ring.add(row)

    def _waits_no_more(self, job: Job) -> None:
        if job.waits and all(row.started is not None or row.state is RowState.ENDED for row in job.rows):
            job.waits = False
            self._inbox.count(busy=len(self._seated), left=1)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _runs_ahead(self) -> bool:
        """Whether the next step may be submitted before the one in flight is read (spec C51)."""
        if not self._settings.run_ahead or self._leaving or len(self._ring):
            return False
        if (head := self._line.head) is not None and self._seating.fits(head, self._seated.values()):
            return False
        closed = self._engine.closed
        return all(closed(number) for number, row in self._seated.items() if row.drawing and row.can_decode)

    def _step(self) -> bool:
        """Run what is due. A step is left in flight where the next one may be submitted before it is read."""
        if self._flights:
            ahead = self._decodes()
            if ahead and self._reserved(ahead):
                self._submit(ahead)
                self._counters.steps_ahead_total += 1
            self._collect()
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
            held = self._reservation.hold(work, self._seated.values())
            if held:
                self._since_grant = choice.since_grant
                self._submit(held)
                if not self._runs_ahead():
                    self._collect()
                return True
        self._since_grant = 0
        return bool(decodes or pieces)

    def _decodes(self) -> list[Work]:
        return [(row, Decode(number)) for number, row in self._seated.items() if row.can_decode]

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

    def _reserved(self, work: list[Work]) -> bool:
        try:
            self._engine.reserve([part for _, part in work])
        except CapacityError:
            return False
        return True

    def _submit(self, work: list[Work]) -> None:
        ticket = self._engine.submit([part for _, part in work])
        drew = []
        for row, part in work:
            draws = row.draws if isinstance(part, Decode) else part.plan.draw and part.plan.is_terminal(part.index)
            drew.append(draws)
            row.at += part_length(part)
            row.drawing += draws
            row.in_flight += 1
            if isinstance(part, Piece):
                self._piece_left(row, part)
        self._flights.append(_Flight(ticket, tuple(row for row, _ in work), tuple(drew)))
        kinds = {isinstance(part, Piece) for _, part in work}
        self._counters.steps_total["mixed" if len(kinds) == 2 else "prefill" if True in kinds else "decode"] += 1

    def _piece_left(self, row: Row, piece: Piece) -> None:
        """Behind its last piece a row decodes, from the next step on (spec C6)."""
        if not piece.plan.is_terminal(piece.index):
            self._ring.ran(row)
            return
        self._ring.remove(row)
        if not row.scoring:
            row.state = RowState.DECODING

    # --- results ------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Read the oldest step, and what it makes of its rows."""
        flight = self._flights.popleft()
        outcomes = self._engine.collect(flight.ticket)
        self._watchdog.step_finished()
        if self.sick is not None:
            raise self.sick
        now, fault = self._clock(), None
        for row, drew, part, outcome in zip(flight.rows, flight.drew, flight.ticket.parts, outcomes, strict=True):
            row.in_flight -= 1
            if not flight.lost:
                row.drawing -= drew
            if isinstance(outcome.error, BackendFault):
                fault = outcome.error
            if row.state is RowState.ENDED:
                self._retire(row)
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
                    self._scored(row)
                return
            row.pieces.append(part.plan.pieces[part.index])
            if part.plan.is_terminal(part.index):
                self._prefilled(row)
        self._deliver(row, outcome, now)
        if outcome.error is not None:
            self._end(row, "error", error=outcome.error)
        elif outcome.cause is not None:
            self._end(row, outcome.cause, outcome.detail)

    def _deliver(self, row: Row, outcome: RowOutcome, now: float) -> None:
        """What an outcome lets go of, for the record and for the client."""
        if outcome.token is not None and row.first_token is None:
            row.first_token = now
        ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if outcome.appended and outcome.token is not None:
            row.last_token = now
            row.output.append(outcome.token)
            ids = (outcome.token,)
            self._counters.generation_tokens_total += 1
            if outcome.logprobs is not None:
                logprobs = (outcome.logprobs,)
                row.logprobs += logprobs
        if outcome.text:
            row.text.append(outcome.text)
        if outcome.reasoning:
            row.reasoning.append(outcome.reasoning)
        if ids or outcome.text or outcome.reasoning:
            self._put(row, Delta(row.spec.choice, outcome.text, outcome.reasoning, ids, logprobs))

    def _put(self, row: Row, event: Started | Delta) -> None:
        outbox = row.job.outbox
        if outbox.put(event) or row in self._leaving:
            return
        why = None
        if outbox.slow:
            self._counters.slow_clients_total += 1
            why = SlowClient("the client left too much of its reply unread", hint="read events as they come")
        self.leave(row.job, why)

    def _prefilled(self, row: Row) -> None:
        """Its prompt is computed: equal prompts that wait may begin with it (spec X10, C13)."""
        if self._cache is not None and row.sequence_id is not None:
            try:
                self._cache.share(self._engine, row.sequence_id, allowed=row.job.request.cache_prompt)
            except MlxcelError as error:
                log.warning("the prompt of %s was not shared", row.spec.request_id, exc_info=error)
        self._release_behind(row.job)

    def _release_behind(self, job: Job) -> None:
        for row in self._behind.pop(job.number, ()):
            if row.state is RowState.WAITING:
                self._line.add(row)

    def _scored(self, row: Row) -> None:
        """Its prompt was scored, on an engine row of its own: it waits for the one that makes its reply."""
        prompt = row.spec.prompt_ids
        row.job.prompt_logprobs = (None, *Scores.joined(row.scores).of_tokens(prompt[1:])) if row.scores else (None,)
        self._unseat(row)
        row.forget_kv()
        row.state = RowState.WAITING
        self._line.add(row)

    # --- how rows leave their place -----------------------------------------------------------------------------------

    def _preempt(self, row: Row, kind: str) -> None:
        if row.sequence_id is None:
            raise AssertionError("a row without a place cannot lose it")
        self._counters.preemptions_total[kind] += 1
        if row.scoring:
            self._unseat(row)
        else:
            self._engine.preempt(row.sequence_id)
            del self._seated[row.sequence_id]
        self._wait_again(row)

    def _wait_again(self, row: Row) -> None:
        if row in self._ring:
            self._ring.remove(row)
        row.forget_kv()
        row.state = RowState.WAITING
        self._line.add(row)

    def _lose_kv(self) -> None:
        """The engine preempted every row that is not of the failed step (spec E18)."""
        for flight in self._flights:
            flight.lost = True
        while self._flights:
            self._collect()
        if self._cache is not None:
            self._cache.lost()
        for number, row in list(self._seated.items()):
            if row.state is RowState.ENDED:
                continue
            error = self._engine.view(number).error
            if error is not None:
                self._end(row, "error", error=error)
            elif row.scoring:
                self._unseat(row)
                self._wait_again(row)
            elif self._engine.view(number).state is SequenceState.PREEMPTED:
                del self._seated[number]
                self._counters.preemptions_total["parked" if row.state is RowState.PARKED else "running"] += 1
                self._wait_again(row)

    def _fail(self, row: Row, error: MlxcelError) -> None:
        self._end(row, "error", error=error)

    def _end(self, row: Row, cause: str, detail: Any = None, *, error: Exception | None = None) -> None:
        """The row is over: its client hears of it now, its place is free once nothing of it is in flight."""
        if row.state is RowState.WAITING:
            self._forget_waiting(row)
        if row in self._ring:
            self._ring.remove(row)
        row.state = RowState.ENDED
        self._records.end(row, cause, detail, error)
        self._waits_no_more(row.job)
        self._release_behind(row.job)
        row.donates = error is None or cause == "cancelled"
        self._retire(row)
        if row.job.ended:
            self._jobs.pop(row.job.number, None)

    def _forget_waiting(self, row: Row) -> None:
        behind = self._behind.get(row.job.number, [])
        if row in behind:
            behind.remove(row)
        else:
            self._line.remove(row)

    def _retire(self, row: Row) -> None:
        """Give its KV to the prompt cache, or back (spec X10, E8)."""
        if row.sequence_id is None or row.in_flight:
            return
        if self._cache is not None and row.donates and row.at and not row.scoring:
            try:
                self._cache.donate(self._engine, row.sequence_id, allowed=row.job.request.cache_prompt)
            except Exception as error:
                log.warning("the KV of %s was not kept", row.spec.request_id, exc_info=error)
        self._unseat(row)

    def _unseat(self, row: Row) -> None:
        if row.sequence_id is not None:
            self._engine.close(row.sequence_id)
            self._seated.pop(row.sequence_id, None)
            row.sequence_id = None

    # --- when nothing goes on ---------------------------------------------------------------------------------------

    def end_all(self, error: EngineUnhealthy) -> None:
        """Tell every client, from whichever thread: the engine is not touched (spec C36, C37)."""
        self.sick = error
        jobs = [*self._jobs.values(), *(message for message in self._inbox.take() if isinstance(message, Job))]
        for job in jobs:
            for row in job.rows:
                if row.state is not RowState.ENDED:
                    row.state = RowState.ENDED
                    self._records.end(row, "error", None, error)

    def close_all(self) -> None:
        """Close what is open in the engine, from its own thread: nobody is told any more."""
        while self._flights:
            self._engine.collect(self._flights.popleft().ticket)
        for number in self._engine.open_sequences:
            self._engine.close(number)
        self._seated.clear()
        self._jobs.clear()
        self._report()

    def _report(self) -> None:
        counters = self._counters
        counters.num_requests_running = sum(not job.waits for job in self._jobs.values())
        counters.num_requests_waiting = self._inbox.waiting
        counters.rows_total = self._engine.settings.slots
        counters.rows_busy = len(self._seated)
        self._inbox.count(busy=len(self._seated))
        self._watchdog.busy(bool(self._seated))
