"""Where every row of every request stands: in the queue, in a place of the engine, or at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mlxcel.core.counters import Counters
from mlxcel.core.delivery import Delivery
from mlxcel.core.end_record import EndRecords
from mlxcel.core.engine import Engine
from mlxcel.core.inbox import Inbox
from mlxcel.core.job import Job, Row, RowState
from mlxcel.core.piecework import Ring
from mlxcel.core.plan import Decode, Scores
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.core.row_view import RowView
from mlxcel.core.seating import Seating, needs_score
from mlxcel.core.sequence import SequenceState
from mlxcel.core.waiting import WaitingLine
from mlxcel.errors import CapacityError, EngineUnhealthy, MlxcelError

log = logging.getLogger("mlxcel.scheduler")


class Roster:
    """Every move of a row is a method here, so that each list agrees with the others.

    WAITING rows are in `line`, or behind the first choice of their request; `seated` rows have a slot of the engine;
    those of them that are PARKED are in `ring` until their last piece is on its way.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        inbox: Inbox,
        ring: Ring,
        seating: Seating,
        cache: PromptCache | None,
        records: EndRecords,
        counters: Counters,
        delivery: Delivery,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._inbox, self._seating, self._cache = engine, inbox, seating, cache
        self._records, self._counters, self._delivery, self._clock = records, counters, delivery, clock
        self._behind: dict[int, list[Row]] = {}  # by job, choices that wait for what the first one shares with them
        self.jobs: dict[int, Job] = {}  # by number
        self.line = WaitingLine()
        self.ring = ring
        self.seated: dict[int, Row] = {}  # by sequence id, in the order they were admitted
        self._ended: set[int] = set()  # sequence ids of these whose rows are over, until nothing of them is in flight

    # --- coming -------------------------------------------------------------------------------------------------------

    def enqueue(self, job: Job) -> None:
        self.jobs[job.number] = job
        first, *others = job.rows
        self.line.add(first)
        shares = self._cache is not None and job.request.cache_prompt
        if others and (shares or needs_score(first)):
            self._behind[job.number] = others
        else:
            for row in others:
                self.line.add(row)

    @property
    def head_fits(self) -> bool:
        """Whether the head of the queue may have a place now."""
        head = self.line.head
        return head is not None and self._seating.fits(head, self.seated.values())

    def admit(self) -> None:
        """Give places to the head of the queue as long as there are any. Nobody passes it (spec C11)."""
        while self.head_fits and (row := self.line.head) is not None:
            try:
                if not self._seating.seat(row):
                    if self.seated:
                        return
                    raise CapacityError("the KV storage has no room for one row", hint="raise --kv-cache-budget")
            except EngineUnhealthy:
                raise
            except Exception as error:
                self.end(row, "rejected" if row.sequence_id is None else "error", error=error)
                continue
            self.line.remove(row)
            self._begin(row)

    def _begin(self, row: Row) -> None:
        if row.sequence_id is None:
            raise AssertionError("a row that was seated has a sequence")
        self.seated[row.sequence_id] = row
        row.decode = Decode(row.sequence_id)
        row.state = RowState.PARKED
        if row.started is None:
            row.started = self._clock()
            self._waits_no_more(row.job)
            self._counters.prompt_tokens_total += row.prompt_length
        if not row.scoring and not row.announced:
            self._counters.prompt_tokens_cached_total += row.cached
            self._delivery.start(row)
        if row.scoring and row.prompt_length == 1:
            self.scored(row)
        elif row.max_new == 0 and not row.scoring:
            self.end(row, "max_tokens")
        else:
            self.ring.add(row)

    def _waits_no_more(self, job: Job) -> None:
        if job.waits and all(row.started is not None or row.state is RowState.ENDED for row in job.rows):
            job.waits = False
            self._inbox.count(busy=self.staying, left=1)

    @property
    def staying(self) -> int:
        """Places that are taken and do not come free by themselves: who asks for the next one does not wait."""
        return len(self.seated) - len(self._ended)

    def views(self) -> list[RowView]:
        """Of all rows that ever had a place and have not ended."""
        return [
            RowView.of(row, None if row.sequence_id not in self.seated else self._engine.slot(row.sequence_id))
            for job in self.jobs.values()
            for row in job.rows
            if row.started is not None and row.state is not RowState.ENDED
        ]

    # --- on the way ---------------------------------------------------------------------------------------------------

    def prefilled(self, row: Row) -> None:
        """Its prompt is computed: equal prompts that wait may begin with it (spec X10, C13)."""
        if self._cache is not None and row.sequence_id is not None:
            try:
                self._cache.share(self._engine, row.sequence_id, allowed=row.job.request.cache_prompt)
            except MlxcelError as error:
                log.warning("the prompt of %s was not shared", row.spec.request_id, exc_info=error)
        self._release_behind(row.job)

    def scored(self, row: Row) -> None:
        """Its prompt was scored, on an engine row of its own: it waits for the one that makes its reply."""
        prompt = row.spec.prompt_ids
        row.job.prompt_logprobs = (None, *Scores.joined(row.scores).of_tokens(prompt[1:])) if row.scores else (None,)
        self._unseat(row)
        self._wait_again(row)

    def preempt(self, row: Row, kind: str) -> None:
        """Take its KV; it waits where its arrival puts it, and goes on as if nothing had been (spec C18)."""
        if row.sequence_id is None:
            raise AssertionError("a row without a place cannot lose it")
        self._counters.preemptions_total[kind] += 1
        if row.scoring:
            self._unseat(row)
        else:
            self._engine.preempt(row.sequence_id)
            del self.seated[row.sequence_id]
        self._wait_again(row)

    def start_over(self) -> None:
        """The KV arrays were lost: the engine preempted every row that is not of the failed step (spec E18)."""
        if self._cache is not None:
            self._cache.lost()
        for number, row in list(self.seated.items()):
            if row.state is RowState.ENDED:
                continue
            view = self._engine.view(number)
            if view.error is not None:
                self.end(row, "error", error=view.error)
            elif row.scoring:
                self._unseat(row)
                self._wait_again(row)
            elif view.state is SequenceState.PREEMPTED:
                del self.seated[number]
                self._counters.preemptions_total["parked" if row.state is RowState.PARKED else "running"] += 1
                self._wait_again(row)

    def _wait_again(self, row: Row) -> None:
        if row in self.ring:
            self.ring.remove(row)
        row.forget_kv()
        row.state = RowState.WAITING
        self.line.add(row)

    def _release_behind(self, job: Job) -> None:
        for row in self._behind.pop(job.number, ()):
            if row.state is RowState.WAITING:
                self.line.add(row)

    # --- going --------------------------------------------------------------------------------------------------------

    def end(self, row: Row, cause: str, detail: Any = None, *, error: Exception | None = None) -> None:
        """The row is over: its client hears of it now, its place is free once nothing of it is in flight. What the
        client asks for next finds it counted as free."""
        if row.state is RowState.WAITING:
            self._forget_waiting(row)
        if row in self.ring:
            self.ring.remove(row)
        row.state = RowState.ENDED
        if row.sequence_id is not None and row.sequence_id in self.seated:
            self._ended.add(row.sequence_id)
            self._inbox.count(busy=self.staying)
        self._waits_no_more(row.job)
        self._records.end(row, cause, detail, error)
        self._release_behind(row.job)
        row.donates = error is None or cause == "cancelled"
        self.retire(row)
        if row.job.ended:
            self.jobs.pop(row.job.number, None)

    def retire(self, row: Row) -> None:
        """Give the KV of a row that ended to the prompt cache, or back, once nothing is in flight (spec X10, E8)."""
        if row.sequence_id is None or row.in_flight:
            return
        if self._cache is not None and row.donates and row.at and not row.scoring:
            try:
                self._cache.donate(self._engine, row.sequence_id, allowed=row.job.request.cache_prompt)
            except Exception as error:
                log.warning("the KV of %s was not kept", row.spec.request_id, exc_info=error)
        self._unseat(row)

    def forget_all(self) -> None:
        """The engine has nothing any more, and nobody is told of it."""
        self.seated.clear()
        self._ended.clear()
        self.jobs.clear()

    def _forget_waiting(self, row: Row) -> None:
        behind = self._behind.get(row.job.number, [])
        if row in behind:
            behind.remove(row)
        else:
            self.line.remove(row)

    def _unseat(self, row: Row) -> None:
        if row.sequence_id is not None:
            self._engine.close(row.sequence_id)
            self.seated.pop(row.sequence_id, None)
            self._ended.discard(row.sequence_id)
            row.sequence_id = None
