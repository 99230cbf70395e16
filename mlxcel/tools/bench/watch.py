"""What the engine does in one run, as it does it: when each token is resolved, which pieces ran, by which route."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.core.plan import Piece, id_bytes
from mlxcel.tools.bench.timing import RowTimes

if TYPE_CHECKING:
    import numpy as np

    from mlxcel.core.plan import Part, StepReport

Clock = Callable[[], int]
"""Nanoseconds, as `time.perf_counter_ns`."""


@attrs.define
class WatchedRow:
    """`pieces` are [start, end, padding] of each piece that ran, `tokens` when each token was resolved."""

    tokens: list[int] = attrs.field(factory=list)
    pieces: list[list[int]] = attrs.field(factory=list)


class StepWatch:
    """An observer of an engine. Rows are known by their prompts, which differ within a run; what is of other rows, such
    as a step that was one ahead of the end of the run before, is nobody's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # a scheduler reports from a thread of its own
        self.begin(())

    def begin(self, prompts: Sequence[np.ndarray]) -> None:
        """A run of these prompts, each int32 [P]; what was seen before is forgotten."""
        with self._lock:
            self._rows = {id_bytes(prompt): WatchedRow() for prompt in prompts}
            self._by_id: dict[int, WatchedRow] = {}
            self._launches: dict[str, Counter[str]] = {}

    def step_finished(self, report: StepReport) -> None:
        now = self._clock()
        with self._lock:
            fed = False
            for part, outcome in zip(report.parts, report.outcomes, strict=True):
                row = self._row(part)
                if row is None or outcome.error is not None:
                    continue
                if isinstance(part, Piece):
                    span = part.plan.pieces[part.index]
                    row.pieces.append([span.start, span.end, span.pad])
                    fed = True
                if outcome.token is not None and outcome.appended:
                    row.tokens.append(now)
                    fed = True
            if fed:
                self._launches.setdefault(_phase(report.parts), Counter()).update(report.routes)

    def request_finished(self, result: Any) -> None:
        """The client hears of that."""

    def rows(self) -> list[WatchedRow]:
        """In the order of the prompts."""
        with self._lock:
            return list(self._rows.values())

    def launches(self) -> Mapping[str, Mapping[str, int]]:
        """Layer calls by phase and attention route."""
        with self._lock:
            return {phase: dict(routes) for phase, routes in self._launches.items()}

    def _row(self, part: Part) -> WatchedRow | None:
        if isinstance(part, Piece) and (known := self._rows.get(part.plan.ids)) is not None:
            self._by_id[part.sequence_id] = known
        return self._by_id.get(part.sequence_id)


def times(rows: Sequence[WatchedRow], handed: int) -> list[RowTimes]:
    """Of rows whose ids were handed to the client at `handed`."""
    return [RowTimes(handed, tuple(row.tokens)) for row in rows]


def _phase(parts: Sequence[Part]) -> str:
    pieces = sum(isinstance(part, Piece) for part in parts)
    return "decode" if not pieces else "prefill" if pieces == len(parts) else "mixed"
