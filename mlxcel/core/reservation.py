"""Positions for a step, and whose KV is given up where they are short (spec C21 to C24)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from mlxcel.core.counters import Counters
from mlxcel.core.engine import Engine
from mlxcel.core.job import Row, RowState
from mlxcel.core.parts import part_length
from mlxcel.core.plan import Part, Piece
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.errors import CapacityError, EngineUnhealthy, MlxcelError

Work = tuple[Row, Part]


def pages(positions: int, page_size: int) -> int:
    return -(-positions // page_size)


@attrs.frozen
class Remedies:
    """What may be done to rows: `preempt(row, kind)`, `fail(row, error)`."""

    preempt: Callable[[Row, str], None]
    fail: Callable[[Row, MlxcelError], None]


class Reservation:
    """Reserves as much of a step as can be had. Called with no step in flight, so that every row may be preempted."""

    def __init__(
        self,
        engine: Engine,
        cache: PromptCache | None,
        counters: Counters,
        remedies: Remedies,
        *,
        preemption: bool,
    ) -> None:
        self._engine, self._cache, self._counters, self._remedies = engine, cache, counters, remedies
        self._preemption = preemption

    def hold(self, work: list[Work], seated: Iterable[Row]) -> list[Work]:
        """The part of `work` that is reserved when this returns, in its order; where it is none of it, rows gave KV up
        and the next turn finds another state. `seated` are all rows that hold KV."""
        if not work:
            return []
        try:
            if self._try(work) or self._from_cache(work):
                return work
        except EngineUnhealthy:
            raise
        except MlxcelError:  # a part that no step can take: a planner's mistake, which is its row's alone
            work = self._without_the_wrong(work)
            return self.hold(work, seated)
        return self._by_rank(work, list(seated))

    def _try(self, work: list[Work]) -> bool:
        try:
            self._engine.reserve([part for _, part in work])
        except CapacityError:
            return False
        return True

    def _without_the_wrong(self, work: list[Work]) -> list[Work]:
        right = []
        for row, part in work:
            try:
                self._engine.reserve([part])
            except CapacityError:
                right.append((row, part))
            except EngineUnhealthy:
                raise
            except MlxcelError as error:
                self._remedies.fail(row, error)
            else:
                right.append((row, part))
        if len(right) == len(work):
            raise AssertionError("each part is right alone, together they are not")
        return right

    def _from_cache(self, work: list[Work]) -> bool:
        """Pages that the prompt cache alone holds, until these do or there are none."""
        for phase in {"piece" if isinstance(part, Piece) else "decode" for _, part in work}:
            self._counters.kv_reserve_failures_total[phase] += 1
        while self._reclaimed(work):
            if self._try(work):
                return True
        return False

    def _reclaimed(self, work: list[Work]) -> bool:
        """Whether the prompt cache let go of a page that `work` lacks."""
        if self._cache is None or not self._cache.reclaim(self._shortage(work)):
            return False
        self._counters.reclaims_total["cache"] += 1
        return True

    def _cache_forgets(self) -> bool:
        """For a lone row: what the cache still holds is the row's own pages, and a page of two holders must be copied
        before it is written to. Whether there was anything."""
        return self._cache is not None and self._cache.reset().entries > 0

    def _shortage(self, work: list[Work]) -> int:
        """Pages that `work` lacks, at least 1; a shared tail that must be copied is not counted."""
        stats = self._engine.kv_stats
        size = stats.page_size
        wanted = sum(pages(row.at + part_length(part), size) - pages(row.at, size) for row, part in work)
        return max(1, wanted - stats.free)

    def _by_rank(self, work: list[Work], seated: list[Row]) -> list[Work]:
        """The first in rank gets its pages first, and takes them from later ones."""
        gone: set[int] = set()
        kept: list[Work] = []
        for row, part in sorted(work, key=lambda each: each[0].rank):
            if id(row) in gone:
                continue
            while not self._try([*kept, (row, part)]):
                if self._reclaimed([*kept, (row, part)]):  # a victim shared pages with the cache
                    continue
                others = [other for other in seated if id(other) not in gone and other is not row]
                victim = self._victim(row, part, others, self._shortage([*kept, (row, part)]))
                if victim is None:
                    if not others and self._cache_forgets():
                        continue
                    self._go_without(row, part, others, gone)
                    break
                self._preempt(victim, gone)
            else:
                kept.append((row, part))
        held = {id(row) for row, _ in kept}
        work = [each for each in work if id(each[0]) in held]
        return work if work and self._try(work) else []

    def _victim(self, row: Row, part: Part, others: list[Row], shortage: int) -> Row | None:
        """Of the rows that come later: a parked prefill, the newest first; else the lowest lane, then the fewest output
        tokens, then the newest. One without pages only where none has any. A piece, which can wait, takes nothing where
        all of them together would not be enough: they would be preempted in vain, turn after turn."""
        later = [other for other in others if other.rank > row.rank] if self._preemption else []
        size = self._engine.kv_stats.page_size
        if isinstance(part, Piece) and sum(pages(other.at, size) for other in later) < shortage:
            return None
        later = [other for other in later if other.at] or later
        parked = [other for other in later if other.state is RowState.PARKED]
        if parked:
            return max(parked, key=lambda other: other.sequence_id or 0)
        key = lambda other: (other.job.lane, -len(other.output), other.sequence_id or 0)  # noqa: E731
        return max(later, key=key, default=None)

    def _preempt(self, row: Row, gone: set[int]) -> None:
        kind = "parked" if row.state is RowState.PARKED else "running"
        gone.add(id(row))
        self._counters.reclaims_total[kind] += 1
        self._remedies.preempt(row, kind)

    def _go_without(self, row: Row, part: Part, others: list[Row], gone: set[int]) -> None:
        """Nobody comes later. A piece waits for a tick with more room, a decode gives its own KV up."""
        if not others:
            gone.add(id(row))
            needs = row.at + part_length(part)
            self._remedies.fail(row, CapacityError(f"a lone row of {needs} positions does not fit into the KV storage"))
        elif isinstance(part, Piece) or not self._preemption:
            self._counters.reclaims_total["left_out"] += 1
        else:
            self._preempt(row, gone)
