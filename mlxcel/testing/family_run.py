"""A family's logits for token ids, on reference-numpy and without an engine: the steps are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily
from mlxcel.core.kv import KVLayout, ceil_block
from mlxcel.core.plan import SamplingArrays, StepPlan
from mlxcel.core.source import NoProgress
from mlxcel_reference_numpy.context import NumpyContext
from mlxcel_reference_numpy.storage import make_storage
from mlxcel_reference_numpy.weights import Weights, load_weights

Ids = Sequence[int] | np.ndarray
"""Token ids of a row, [T] integers."""


@attrs.frozen(eq=False)
class Feed:
    """A part of a hand-made step: positions [start, end) of a row, by the row's index.

    With `overrun` these ids are fed there instead of the row's own, and what comes of it is dropped: no logits are
    kept, and the row goes on from `start`, as the engine does with a step in flight that must not count.
    """

    row: int
    start: int
    end: int
    overrun: Ids | None = None


@attrs.frozen
class Place:
    """Where a row lives: its slot, and its pages in the order of positions."""

    slot: int
    pages: tuple[int, ...]


@attrs.frozen(eq=False)
class LoadedFamily:
    """A family with a checkpoint's weights; each `run` begins with KV of its own."""

    family: ModelFamily
    config: Any
    weights: Weights

    @classmethod
    def load(cls, family: ModelFamily, checkpoint: Checkpoint) -> LoadedFamily:
        """CheckpointError as `parse_config` and the loading of weights raise it."""
        config = family.parse_config(checkpoint)
        return cls(family, config, load_weights(family.schema(config), checkpoint, NoProgress()))

    def logits(
        self, ids: Ids, cuts: Sequence[int] = (), *, context: int | None = None, chunk: int | None = None
    ) -> np.ndarray:
        """Logits float32 [T, V] of a lone row of T token ids, fed in pieces that end at `cuts` and at T."""
        return self.run([ids], [[feed] for feed in pieces_of(0, len(ids), cuts)], context=context, chunk=chunk)[0]

    def run(
        self,
        rows: Sequence[Ids],
        steps: Sequence[Sequence[Feed]],
        *,
        places: Sequence[Place] | None = None,
        page_size: int | None = None,
        context: int | None = None,
        chunk: int | None = None,
        last_only: bool = False,
        held: float = 0.0,
    ) -> list[np.ndarray]:
        """Logits float32 [T, V] of every row, fed as `steps` say: each step runs its feeds together, in their order.

        A row's feeds must continue it, and every row has one. With `last_only` the logits of each feed's last token
        alone are asked for, as the engine does, and a row has [number of its feeds, V]. `places` and `page_size` say
        where rows live, each on one big page where they are left out; `context` is the engine's bound of positions and
        `chunk` its longest piece, those of the rows and feeds themselves where they are left out. Every array of KV and
        state holds `held` before the first step.
        """
        longest = max(map(len, rows))
        # Row r on page (number of rows - 1 - r), so that no page is its row's own index by chance.
        places = places or [Place(row, (len(rows) - 1 - row,)) for row in range(len(rows))]
        layout = KVLayout(
            spec=self.family.kv_spec(self.config),
            pages=1 + max(page for place in places for page in place.pages),
            page_size=page_size or ceil_block(longest),
            paged=page_size is not None,
            slots=1 + max(place.slot for place in places),
            context=context or longest,
            chunk=chunk or max(feed.end - feed.start for feeds in steps for feed in feeds),
        )
        forward = self._start(layout, held)
        found: list[list[np.ndarray]] = [[] for _ in rows]
        turns = [0] * len(rows)
        for feeds in steps:
            plan = _plan(rows, feeds, places, layout.page_size, turns, last_only)
            logits = forward(plan)
            if len(logits) != len(plan.draw_rows):
                raise AssertionError(
                    f"forward: {len(logits)} rows of logits for {len(plan.draw_rows)} tokens that are wanted"
                )
            parts = np.split(logits, np.cumsum(np.bincount(plan.draw_rows))[:-1])
            for feed, part in zip(feeds, parts, strict=True):
                if feed.overrun is None:
                    found[feed.row].append(part)
                    turns[feed.row] += 1
        return [np.concatenate(parts) for parts in found]

    def _start(self, layout: KVLayout, held: float) -> Callable[[StepPlan], np.ndarray]:
        """Logits [R, V] of one step after the other, over KV of this layout that holds `held`."""
        storage = make_storage(layout)
        if held:
            for array in (array for layer in storage for array in layer.arrays):
                array[...] = held

        def forward(plan: StepPlan) -> np.ndarray:
            ctx = NumpyContext(plan, plan.token_ids, self.weights, storage, layout.context)
            with np.errstate(all="ignore"):  # what is not finite is found in the logits
                logits: np.ndarray = self.family.forward(ctx, self.config)
            return logits

        return forward


def pieces_of(row: int, length: int, cuts: Sequence[int] = ()) -> list[Feed]:
    """Feeds of a row of `length` tokens, one a step, that end at `cuts` and at `length`. `cuts` rise inside (0, T)."""
    return [Feed(row, start, end) for start, end in zip([0, *cuts], [*cuts, length], strict=True)]


def logits_of(
    family: ModelFamily, checkpoint: Checkpoint, ids: Ids, cuts: Sequence[int] = (), *, context: int | None = None
) -> np.ndarray:
    """Logits float32 [T, V] of a lone row of T token ids, fed in one piece, or in pieces that end at `cuts` and at T.

    `cuts` rise and lie inside (0, T). `context` is the engine's bound of positions, T where it is left out.
    CheckpointError as `parse_config` and the loading of weights raise it.
    """
    return LoadedFamily.load(family, checkpoint).logits(ids, cuts, context=context)


def logits_of_rows(
    family: ModelFamily,
    checkpoint: Checkpoint,
    rows: Sequence[Ids],
    steps: Sequence[Sequence[Feed]],
    *,
    last_only: bool = False,
    context: int | None = None,
) -> list[np.ndarray]:
    """As `LoadedFamily.run`, of a checkpoint that is read for this once."""
    return LoadedFamily.load(family, checkpoint).run(rows, steps, last_only=last_only, context=context)


def _plan(
    rows: Sequence[Ids],
    feeds: Sequence[Feed],
    places: Sequence[Place],
    page_size: int,
    turns: Sequence[int],
    last_only: bool,
) -> StepPlan:
    """One step, -1 behind each row's last page that it needs."""
    lengths = np.array([feed.end - feed.start for feed in feeds], np.int32)
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    every = np.arange(query_start[-1], dtype=np.int32)
    owner = np.repeat(np.arange(len(feeds), dtype=np.int32), lengths)
    wanted = query_start[1:] - 1 if last_only else every
    tables = [places[feed.row].pages[: -(-feed.end // page_size)] for feed in feeds]
    page_tables = np.full((len(feeds), max(map(len, tables))), -1, np.int32)
    for index, table in enumerate(tables):
        page_tables[index, : len(table)] = table
    return StepPlan(
        token_ids=np.concatenate(
            [
                np.asarray(rows[feed.row][feed.start : feed.end] if feed.overrun is None else feed.overrun, np.int32)
                for feed in feeds
            ]
        ),
        positions=np.concatenate([np.arange(feed.start, feed.end, dtype=np.int32) for feed in feeds]),
        query_start=query_start,
        seq_lens=np.array([feed.end for feed in feeds], np.int32),
        page_tables=page_tables,
        slots=np.array([places[feed.row].slot for feed in feeds], np.int32),
        state_copies=np.array([turns[feed.row] % 2 for feed in feeds], np.int32),
        sequence_ids=np.array([feed.row for feed in feeds], np.int64),
        logits_rows=wanted.astype(np.int32),
        draw_rows=owner[wanted],
        sampling=SamplingArrays((), {}),
    )
