"""Rows and parts into one StepPlan: the only place where rows become flat arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Listing
from typing import Protocol

import numpy as np

from mlxcel.core.parts import scoring
from mlxcel.core.plan import CARRY, Part, Piece, SamplingArrays, StepPlan
from mlxcel.core.sampling import Sampler
from mlxcel.core.sequence import Sequence
from mlxcel.errors import CapacityError

PageCopy = tuple[int, int, int]


class PageTables(Protocol):
    """What packing asks of a KV store, as `KVStore` has it."""

    @property
    def name(self) -> str: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    def page_table(self, sequence_id: int) -> np.ndarray: ...


def pack_step(
    rows: Listing[Sequence],
    parts: Listing[Part],
    lengths: Listing[int],
    drawing: Listing[bool],
    copies: Listing[PageCopy],
    *,
    kv: PageTables,
    sampler: Sampler,
    closed: bool = False,
) -> StepPlan:
    """One forward over S parts of `lengths` tokens, R of them `drawing`, behind the page `copies` that it needs.
    Tokens of a row are contiguous, rows in the order given; `closed` as in `Sampler.pack`. Arrays are new, and each is
    made at once: this runs between two steps of the device."""
    at = [row.stored + row.fed for row in rows]
    ends = [start + length for start, length in zip(at, lengths, strict=True)]
    pieces = [isinstance(part, Piece) for part in parts]
    positions = starts = np.array(at, np.int32)
    query_start = np.arange(len(rows) + 1, dtype=np.int32)
    if sum(lengths) != len(rows):
        np.cumsum(lengths, out=query_start[1:])
        positions = np.repeat(starts - query_start[:-1], lengths)
        positions += np.arange(len(positions), dtype=np.int32)
    logits_rows, draw_rows, sampling = _asked(rows, parts, drawing, query_start, ends, sampler, closed)
    return StepPlan(
        token_ids=_token_ids(rows, parts, at, query_start),
        positions=positions,
        query_start=query_start,
        seq_lens=np.array(ends, np.int32),
        page_tables=_page_tables(rows, ends, kv),
        slots=np.array([row.slot for row in rows], np.int32),
        state_copies=np.array([(row.steps + row.ahead) % 2 for row in rows], np.int32),
        sequence_ids=np.array([row.id for row in rows], np.int64),
        logits_rows=logits_rows,
        draw_rows=draw_rows,
        sampling=sampling,
        page_copies=np.array(copies, np.int32) if copies else np.zeros((0, 3), np.int32),
        pieces=np.array(pieces, np.bool_),
        scores=scoring(parts[0]) is not None,
    )


def pack_behind(
    first: StepPlan, rows: Listing[Sequence], steps: int, *, sampler: Sampler, closed: bool = False
) -> list[StepPlan]:
    """The other plans of a run of `steps` decodes, behind the `first`, whose pages hold all of them: as `pack_step`
    would make them once the one before was in flight. They share its arrays but for what moves: tokens, which the
    device alone will know, and positions."""
    states, pending = [row.sampler_state for row in rows], [True] * len(rows)
    token_ids, copies = np.full(len(rows), CARRY, np.int32), np.zeros((0, 3), np.int32)
    plans = []
    for behind in range(1, steps):
        ends = first.seq_lens + np.int32(behind)
        plan = StepPlan(
            token_ids=token_ids,
            positions=first.positions + np.int32(behind),
            query_start=first.query_start,
            seq_lens=ends,
            page_tables=first.page_tables,
            slots=first.slots,
            state_copies=(first.state_copies + behind) % 2,
            sequence_ids=first.sequence_ids,
            logits_rows=first.logits_rows,
            draw_rows=first.draw_rows,
            sampling=sampler.pack(states, ends.tolist(), pending, closed=closed),
            page_copies=copies,
            pieces=first.pieces,
            scores=False,
        )
        plans.append(plan)
    return plans


def _token_ids(
    rows: Listing[Sequence], parts: Listing[Part], starts: Listing[int], query_start: np.ndarray
) -> np.ndarray:
    """int32 [T] that the parts feed. The newest token of a row whose draw is in flight is known to the device alone."""
    first = []
    pieces = []
    for place, (row, part, at) in enumerate(zip(rows, parts, starts, strict=True)):
        if isinstance(part, Piece):
            pieces.append((place, part))
            first.append(CARRY)  # until its ids are written
        else:
            behind = at - row.prompt_length
            first.append(row.output[behind] if behind < len(row.output) else CARRY)
    if not pieces:
        return np.array(first, np.int32)
    fed = np.empty(query_start[-1], np.int32)
    fed[query_start[:-1]] = first
    for place, part in pieces:
        fed[query_start[place] : query_start[place + 1]] = part.plan.token_ids(part.index)
    return fed


def _asked(
    rows: Listing[Sequence],
    parts: Listing[Part],
    drawing: Listing[bool],
    query_start: np.ndarray,
    ends: Listing[int],
    sampler: Sampler,
    closed: bool,
) -> tuple[np.ndarray, np.ndarray, SamplingArrays]:
    """Where logits are asked for, int32 [R] of the T tokens and int32 [R] of the S rows, and what is made of them: the
    last token of each row that draws, or the positions that a part, alone in its step, scores."""
    if (asked := scoring(parts[0])) is not None:
        count, first = len(asked.positions), asked.positions.start
        behind = rows[0].tokens(first + 1, first + 1 + count)
        logits_rows = np.arange(count, dtype=np.int32) + np.int32(first - rows[0].stored - rows[0].fed)
        return logits_rows, np.zeros(count, np.int32), sampler.pack_scores(behind, asked.top)
    draw_rows = np.array([place for place, draw in enumerate(drawing) if draw], np.int32)
    drawn = [row for row, draw in zip(rows, drawing, strict=True) if draw]
    sampling = sampler.pack(
        [row.sampler_state for row in drawn],
        [end for end, draw in zip(ends, drawing, strict=True) if draw],
        [row.drawing > 0 for row in drawn],
        closed=closed,
    )
    return query_start[draw_rows + 1] - 1, draw_rows, sampling


def _page_tables(rows: Listing[Sequence], ends: Listing[int], kv: PageTables) -> np.ndarray:
    """int32 [S, P] of rows that will hold the positions before `ends` (spec E5), -1 behind a row's last page. A wrong
    page would be written to another row."""
    size = kv.page_size
    tables = [kv.page_table(row.id) for row in rows]
    held = list(map(len, tables))
    pages = np.concatenate(tables)
    short = any(map(operator.lt, [count * size for count in held], ends))
    if short or np.minimum.reduce(pages) < 0 or np.maximum.reduce(pages) >= kv.num_pages:
        raise _wrong_table(rows, tables, ends, kv)
    most = max(held)
    if len(pages) == len(rows) * most:
        return pages.reshape(len(rows), most).astype(np.int32, copy=False)
    packed = np.full((len(rows), most), -1, np.int32)
    for row, table in zip(packed, tables, strict=True):
        row[: len(table)] = table
    return packed


def _wrong_table(
    rows: Listing[Sequence], tables: Listing[np.ndarray], ends: Listing[int], kv: PageTables
) -> CapacityError:
    """What is said of the first row whose table is of no use."""
    row, table, length = next(
        (row, table, length)
        for row, table, length in zip(rows, tables, ends, strict=True)
        if len(table) * kv.page_size < length or table.min() < 0 or table.max() >= kv.num_pages
    )
    return CapacityError(
        f"sequence {row.id}: the KV store {kv.name!r} gives {length} positions the pages {table.tolist()}, "
        f"of {kv.num_pages} pages of {kv.page_size}"
    )
