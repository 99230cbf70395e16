"""A family's logits for token ids, on reference-numpy and without an engine: the steps are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily
from mlxcel.core.kv import KVLayout, ceil_block
from mlxcel.core.plan import SamplingArrays, StepPlan
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Drawn
from mlxcel.core.source import NoProgress
from mlxcel_reference_numpy.backend import NumpyBackend

Ids = Sequence[int] | np.ndarray
"""Token ids of a row, [T] integers."""


@attrs.frozen
class Feed:
    """A part of a hand-made step: positions [start, end) of a row, by the row's index."""

    row: int
    start: int
    end: int


class _Recorder:
    """A sampler that draws nothing and keeps the logits it is shown."""

    name = "recorder"
    stage_order: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.logits = np.empty((0, 0), np.float32)

    def open(self, spec: SequenceSpec) -> None:
        """No row has state."""

    def pack(self, states: Sequence[Any], positions: Sequence[int]) -> SamplingArrays:
        return SamplingArrays((), {})

    def draw(self, xp: Any, logits: np.ndarray, sampling: SamplingArrays) -> Drawn:
        self.logits = np.array(logits)
        none = np.zeros(len(logits), np.int32)
        return Drawn(none, none, None, None, None)

    def commit(self, state: Any, token: int) -> None:
        """Nothing was drawn."""


def logits_of(
    family: ModelFamily, checkpoint: Checkpoint, ids: Ids, cuts: Sequence[int] = (), *, context: int | None = None
) -> np.ndarray:
    """Logits float32 [T, V] of a lone row of T token ids, fed in one piece, or in pieces that end at `cuts` and at T.

    `cuts` rise and lie inside (0, T). `context` is the engine's bound of positions, T where it is left out.
    CheckpointError as `parse_config` and the loading of weights raise it.
    """
    ends = [*cuts, len(ids)]
    steps = [[Feed(0, start, end)] for start, end in zip([0, *cuts], ends, strict=True)]
    return logits_of_rows(family, checkpoint, [ids], steps, context=context)[0]


def logits_of_rows(
    family: ModelFamily,
    checkpoint: Checkpoint,
    rows: Sequence[Ids],
    steps: Sequence[Sequence[Feed]],
    *,
    last_only: bool = False,
    context: int | None = None,
) -> list[np.ndarray]:
    """Logits float32 [T, V] of every row, fed as `steps` say: each step runs its feeds together, in their order.

    A row's feeds must continue it, and every row has one. With `last_only` the logits of each feed's last token alone
    are asked for, as the engine does, and a row has [number of its feeds, V].
    """
    config = family.parse_config(checkpoint)
    backend, recorder = NumpyBackend(), _Recorder()
    backend.load(family, config, checkpoint, NoProgress())
    longest = max(map(len, rows))
    layout = KVLayout(
        spec=family.kv_spec(config),
        pages=len(rows),
        page_size=ceil_block(longest),
        paged=False,
        slots=len(rows),
        context=context or longest,
        chunk=max(feed.end - feed.start for feeds in steps for feed in feeds),
    )
    backend.start(layout, recorder)
    found: list[list[np.ndarray]] = [[] for _ in rows]
    turns = np.zeros(len(rows), np.int32)
    for feeds in steps:
        plan = _plan(rows, feeds, last_only, turns)
        turns[plan.slots] += 1
        backend.submit(plan)
        if len(recorder.logits) != len(plan.draw_rows):
            raise AssertionError(
                f"forward: {len(recorder.logits)} rows of logits for {len(plan.draw_rows)} tokens that are wanted"
            )
        for feed, logits in enumerate(np.split(recorder.logits, np.cumsum(np.bincount(plan.draw_rows))[:-1])):
            found[feeds[feed].row].append(logits)
    return [np.concatenate(parts) for parts in found]


def _plan(rows: Sequence[Ids], feeds: Sequence[Feed], last_only: bool, turns: np.ndarray) -> StepPlan:
    """One step. Row r lives on page (number of rows - 1 - r), so that no page is its row's own index by chance."""
    lengths = np.array([feed.end - feed.start for feed in feeds], np.int32)
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    every = np.arange(query_start[-1], dtype=np.int32)
    owner = np.repeat(np.arange(len(feeds), dtype=np.int32), lengths)
    wanted = query_start[1:] - 1 if last_only else every
    slots = np.array([feed.row for feed in feeds], np.int32)
    return StepPlan(
        token_ids=np.concatenate([np.asarray(rows[feed.row][feed.start : feed.end], np.int32) for feed in feeds]),
        positions=np.concatenate([np.arange(feed.start, feed.end, dtype=np.int32) for feed in feeds]),
        query_start=query_start,
        seq_lens=np.array([feed.end for feed in feeds], np.int32),
        page_tables=(len(rows) - 1 - slots)[:, None].astype(np.int32),
        slots=slots,
        state_copies=turns[slots] % 2,
        sequence_ids=slots.astype(np.int64),
        logits_rows=wanted.astype(np.int32),
        draw_rows=owner[wanted],
        sampling=SamplingArrays((), {}),
    )
