"""The engine: rows, steps, and nothing a client could go around. A lone row is a batch of one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listing
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from mlxcel.core.backend import Backend, BackendCaps, Compilations, CountsCompilations, DeviceMemory, Level, RunsSteps
from mlxcel.core.coming_steps import prepare_steps
from mlxcel.core.engine_parts import EngineParts
from mlxcel.core.finish import Ending, Finish
from mlxcel.core.kv import KVSpec, KVStats, KVStore
from mlxcel.core.kv_calls import KVCalls
from mlxcel.core.observe import Observers
from mlxcel.core.packing import pack_behind, pack_step
from mlxcel.core.parts import check_parts, longest_run, part_length
from mlxcel.core.plan import (
    Decode,
    Part,
    Piece,
    PrefillPlan,
    RowOutcome,
    Scores,
    Span,
    StepPlan,
    StepReport,
    StepResult,
    Ticket,
)
from mlxcel.core.request import SequenceSpec
from mlxcel.core.reserved import Reserved
from mlxcel.core.resolving import Resolving
from mlxcel.core.rows import Rows
from mlxcel.core.sampling import Sampler
from mlxcel.core.score import score
from mlxcel.core.sequence import Sequence, SequenceState, SequenceView
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import Progress
from mlxcel.core.step import Step, as_fault, check_result, last_outcome
from mlxcel.errors import (
    BackendFault,
    BatchShapeError,
    CapacityError,
    EngineUnhealthy,
)

log = logging.getLogger("mlxcel.engine")

MAX_OUTSTANDING = 2
"""Steps, or runs of steps, that may be submitted and not collected: the one that is read, and one ahead."""


class Engine(KVCalls):
    """Opens rows, runs steps over them, closes them. Refusals raise before any forward and change nothing.

    The caller owns the order of calls and one thread at a time; `Scheduler`-like clients and a lone `generate` use the
    same methods. The backend given here belongs to the engine from now on.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        kv_spec: KVSpec,
        kv: KVStore,
        sampler: Sampler,
        finish: Finish,
        settings: EngineSettings,
        observers: Observers | None = None,
    ) -> None:
        self._backend = backend
        self._running = backend if isinstance(backend, RunsSteps) else None  # which takes long to find out
        self._sampler = sampler
        self._finish = finish
        self._settings = settings
        self._observers = Observers(()) if observers is None else observers
        self._parts = EngineParts(backend, kv_spec, kv, sampler, finish, settings)
        super().__init__(Rows(self._parts), kv)
        self._resolving = Resolving(self._rows, sampler, finish)
        self._steps: deque[Step] = deque()
        self._next_ticket = 1
        self._faults_in_a_row = 0
        self._sick: EngineUnhealthy | None = None  # for good (spec E19)
        self._shut = False
        self._kv_spec = kv_spec
        backend.start(settings.layout(kv_spec, kv), sampler)

    # --- what others may know -----------------------------------------------------------------------------------

    @property
    def level(self) -> Level:
        """How far row invariance holds here: R0, R1 or R2."""
        return self._backend.caps.level

    @property
    def caps(self) -> BackendCaps:
        """What the backend offers."""
        return self._backend.caps

    @property
    def settings(self) -> EngineSettings:
        return self._settings

    @property
    def healthy(self) -> bool:
        return not self._shut and self._sick is None

    @property
    def kv_stats(self) -> KVStats:
        return self._kv.stats()

    @property
    def kv_storage(self) -> str:
        return self._kv.name

    @property
    def open_sequences(self) -> tuple[int, ...]:
        """Ids in the order they were opened."""
        return tuple(row.id for row in self._rows if not row.closing)

    @property
    def device_memory(self) -> DeviceMemory | None:
        """As it is now, None where the device has none of its own."""
        return self._backend.memory()

    @property
    def compilations(self) -> Compilations | None:
        """None where nothing is compiled."""
        backend = self._backend
        return backend.compilations if isinstance(backend, CountsCompilations) else None

    def check_sampling(self, spec: SequenceSpec) -> None:
        """RequestError for what `open` would refuse of the parameters, such as a logits processor that is not there.
        Touches no row: from any thread."""
        self._sampler.open(spec)

    def slot(self, sequence_id: int) -> int | None:
        """The row's place among the rows of the engine; None while it has none."""
        return self._rows.get(sequence_id).slot

    def view(self, sequence_id: int) -> SequenceView:
        return SequenceView.of(self._rows.get(sequence_id))

    def tokens(self, sequence_id: int) -> np.ndarray:
        """int32 ids of the row's prompt and output."""
        row = self._rows.get(sequence_id)
        return row.tokens(0, row.length)

    def closed(self, sequence_id: int) -> bool:
        """Whether the row's next draw may be submitted before the one in flight is read (spec C51)."""
        row = self._rows.get(sequence_id)
        return row.runs or self._sampler.closed(row.sampler_state)

    def run_length(self, parts: Listing[Part]) -> int:
        """How many steps of these parts may be submitted together now (spec C54): what the backend's `decode_runs` say
        of so many rows, or 1."""
        caps = self._backend.caps
        if caps.run_steps(len(parts)) == 1 or any(isinstance(part, Piece) for part in parts):
            return 1
        return longest_run(self._rows.get_all(parts), caps, self._kv_spec)

    # --- rows -----------------------------------------------------------------------------------------------------

    def cancel(self, sequence_id: int, cause: str = "cancelled") -> RowOutcome:
        """End a row from outside: its text's tail comes along. A step of it in flight is dropped when collected."""
        row = self._rows.get(sequence_id)
        if row.ended:
            return last_outcome(row)
        self._rows_change()
        tail = self._finish.flush(row.finish_state)
        row.state, row.ending = SequenceState.FINISHED, Ending(cause)
        return RowOutcome(row.id, text=tail.text, reasoning=tail.reasoning, cause=cause)

    def close(self, sequence_id: int) -> bool:
        """Free a row; returns whether it was open. With a step in flight its pages are freed when that is collected."""
        row = self._rows.find(sequence_id)
        if row is None:
            return False
        self._rows_change()
        row.closing = True
        self._rows.forget_closed([row])
        return True

    def shutdown(self) -> None:
        """Close every row and free the device. Idempotent."""
        if self._shut:
            return
        self._shut = True
        self._steps.clear()
        with ExitStack() as stack:  # what one plugin raises keeps nothing of the others
            stack.callback(self._backend.close)
            for row in self._rows:
                stack.callback(self._rows.forget, row)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- steps ------------------------------------------------------------------------------------------------------

    def reserve(self, parts: Listing[Part], steps: int = 1) -> None:
        """Reserve every position the parts will write, or none; for `submit_run` those of so many steps. Replaces a
        reservation that was not submitted."""
        self._check_healthy()
        rows, drawing = self._check(parts, steps)
        self._reserved = None
        seated = self._rows.seat_all(rows)
        try:
            self._kv.reserve([(part.sequence_id, steps * part_length(part)) for part in parts])
        except BaseException:
            self._rows.unseat_all(seated)
            raise
        self._reserved = Reserved(tuple(parts), rows, drawing, steps)

    def submit(self, parts: Listing[Part]) -> Ticket:
        """Start one step over reserved parts. At most two steps, or runs of steps, are outstanding."""
        return self._submit(tuple(parts), 1)[0]

    def submit_run(self, parts: Listing[Decode], steps: int) -> tuple[Ticket, ...]:
        """Start `steps` decode steps over the same rows, as many as `run_length` says and were reserved, in one call of
        the backend: a ticket of each. A row that ends on the way has what is behind its end dropped (spec C54)."""
        return self._submit(tuple(parts), steps)

    def _submit(self, own: tuple[Part, ...], steps: int) -> tuple[Ticket, ...]:
        self._check_healthy()
        reserved = self._reserved
        is_reserved = reserved is not None and (reserved.parts, reserved.steps) == (own, steps)
        if reserved is not None and reserved.checked and is_reserved:
            rows, drawing = reserved.rows, reserved.drawing
        else:
            rows, drawing = self._check(own, steps)
        if len({step.run for step in self._steps}) >= MAX_OUTSTANDING:
            raise BatchShapeError(f"{len(self._steps)} steps are in flight", hint="collect the oldest one first")
        if self._steps and not self._backend.caps.run_ahead:
            raise BatchShapeError("this backend runs one step at a time", hint="collect the step in flight first")
        if not is_reserved:
            raise BatchShapeError(
                "these parts are not the ones reserved", hint="call reserve with the same list and as many steps"
            )
        self._reserved = None
        lengths = tuple(map(part_length, own))
        for ahead in self._steps:
            ahead.followed += rows
        handles: list[Any]
        copies = [(row, copy) for row in rows if (copy := self._kv.page_copy(row.id)) is not None]
        try:
            pages = [copy for _, copy in copies]
            closed = self._backend.caps.compiled
            plan = pack_step(rows, own, lengths, drawing, pages, kv=self._kv, sampler=self._sampler, closed=closed)
            for row, length in zip(rows, lengths, strict=True):
                self._kv.advance(row.id, steps * length)
            if steps == 1:
                handles = [self._backend.submit(plan)]
            else:
                plans = [plan, *pack_behind(plan, rows, steps, sampler=self._sampler, closed=closed)]
                handles = self._run(plans)
        except Exception as error:  # collect reports it, so that a step fails in one way whenever it fails
            log.debug("step %d was not started", self._next_ticket, exc_info=error)
            handles = [as_fault(error)] * steps
        except BaseException:  # an interrupt: there was no step
            self._trim_all()
            for row, _ in copies:  # nobody knows whether its page was copied
                self._rows.preempt(row)
            raise
        first = self._next_ticket
        self._next_ticket += steps
        tickets = tuple(Ticket(number, own) for number in range(first, first + steps))
        for ticket, handle in zip(tickets, handles, strict=True):
            step = Step(ticket, handle, tuple(rows), lengths, drawing, first)
            step.begin()
            self._steps.append(step)
        return tickets

    def collect(self, ticket: Ticket) -> list[RowOutcome]:
        """Read the oldest step and resolve its rows: one outcome a part, in the order of the parts.

        A step that failed gives every one of its rows the BackendFault as its error.
        """
        if not self._steps or self._steps[0].ticket is not ticket:
            raise BatchShapeError(f"ticket {ticket.number} is not the oldest step in flight")
        step = self._steps.popleft()
        self._rows_change()
        step.end()
        try:
            return self._outcomes(step)
        except BaseException:  # an interrupt: this step is void, and so is one that builds on its tokens
            self._lose_steps_ahead()
            self._preempt_overwritten(step)
            self._trim_all()
            raise
        finally:
            self._rows.forget_closed(step.rows)

    def drop_steps(self) -> None:
        """Collect every step in flight, for a caller that was interrupted and has no use for what they say."""
        while self._steps:
            self.collect(self._steps[0].ticket)

    def prepare(self, sequence_id: int, plan: PrefillPlan, progress: Progress, *, ahead: bool = True) -> None:
        """Let the backend compile what a row that runs alone will need, before its first step: for the pieces of the
        plan, a decode behind them and, where steps run `ahead`, a run. Reserves and runs nothing, and may be left out.
        `progress` hears of it where something is compiled."""
        prepare_steps(self._parts, self._rows.get(sequence_id), plan, progress, ahead=ahead and self.caps.run_ahead)

    def prefill(
        self, sequence_id: int, plan: PrefillPlan, on_piece: Callable[[Span], None] = lambda span: None
    ) -> RowOutcome:
        """Run the pieces of a plan from what is stored on, each started before the one ahead of it is read where the
        backend can. The last outcome, or the first error. A row that has ended already runs nothing. `on_piece` is told
        of each piece that ran."""
        row = self._rows.get(sequence_id)
        self._check_idle()
        if row.state is SequenceState.FINISHED:
            return last_outcome(row)
        starts = [span.start for span in plan.pieces]
        if row.stored not in starts:
            raise BatchShapeError(
                f"sequence {sequence_id} has {row.stored} positions, the plan's pieces start at {starts}"
            )
        most = MAX_OUTSTANDING if self._backend.caps.run_ahead else 1
        waiting, flying = deque(range(starts.index(row.stored), len(plan.pieces))), deque[tuple[Ticket, Span]]()
        outcome = RowOutcome(sequence_id)
        try:
            while (waiting or flying) and outcome.error is None:
                if (
                    waiting
                    and len(flying) < most
                    and self._reserved_piece(piece := Piece(sequence_id, plan, waiting[0]))
                ):
                    flying.append((self.submit([piece]), plan.pieces[waiting.popleft()]))
                    continue
                ticket, span = flying.popleft()
                outcome = self.collect(ticket)[0]
                if outcome.error is None:
                    on_piece(span)
        except BaseException:  # nobody hears of a piece in flight: it never was
            self._lose_steps_ahead()
            self._trim_all()
            raise
        finally:
            self.drop_steps()
        return outcome

    def step(self, sequence_ids: Listing[int]) -> list[RowOutcome]:
        """One decode step over these rows: one turn of reserve, submit, collect."""
        self._check_idle()
        return self._turn([Decode(sequence_id) for sequence_id in sequence_ids])

    def score(self, ids: np.ndarray, start: int = 0, top: int = 0) -> Scores:
        """What the model says of given ids [P]: of each behind position `start` its log-probability, and the `top` best
        at its place. Draws nothing, needs a free row and leaves none. See `mlxcel.core.score`."""
        self._check_healthy()
        self._check_idle()
        return score(self, self._backend.caps, ids, start, top)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _turn(self, parts: list[Part]) -> list[RowOutcome]:
        self.reserve(parts)
        return self.collect(self.submit(parts))

    def _reserved_piece(self, piece: Piece) -> bool:
        """False where it has to wait for the piece in flight to be read. CapacityError where there is none."""
        try:
            self.reserve([piece])
        except CapacityError:
            if not self._steps:
                raise
            return False
        return True

    def _outcomes(self, step: Step) -> list[RowOutcome]:
        if step.lost:
            return [self._resolving.drop(row) for row in step.rows]
        try:
            result = self._read(step)
        except Exception as error:
            log.debug("step %d failed", step.ticket.number, exc_info=error)
            return self._fail_step(step, as_fault(error))
        self._faults_in_a_row = 0
        outcomes = self._resolving.all(step, result)
        if self._observers:
            ticket = step.ticket
            self._observers.step_finished(
                StepReport(ticket.number, ticket.parts, tuple(outcomes), step.tokens, result.routes)
            )
        return outcomes

    def _read(self, step: Step) -> StepResult:
        if isinstance(step.handle, BackendFault):
            raise step.handle
        result = self._backend.read(step.handle)
        check_result(result, step, vocab=self._settings.vocab)
        return result

    def _trim_all(self) -> None:
        """Behind an interrupt: the KV store again counts what the rows count, and no reservation stands."""
        self._reserved = None
        self._rows.trim_all()

    def _lose_steps_ahead(self) -> None:
        for step in self._steps:
            step.lose()

    def _preempt_overwritten(self, void: Step) -> None:
        """A row whose step is void, and whose next step had been started, is taken back by two steps: that is more than
        the slack of a ring, and both copies of its recurrent state are of steps that do not count."""
        if self._kv_spec.windowed or self._kv_spec.recurrent:
            for row in void.rows:
                if row in void.followed and not row.ended:
                    self._rows.preempt(row)

    def _fail_step(self, step: Step, fault: BackendFault) -> list[RowOutcome]:
        """Rows of the step end with the fault; rows outside it go on, or start over when the KV is lost (spec E18).
        Of a run nothing is read behind the step that failed."""
        number, parts = step.ticket.number, step.ticket.parts
        for behind in self._steps:
            if behind.run == step.run:
                behind.lose()
        self._faults_in_a_row += 1
        log.warning("step %d failed (%d in a row): %s", number, self._faults_in_a_row, fault)
        outcomes = [self._resolving.drop(row) if row.ended else self._rows.fail(row, fault) for row in step.rows]
        if not fault.kv_intact:
            self._lose_steps_ahead()
            self._rows.lose_kv()
        if self._sick is None and self._faults_in_a_row >= self._settings.max_consecutive_faults:
            self._sick = EngineUnhealthy(
                f"{self._faults_in_a_row} steps failed in a row",
                hint="restart; run with -vv for the backend's own trace",
            )
            for row in self._rows:
                if not row.ended:
                    self._rows.fail(row, self._sick)
        self._observers.step_finished(StepReport(number, parts, tuple(outcomes), 0, {}, fault))
        return outcomes

    def _check(self, parts: Listing[Part], steps: int) -> tuple[list[Sequence], tuple[bool, ...]]:
        """The rows of the parts, and which of them draw."""
        rows = self._rows.get_all(parts)
        longest = self._settings.chunk if self._kv_spec.windowed else None
        drawing = check_parts(rows, parts, mixed=self._backend.caps.mixed_steps, level=self.level, longest=longest)
        for row, draw in zip(rows, drawing, strict=True):
            if row.drawing and draw and not (row.runs or self._sampler.closed(row.sampler_state)):
                raise BatchShapeError(
                    f"sequence {row.id}: its sampler must know the token in flight before the next draw",
                    hint="collect the step in flight first",
                )
        if steps != 1 and steps != self.run_length(parts):
            raise BatchShapeError(f"these parts cannot run {steps} steps together", hint="ask run_length first")
        return rows, drawing

    def _run(self, plans: list[StepPlan]) -> list[Any]:
        handles = [] if self._running is None else self._running.submit_run(plans)
        if len(handles) != len(plans):
            raise BackendFault(f"the backend takes runs of {len(plans)} steps, and started {len(handles)}")
        return handles

    def _rows_change(self) -> None:
        """A reservation stands, and `submit` looks at its parts anew."""
        if self._reserved is not None:
            self._reserved.checked = False

    def _check_idle(self) -> None:
        if self._steps:
            raise BatchShapeError(f"{len(self._steps)} steps are in flight", hint="collect them first")

    def _check_healthy(self) -> None:
        if self._shut:
            raise EngineUnhealthy("the engine is shut down", hint="open another one")
        if self._sick is not None:
            raise self._sick
