"""Where the head of the queue gets its engine row: a new one, one that was preempted, or one that scores its prompt."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mlxcel.core import score
from mlxcel.core.admission import Admission, Need
from mlxcel.core.counters import Counters
from mlxcel.core.engine import Engine
from mlxcel.core.job import Row
from mlxcel.core.kv import KVStats
from mlxcel.core.params import SamplingParams
from mlxcel.core.piecework import Ring
from mlxcel.core.prefix import Reject
from mlxcel.core.prompt_cache import Match, PromptCache
from mlxcel.core.request import SequenceSpec
from mlxcel.errors import CapacityError


def needs_score(row: Row) -> bool:
    """Whether its prompt is to be scored before it begins (spec P5): once for all choices of a request."""
    return row.spec.prompt_scores is not None and row.job.prompt_logprobs is None


class Seating:
    """Decides whether a row may begin, and gives it its place (spec C10, C11)."""

    def __init__(
        self, engine: Engine, cache: PromptCache | None, admission: Admission, ring: Ring, counters: Counters
    ) -> None:
        self._engine, self._cache, self._admission, self._ring = engine, cache, admission, ring
        self._counters = counters
        self._refused: tuple[Row, KVStats] | None = None

    def fits(self, row: Row, seated: Collection[Row]) -> bool:
        """Whether there is a slot and there are pages. With nobody else to wait for it always is: what then is short is
        the row's own error."""
        if not seated:
            return True
        if len(seated) >= self._engine.settings.slots:
            return False
        stats = self._engine.kv_stats
        if self._refused is not None and self._refused[0] is row and self._refused[1] == stats:
            return False
        match = self._match(row)
        pages = 0 if match.prefix is None else len(match.prefix.pages)
        need = Need(
            positions=self._ring.first(row, match.length, any(other.can_decode for other in seated)),
            capacity=row.prompt_length + row.max_new,
            adopted=match.length,
            adopted_pages=min(pages, -(-match.length // stats.page_size)),
        )
        if self._admission.fits(need, stats, seated):
            return True
        self._counters.kv_reserve_failures_total["admission"] += 1
        self._refused = (row, stats)
        return False

    def seat(self, row: Row) -> bool:
        """Give it an engine row. False when there was no room after all; raises what the engine refuses it with."""
        while True:
            try:
                match = self._take(row)
                break
            except CapacityError:
                if self._cache is None or not self._cache.reclaim(1):
                    return False
                self._counters.reclaims_total["cache"] += 1
        row.at, row.adopted_prefilled = match.length, match.prefilled
        if row.started is None:
            row.cache_miss = match.reject
        self._refused = None
        return True

    def _match(self, row: Row) -> Match:
        if self._cache is None or needs_score(row):
            return Match()
        known = self._known(row) if row.sequence_id is not None else None
        return self._cache.match(row.spec, known, allowed=row.job.request.cache_prompt)

    def _take(self, row: Row) -> Match:
        engine, cache, allowed = self._engine, self._cache, row.job.request.cache_prompt
        if needs_score(row):
            params = SamplingParams(temperature=0, max_tokens=1)
            row.sequence_id = engine.open(SequenceSpec(score.REQUEST_ID, row.spec.prompt_ids, params))
            row.scoring = True
            return Match()
        if row.sequence_id is None:
            if cache is None:
                row.sequence_id = engine.open(row.spec)
                return Match(reject=Reject.DISABLED)
            row.sequence_id, match = cache.open(engine, row.spec, allowed=allowed)
            row.cached = match.length
            return match
        if cache is None:
            engine.resume(row.sequence_id)
            return Match()
        return cache.resume(engine, row.sequence_id, allowed=allowed)

    @staticmethod
    def _known(row: Row) -> np.ndarray:
        """int32 ids whose KV a resumed row needs: all but the newest, or the prompt where nothing was drawn."""
        return np.concatenate([row.spec.prompt_ids, np.asarray(row.output[:-1], np.int32)])
