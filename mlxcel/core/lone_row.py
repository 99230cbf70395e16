"""One row that decodes by itself, ahead of the step that is read where that can be."""

from __future__ import annotations

from collections import deque

from mlxcel.core.engine import Engine
from mlxcel.core.plan import Decode, RowOutcome, Ticket
from mlxcel.errors import CapacityError


class LoneRow:
    """Steps of a row whose prompt has run. What is read never depends on what was started ahead (spec C52)."""

    def __init__(self, engine: Engine, sequence_id: int, *, run_ahead: bool = True) -> None:
        view = engine.view(sequence_id)
        self._engine, self._parts = engine, (Decode(sequence_id),)
        self._run_ahead = run_ahead and engine.caps.run_ahead
        self._draws_left = view.max_new - len(view.output)
        self._in_flight: deque[deque[Ticket]] = deque()  # each of them what was submitted together

    def step(self) -> RowOutcome:
        """The next token, or how the row ended."""
        if not self._in_flight:
            self._engine.reserve(self._parts)
            self._start(1)
        if len(self._in_flight) == 1 and self._may_start_ahead():
            self._start_ahead()
        oldest = self._in_flight[0]
        outcome = self._engine.collect(oldest[0])[0]
        oldest.popleft()
        if not oldest:
            self._in_flight.popleft()
        return outcome

    def drop(self) -> None:
        """Wait for what is in flight; it counts for nothing. The row has ended, or was closed."""
        self._in_flight.clear()
        self._engine.drop_steps()

    def _may_start_ahead(self) -> bool:
        return self._run_ahead and self._draws_left > 0 and self._engine.closed(self._parts[0].sequence_id)

    def _start(self, steps: int) -> None:
        together = (self._engine.submit(self._parts),) if steps == 1 else self._engine.submit_run(self._parts, steps)
        self._in_flight.append(deque(together))
        self._draws_left -= steps

    def _start_ahead(self) -> None:
        longest = self._engine.run_length(self._parts)
        for steps in (longest, 1) if longest > 1 else (1,):
            try:
                self._engine.reserve(self._parts, steps)
            except CapacityError:
                continue  # fewer may fit now, or one once the step in flight has been read
            self._start(steps)
            return
