"""Many requests on one engine: the door for clients, and the threads behind it (spec 7)."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar, cast

from mlxcel.core.admission import Admission
from mlxcel.core.bind_params import cap_logprobs, check_bounds
from mlxcel.core.counters import Counters
from mlxcel.core.end_record import EndRecords
from mlxcel.core.engine import Engine
from mlxcel.core.engine_loop import EngineLoop
from mlxcel.core.errand import Errand
from mlxcel.core.inbox import Inbox
from mlxcel.core.job import Job, Row
from mlxcel.core.observe import Observers
from mlxcel.core.outbox import Outbox
from mlxcel.core.piecework import Planner, Ring
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.core.prompt_ids import check_prompt, truncate_prompt
from mlxcel.core.reply import Reply
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.row_view import RowView
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.seating import Seating
from mlxcel.core.waiting import virtual_arrival
from mlxcel.core.watchdog import Watchdog
from mlxcel.errors import EngineUnhealthy, MlxcelError, QueueFull, ShuttingDown

log = logging.getLogger("mlxcel.scheduler")

Clock = Callable[[], float]
T = TypeVar("T")

LOOK = 0.1
"""Seconds after which whoever waits for the engine's thread looks whether there still is one."""


class Scheduler:
    """Takes requests from any thread and runs them together. It drives the engine alone from `start` on, and does not
    own it: shut the engine down behind `close`.

    `busy_planner` cuts prompts while rows decode, where the chunk adapts (spec P10). `cache` None: no prompt is kept.
    Tests call `tick` instead of `start`, and have no threads then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        planner: Planner,
        settings: SchedulerSettings,
        busy_planner: Planner | None = None,
        cache: PromptCache | None = None,
        observers: Observers | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock
        self._numbers = itertools.count()
        self._counters = Counters(rows_total=engine.settings.slots)
        self._inbox = Inbox(rows=engine.settings.slots, depth=settings.max_queue_depth)
        observers = Observers(()) if observers is None else observers
        self._records = EndRecords(engine, observers, self._counters, clock)
        self._watchdog = Watchdog(settings.decode_timeout, clock, self._hangs)
        ring = Ring(engine, settings, idle=planner, busy=busy_planner or planner)
        admission = Admission(
            context=engine.settings.context, watermark=settings.watermark, preemption=settings.preemption
        )
        self._loop = EngineLoop(
            engine,
            settings=settings,
            inbox=self._inbox,
            ring=ring,
            seating=Seating(engine, cache, admission, ring, self._counters),
            cache=cache,
            records=self._records,
            counters=self._counters,
            watchdog=self._watchdog,
            clock=clock,
        )
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._over = threading.Event()  # no tick will come
        self._hanging = threading.Event()  # the watchdog gave the engine thread up
        self._draining = False
        self._drained_by: float | None = None  # when what still runs is cut off
        self._process = os.getpid()

    # --- for clients, from any thread ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> Reply:
        """Queue a request, or refuse it now: RequestError for its prompt or bounds, QueueFull, ShuttingDown,
        EngineUnhealthy. A refused one has its end records too."""
        self._check_process()
        job = self._job(request)
        self._records.accepted(len(job.rows))
        try:
            self._check(job)
            self._inbox.offer(job, self._full)
        except Exception as error:
            for row in job.rows:
                self._records.end(row, "rejected", None, error)
            raise
        return Reply(request.request_id, len(job.rows), job.outbox, lambda: self._inbox.cancel(job))

    @property
    def room(self) -> bool:
        """Whether the queue's bound would let a request in now. Who has several to submit asks first: a refusal is
        recorded."""
        return self._inbox.room

    @property
    def healthy(self) -> bool:
        """Whether a request would be taken, but for the queue's bound."""
        return self.here and self._loop.sick is None and not self._draining and self._engine.healthy

    @property
    def sick(self) -> EngineUnhealthy | None:
        """Why it will never run anything again, once that is so."""
        return self._loop.sick

    @property
    def here(self) -> bool:
        """Whether its threads are in this process: one that was forked off has a copy of everything but them, and of
        locks as they were held."""
        return os.getpid() == self._process

    def stats(self) -> Counters:
        """What was counted so far: a copy."""
        return self._counters.copy()

    def rows(self) -> list[RowView]:
        """Rows that have a place, or had one and wait for it again. To be asked by `call`, between two ticks."""
        return self._loop.views()

    def call(self, work: Callable[[], T]) -> T:
        """Have `work` called between two ticks, where engine and cache are nobody else's, and wait for what it returns.
        EngineUnhealthy while the engine's thread hangs, or is in another process."""
        self._check_process()
        if self._thread is None or self._thread is threading.current_thread():
            return work()
        errand = Errand(work)
        self._inbox.post(errand)
        while not errand.wait(LOOK):
            if self._hanging.is_set() and self._loop.sick is not None:
                raise self._loop.sick
            if self._over.is_set():
                self._thread.join()
                errand.run()
        return cast("T", errand.result())

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, warm_up: Iterable[SequenceSpec] = ()) -> None:
        """Begin to serve, on a thread of its own that first runs `warm_up` row by row (spec C62). `wait_ready` waits
        for that; requests may be queued before. Does nothing when called again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(tuple(warm_up),), name="mlxcel-engine", daemon=True)
            self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Whether it serves, waited for. EngineUnhealthy when it died before."""
        self._ready.wait(timeout)
        if self._loop.sick is not None:
            raise self._loop.sick
        return self._ready.is_set()

    def drain(self, limit: float = 0.0) -> None:
        """Take no further request; what was accepted goes on for `limit` seconds, 0: as long as it takes. Then it is
        cancelled, with ShuttingDown for its error. `join` waits for the end."""
        self._draining = True
        if limit:
            self._drained_by = self._clock() + limit
        self._inbox.close(lambda: ShuttingDown("the server is shutting down", hint="try again in a minute"))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until a drained scheduler has ended everything; whether it has."""
        if self._thread is None:
            while not self._over.is_set():
                self.tick()
        return self._over.wait(timeout)

    def close(self) -> None:
        """Cancel what runs, and end all threads. Idempotent. A thread that hangs in a step is left to itself. In a
        process that was forked off: nothing."""
        if not self.here:
            return
        self._drained_by = -math.inf
        self._draining = True
        self._inbox.close(lambda: EngineUnhealthy("the engine is closed", hint="open another one"))
        if self._thread is threading.current_thread():
            return
        self.join()
        self._watchdog.stop()
        if self._thread is not None and not self._hanging.is_set():
            self._thread.join()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the engine thread --------------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One turn, by whoever drives the scheduler: its thread, or a test that started none. Whether there was
        anything to do. An engine that fell sick is taken down here, and that is told once (spec E19)."""
        if self._over.is_set():
            return False
        try:
            if self._drained_by is not None and self._clock() >= self._drained_by:
                self._loop.leave_all()
            worked = self._loop.tick()
        except EngineUnhealthy as error:
            self._take_down(error)
            return False
        if self._draining and not worked and self._loop.idle:
            self._over.set()
        return worked

    def _run(self, warm_up: tuple[SequenceSpec, ...]) -> None:
        try:
            for spec in warm_up:
                self._loop.warm(spec)
            self._watchdog.start()
            self._ready.set()
            while not self._over.is_set():
                if not self.tick() and not self._over.is_set():
                    self._inbox.wait(self._patience())
        except BaseException as error:
            log.exception("the engine thread died")
            self._take_down(EngineUnhealthy(f"the engine thread died: {error!r}", hint="restart"))
        finally:
            self._over.set()
            self._ready.set()

    def _patience(self) -> float | None:
        """Seconds until a tick is due though no message comes, None: never."""
        due = [moment for moment in (self._loop.next_deadline(), self._drained_by) if moment is not None]
        return max(0.0, min(due) - self._clock()) if due else None

    def _take_down(self, error: EngineUnhealthy) -> None:
        """The engine is of no use any more: every client is told, everything is closed."""
        self._refuse_all(error)
        try:
            self._loop.close_all()
        except Exception as trouble:
            log.warning("the engine could not be cleared", exc_info=trouble)
        self._over.set()

    def _hangs(self, limit: float) -> None:
        """By the watchdog's thread, while the engine's is in a step (spec C36)."""
        self._hanging.set()
        self._refuse_all(EngineUnhealthy(f"no step finished for {limit:g} s", hint="restart; see --decode-timeout"))
        self._over.set()

    def _refuse_all(self, error: EngineUnhealthy) -> None:
        if self._loop.sick is None:
            log.error("the engine stops: %s", error)
        self._inbox.close(lambda: EngineUnhealthy(error.message, hint=error.hint))
        self._loop.end_all(error)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if not self.here:
            raise EngineUnhealthy(
                f"the engine runs in process {self._process}, and this one was forked off it",
                hint="load the model in each process, or start processes by spawn",
            )

    def _job(self, request: Request) -> Job:
        now, context = self._clock(), self._engine.settings.context
        lane = request.lane if self._settings.ageing else 0
        job = Job(
            request=request,
            outbox=Outbox(len(request.choices)),
            number=next(self._numbers),
            accepted=now,
            virtual=virtual_arrival(now, lane, self._settings.ageing),
            lane=lane,
            deadline=now + request.timeout if request.timeout else None,
            truncated=0,
        )
        for choice in request.choices:
            spec, job.truncated = truncate_prompt(choice, context)
            job.rows.append(Row.of(job, spec, context))
        return job

    def _check(self, job: Job) -> None:
        """What `Engine.open` and `Engine.score` would refuse is refused before the queue (spec C9)."""
        settings = self._engine.settings
        for row in job.rows:
            check_prompt(row.spec.prompt_ids, vocab=settings.vocab, context=settings.context)
            check_bounds(row.spec.params, vocab=settings.vocab, max_new=row.max_new)
            if row.spec.prompt_scores is not None:
                cap_logprobs("prompt_logprobs", row.spec.prompt_scores, settings.vocab, settings.max_logprobs)

    def _full(self, waiting: int) -> MlxcelError:
        seconds = self._records.mean_duration * (waiting + 1) / self._engine.settings.slots
        return QueueFull(waiting, retry_after=min(60, max(1, math.ceil(seconds))))
