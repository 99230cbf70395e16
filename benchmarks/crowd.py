"""Rows of one engine that come, decode in changing company, are preempted, and go: each must say what it says alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from random_engines import Bench
from witness import Seen, alone, difference

from mlxcel.core.plan import Decode, Part, Piece, PrefillPlan, Ticket

COUNTED = ("steps", "runs", "rows", "companies", "hits", "preempted")
PIECES = 2
"""Of different rows that one step may take, beside rows that decode."""


@attrs.frozen(eq=False)
class Voice:
    """A prompt and how it is sampled, with what it says alone: more than any row of it will."""

    ids: np.ndarray
    params: dict[str, Any]
    lone: Seen

    @classmethod
    def of(cls, bench: Bench, ids: np.ndarray, tokens: int, **params: Any) -> Voice:
        return cls(ids, params, alone(bench, ids, tokens - 1, **params))


@attrs.frozen
class Habits:
    """How often what happens: probabilities of a turn, and the chunks that pieces are cut at."""

    joins: float  # a row comes, while there is room
    all_decode: float  # everybody who can takes part; else a random part of them
    ahead: float  # a step is submitted before the one before it is read
    runs: float  # steps are submitted several at a time, where the engine takes that
    preempted: float
    chunks: tuple[int, ...]
    hits: float  # of rows whose prompt begins as a kept one does


@attrs.define(eq=False)
class Row:
    id: int
    voice: Voice
    tokens: int  # to draw
    chunk: int
    drawn: int = 0
    plan: PrefillPlan | None = None  # what is still to be prefilled
    piece: int = 0
    happened: list[str] = attrs.field(factory=list)


class Crowd:
    """At most `most` rows at once. `counted` says what happened, `wrong` who said something else and what his life was
    like."""

    def __init__(self, bench: Bench, rng: np.random.Generator, habits: Habits, most: int) -> None:
        self._bench, self.rng, self._habits, self._most = bench, rng, habits, most
        self._rows: list[Row] = []
        self._kept: tuple[np.ndarray, Any] | None = None
        self._before: list[int] = []
        self.counted: Counter[str] = Counter(
            dict.fromkeys(("steps", "runs", "rows", "companies", "hits", "preempted"), 0)
        )
        self.wrong: list[str] = []

    @property
    def empty(self) -> bool:
        return not self._rows

    def keep(self, voice: Voice) -> None:
        """KV of this prompt, for rows that begin as it does."""
        bench = self._bench
        if bench.engine.shares:
            row = bench.begin(voice.ids)
            self._kept = voice.ids, bench.engine.share(row, len(voice.ids))
            bench.engine.close(row)
            bench.backend.kept.clear()

    def wants(self) -> bool:
        """Whether somebody comes now."""
        return len(self._rows) < self._most and self.rng.random() < self._habits.joins

    def join(self, voice: Voice, tokens: int) -> None:
        engine, adopted = self._bench.engine, self._adopted(voice.ids)
        spec = self._bench.spec(voice.ids, **{**voice.params, "max_tokens": tokens})
        if adopted and self._kept is not None:
            row = Row(engine.adopt(spec, self._kept[1], adopted), voice, tokens, self._chunk())
            row.happened.append(f"begins behind {adopted}")
            self.counted["hits"] += 1
        else:
            row = Row(engine.open(spec), voice, tokens, self._chunk())
        row.plan = self._bench.plan(voice.ids, adopted, chunk=row.chunk)
        self._rows.append(row)

    def turn(self) -> None:
        """Somebody may lose his KV, and a step runs, or two."""
        ready = [row for row in self._rows if row.plan is None]
        if ready and self.rng.random() < self._habits.preempted:
            self._preempt(ready.pop(int(self.rng.integers(len(ready)))))
        decoding, reading = self._chosen(ready), self._reading()
        parts: list[Part] = [Decode(row.id) for row in decoding]
        parts += [Piece(row.id, row.plan, row.piece) for row in reading if row.plan is not None]
        if not parts:
            return
        rows = [*decoding, *reading]
        company = sorted(row.id for row in rows)
        self.counted["companies"] += company != self._before
        self._before = company
        for ticket in self._submitted(rows, parts, together=not reading):
            self.counted["steps"] += 1
            for row, outcome in zip(rows, self._bench.engine.collect(ticket), strict=True):
                if outcome.error is not None:
                    raise outcome.error
                self._ran(row, outcome.token)

    def _submitted(self, rows: Sequence[Row], parts: Sequence[Part], *, together: bool) -> list[Ticket]:
        """A step, one and the next, or a run of them, if they may be `together`."""
        engine, left = self._bench.engine, min(row.tokens - row.drawn for row in rows)
        decodes = [part for part in parts if isinstance(part, Decode)]
        if together and self.rng.random() < self._habits.runs and 1 < (steps := engine.run_length(parts)) < left:
            self.counted["runs"] += 1
            engine.reserve(parts, steps)
            return list(engine.submit_run(decodes, steps))
        engine.reserve(parts)
        tickets = [engine.submit(parts)]
        if together and left > 1 and self.rng.random() < self._habits.ahead:
            engine.reserve(parts)
            tickets.append(engine.submit(parts))
        return tickets

    def end(self) -> None:
        """Whoever is still there leaves, unheard."""
        for row in self._rows:
            self._bench.engine.close(row.id)
        self._rows.clear()
        self._bench.backend.kept.clear()
        if self._kept is not None:
            self._bench.engine.release(self._kept[1])
            self._kept = None

    def _chunk(self) -> int:
        return int(self.rng.choice(self._habits.chunks))

    def _adopted(self, ids: np.ndarray) -> int:
        if self._kept is None or self.rng.random() >= self._habits.hits:
            return 0
        other = self._kept[0]
        count = min(len(ids) - 1, len(other))
        unequal = np.flatnonzero(ids[:count] != other[:count])
        most = int(unequal[0]) if len(unequal) else count
        return int(self.rng.integers(most + 1))

    def _preempt(self, row: Row) -> None:
        """It comes back by pieces over all that it has said."""
        engine = self._bench.engine
        known = engine.tokens(row.id)[:-1]
        engine.preempt(row.id)
        row.chunk = self._chunk()
        row.plan, row.piece = self._bench.plan(known, chunk=row.chunk, draw=False), 0
        row.happened.append(f"preempted at {len(known)}")
        self.counted["preempted"] += 1

    def _chosen(self, ready: Sequence[Row]) -> list[Row]:
        if not ready or self.rng.random() < self._habits.all_decode:
            return list(ready)
        count = int(self.rng.integers(1, len(ready) + 1))
        return [ready[place] for place in self.rng.permutation(len(ready))[:count]]

    def _reading(self) -> list[Row]:
        reading = [row for row in self._rows if row.plan is not None]
        return reading[: int(self.rng.integers(1, PIECES + 1))]

    def _ran(self, row: Row, token: int | None) -> None:
        if row.plan is not None:
            row.piece += 1
            if row.piece == len(row.plan.pieces):
                row.plan = None
        if token is not None:
            row.drawn += 1
            if row.drawn == row.tokens:
                self._done(row)

    def _done(self, row: Row) -> None:
        kept, engine = self._bench.backend.kept, self._bench.engine
        ids = engine.view(row.id).output
        first, lone = len(row.voice.ids), row.voice.lone.first(row.tokens)
        # Of steps that ran together there are tokens alone.
        logits = np.stack([kept.pop((row.id, first + place), own) for place, own in enumerate(lone.logits)])
        found = difference(lone, Seen(tuple(ids), logits))
        if found:
            life = ", ".join(row.happened) or "undisturbed"
            self.wrong.append(f"prompt of {first}, chunk {row.chunk}, {row.voice.params}: {found} ({life})")
        engine.close(row.id)
        self._rows.remove(row)
        self.counted["rows"] += 1
