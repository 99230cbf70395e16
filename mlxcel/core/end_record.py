"""The one end of a row: its result, told to its client, to the observers and to the counters (spec E20, E21)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mlxcel.core.counters import Counters
from mlxcel.core.engine import Engine
from mlxcel.core.events import Ended
from mlxcel.core.job import Row
from mlxcel.core.observe import Observers
from mlxcel.core.result import RequestResult, Timings, error_code

SMOOTHING = 0.1
"""Share of the newest request in the mean duration, which a refused client is told to wait by."""


class EndRecords:
    """Every row that ever was ends here once, whichever thread ends it: the engine's, the watchdog's, or that of a
    client who is refused at the door."""

    def __init__(self, engine: Engine, observers: Observers, counters: Counters, clock: Callable[[], float]) -> None:
        self._engine, self._observers, self._counters, self._clock = engine, observers, counters, clock
        self._lock = threading.RLock()  # a listener that hears of an end may ask for the next request
        self.mean_duration = 1.0
        """Seconds from the start of a row to its end, lately."""

    def accepted(self, rows: int) -> None:
        """So many rows will end."""
        with self._lock:
            self._counters.request_started_total += rows

    def end(self, row: Row, cause: str, detail: Any, error: Exception | None) -> bool:
        """Whether this was its end. The code of an error is its detail."""
        if error is not None:
            detail = error_code(error)
        result = self._result(row, cause, detail, error)
        with self._lock:
            if not row.job.outbox.end(Ended(row.spec.choice, result)):
                return False
            self._counters.request_finished_total[cause] += 1
            if row.started is not None:
                self.mean_duration += SMOOTHING * (result.timings.ended - row.started - self.mean_duration)
            self._observers.request_finished(result)
        return True

    def _result(self, row: Row, cause: str, detail: Any, error: Exception | None) -> RequestResult:
        engine, job, now = self._engine, row.job, self._clock()
        started = now if row.started is None else row.started
        return RequestResult(
            request_id=row.spec.request_id,
            prompt_ids=tuple(row.spec.prompt_ids.tolist()),
            token_ids=tuple(row.output),
            text="".join(row.text),
            cause=cause,
            detail=detail,
            timings=Timings(job.accepted, started, row.first_token, row.last_token, now),
            pieces=tuple(row.pieces),
            params=row.spec.params,
            level=engine.level,
            kv_storage=engine.kv_storage,
            prefill_chunk=engine.settings.chunk,
            reasoning="".join(row.reasoning) or None,
            origin=job.request.origin,
            warnings=job.request.warnings,
            logprobs=tuple(row.logprobs),
            prompt_logprobs=job.prompt_logprobs or (),
            truncated_tokens=job.truncated,
            cached_tokens=row.cached,
            cache_miss=None if row.cache_miss is None else row.cache_miss.value,
            error=error,
        )
