"""What the engine did for one row, from its own step reports."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import attrs
import numpy as np

from mlxcel.core.plan import Decode, Piece, PrefillPlan, StepReport, id_bytes


@attrs.frozen
class Company:
    """Of the steps that a row was part of: the fewest and most rows that one had, and, of those that it shared, its
    lowest place among the rows, 0 being the first; None: it shared none."""

    place: int | None = None
    fewest: int = 0
    most: int = 0

    def seen(self, place: int, rows: int) -> Company:
        """With one more step."""
        places = [each for each in (self.place, place if rows > 1 else None) if each is not None]
        return Company(min(places, default=None), min(rows, self.fewest or rows), max(rows, self.most))


class RowWatch:
    """An observer that follows the row of one prompt; other rows of its steps have other prompts. What a step launches
    is counted for the step, which the row may share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a scheduler reports from its own thread
        self.follow(np.zeros(0, np.int32))

    def follow(self, prompt: np.ndarray) -> None:
        """From now on the row of this prompt, int32 [P]; what was seen before is forgotten."""
        with self._lock:
            self._ids = id_bytes(prompt)
            self._row: int | None = None
            self.plan: PrefillPlan | None = None
            self.company = Company()
            self.pieces: list[tuple[int, int, int]] = []
            self._launches: dict[str, Counter[str]] = {}

    @property
    def adopted(self) -> tuple[int, int]:
        """Positions that no piece computed."""
        return (0, self.pieces[0][0] if self.pieces else 0)

    @property
    def launches(self) -> dict[str, dict[str, int]]:
        return {phase: dict(routes) for phase, routes in self._launches.items()}

    def step_finished(self, report: StepReport) -> None:
        with self._lock:
            for part in report.parts:
                if isinstance(part, Piece) and part.plan.ids == self._ids and part.plan.draw:
                    self._saw(part)
            rows = [part.sequence_id for part in report.parts]
            if self._row not in rows:
                return
            self.company = self.company.seen(rows.index(self._row), len(rows))
            decodes = sum(isinstance(part, Decode) for part in report.parts)
            phase = "decode" if decodes == len(report.parts) else "mixed" if decodes else "prefill"
            self._launches.setdefault(phase, Counter()).update(report.routes)

    def request_finished(self, result: Any) -> None:
        """Its steps say all of it."""

    def _saw(self, part: Piece) -> None:
        span = part.plan.pieces[part.index]
        self._row, self.plan = part.sequence_id, part.plan
        self.pieces.append((span.start, span.end, span.pad))
