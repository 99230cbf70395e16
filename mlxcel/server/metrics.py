"""What is counted beside the scheduler's own counters: HTTP requests, times of rows, steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mlxcel.core.plan import Decode, StepReport
from mlxcel.core.result import RequestResult
from mlxcel.server.histogram import DURATION, LATENCY, ROWS, TOKENS, TTFT, Histogram

if TYPE_CHECKING:
    from mlxcel.server.record import RequestRecord

MOST_ROWS: Final = 4096
"""Rows whose last token is remembered. Those that ended from outside are pushed out by newer ones."""


class Metrics:
    """An observer of the engine, which calls it on its own thread; `request_done` is called on the event loop. Readers
    take what is there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.disconnects = 0
        self.launches: Counter[tuple[str, str]] = Counter()  # by phase and route of attention
        self.ttft, self.between, self.per_token = Histogram(TTFT), Histogram(LATENCY), Histogram(LATENCY)
        self.whole, self.queue = Histogram(DURATION), Histogram(DURATION)
        self.prefill, self.decode = Histogram(DURATION), Histogram(DURATION)
        self.step_rows, self.step_tokens = Histogram(ROWS), Histogram(TOKENS)
        self._last: dict[int, float] = {}  # by sequence, when its last token came; the newest are last

    def request_done(self, record: RequestRecord) -> None:
        """An HTTP request, whatever became of it."""
        self.requests[record.route, record.status] += 1
        self.disconnects += record.stream and record.left

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def step_finished(self, report: StepReport) -> None:
        now, last = self._clock(), self._last
        decodes = sum(type(part) is Decode for part in report.parts)
        phase = "decode" if decodes == len(report.parts) else "mixed" if decodes else "prefill"
        for route, count in report.routes.items():
            self.launches[phase, route] += count
        if report.error is None:
            self.step_rows.observe(len(report.parts))
            self.step_tokens.observe(report.tokens)
        for outcome in report.outcomes:
            before = last.pop(outcome.sequence_id, None)
            if outcome.token is None or outcome.error is not None:
                continue
            if before is not None:
                self.between.observe(now - before)
            if outcome.cause is None:
                last[outcome.sequence_id] = now
        while len(last) > MOST_ROWS:
            del last[next(iter(last))]

    def request_finished(self, result: RequestResult) -> None:
        times = result.timings
        if result.cause == "rejected":
            return
        self.whole.observe(times.ended - times.accepted)
        if times.first_token is None or times.ttft is None or times.prompt is None:
            return
        self.ttft.observe(times.ttft)
        self.queue.observe(times.started - times.accepted)
        self.prefill.observe(times.prompt)
        if times.predicted is not None:
            self.decode.observe(times.predicted)
            if (intervals := len(result.token_ids) - 1) > 0:
                self.per_token.observe(times.predicted / intervals)
