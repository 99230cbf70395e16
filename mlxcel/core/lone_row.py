"""One row that decodes by itself, a step ahead of the one that is read where that can be."""

from __future__ import annotations

from collections import deque

from mlxcel.core.engine import Engine
from mlxcel.core.plan import Decode, RowOutcome, Ticket
from mlxcel.errors import CapacityError


class LoneRow:
    """Steps of a row whose prompt has run. What is read never depends on what was started ahead (spec C51, C52)."""

    def __init__(self, engine: Engine, sequence_id: int, *, run_ahead: bool = True) -> None:
        view = engine.view(sequence_id)
        self._engine, self._parts = engine, (Decode(sequence_id),)
        self._run_ahead = run_ahead and engine.caps.run_ahead
        self._draws_left = view.max_new - len(view.output)
        self._in_flight: deque[Ticket] = deque()

    def step(self) -> RowOutcome:
        """The next token, or how the row ended."""
        if not self._in_flight:
            self._engine.reserve(self._parts)
            self._start()
        if self._run_ahead and self._draws_left > 0 and self._engine.closed(self._parts[0].sequence_id):
            self._start_ahead()
        outcome = self._engine.collect(self._in_flight[0])[0]
        self._in_flight.popleft()
        return outcome

    def drop(self) -> None:
        """Wait for what is in flight; it counts for nothing. The row has ended, or was closed."""
        self._in_flight.clear()
        self._engine.drop_steps()

    def _start(self) -> None:
        self._in_flight.append(self._engine.submit(self._parts))
        self._draws_left -= 1

    def _start_ahead(self) -> None:
        try:
            self._engine.reserve(self._parts)
        except CapacityError:
            return  # it may fit, or not, once the step in flight has been read
        self._start()
