"""What a step lets go of, for the record of a row and for its client (spec C15)."""

from __future__ import annotations

from collections.abc import Callable

from mlxcel.core.counters import Counters
from mlxcel.core.events import Delta, Progressed, Started
from mlxcel.core.job import Job, Row
from mlxcel.core.plan import RowOutcome, TokenLogprobs
from mlxcel.errors import MlxcelError, SlowClient


class Delivery:
    """Puts events into outboxes and never waits. `leave(job, why)` is called of a client that does not keep up, or
    whose listener is gone."""

    def __init__(self, counters: Counters, leave: Callable[[Job, MlxcelError | None], None]) -> None:
        self._counters, self._leave = counters, leave

    def start(self, row: Row) -> None:
        """Once a row, at its first place."""
        row.announced = True
        job = row.job
        reads = job.outbox.put(Started(row.spec.choice, row.cached))
        if before := job.request.before:
            row.text.append(before)
            reads = job.outbox.put(Delta(row.spec.choice, text=before)) and reads
        if not reads:
            self._lost(job)

    def progress(self, row: Row) -> None:
        """Of a prompt, behind its newest piece, where the client wants to hear of it."""
        if row.job.request.progress and not row.job.outbox.put(Progressed(row.spec.choice, row.pieces[-1].end)):
            self._lost(row.job)

    def outcome(self, row: Row, outcome: RowOutcome, now: float) -> None:
        """One token, or the tail of a row that ended; `now` is when it was read."""
        token, text, reasoning = outcome.token, outcome.text, outcome.reasoning
        if token is not None and row.first_token is None:
            row.first_token = now
        ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if outcome.appended and token is not None:
            row.last_token = now
            row.output.append(token)
            ids = (token,)
            self._counters.generation_tokens_total += 1
            if outcome.logprobs is not None:
                logprobs = (outcome.logprobs,)
                row.logprobs += logprobs
        if text:
            row.text.append(text)
        if reasoning:
            row.reasoning.append(reasoning)
        if ids or text or reasoning:
            job = row.job
            if not job.outbox.put(Delta(row.spec.choice, text, reasoning, ids, logprobs)):
                self._lost(job)

    def _lost(self, job: Job) -> None:
        """Its client does not keep up, or is gone."""
        if job.left:
            return
        job.left = True
        why = None
        if job.outbox.slow:
            self._counters.slow_clients_total += 1
            why = SlowClient("the client left too much of its reply unread", hint="read events as they come")
        self._leave(job, why)
