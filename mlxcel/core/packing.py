"""Rows and parts into one StepPlan: the only place where rows become flat arrays."""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np

from mlxcel.core.kv import KVStore
from mlxcel.core.parts import scoring
from mlxcel.core.plan import CARRY, Decode, Part, SamplingArrays, StepPlan
from mlxcel.core.sampling import Sampler
from mlxcel.core.sequence import Sequence
from mlxcel.errors import CapacityError


def pack_step(
    rows: Listing[Sequence], parts: Listing[Part], drawing: Listing[bool], *, kv: KVStore, sampler: Sampler
) -> StepPlan:
    """One forward over S parts, T tokens, R drawing rows. Tokens of a row are contiguous, rows in the order given."""
    tokens = [_token_ids(row, part) for row, part in zip(rows, parts, strict=True)]
    starts = [row.stored + row.fed for row in rows]
    query_start = np.cumsum([0, *(len(ids) for ids in tokens)], dtype=np.int32)
    seq_lens = np.array([start + len(ids) for start, ids in zip(starts, tokens, strict=True)], np.int32)
    tables = [_page_table(row, int(length), kv) for row, length in zip(rows, seq_lens, strict=True)]
    page_tables = np.full((len(rows), max(len(table) for table in tables)), -1, np.int32)
    for place, table in enumerate(tables):
        page_tables[place, : len(table)] = table
    logits_rows, draw_rows, sampling = _asked(rows, parts, drawing, query_start, seq_lens, sampler)
    return StepPlan(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(
            [np.arange(start, start + len(ids), dtype=np.int32) for start, ids in zip(starts, tokens, strict=True)]
        ),
        query_start=query_start,
        seq_lens=seq_lens,
        page_tables=page_tables,
        slots=np.array([row.slot for row in rows], np.int32),
        state_copies=np.array([(row.steps + row.ahead) % 2 for row in rows], np.int32),
        sequence_ids=np.array([row.id for row in rows], np.int64),
        logits_rows=logits_rows,
        draw_rows=draw_rows,
        sampling=sampling,
        page_copies=_page_copies(rows, kv),
    )


def _asked(
    rows: Listing[Sequence],
    parts: Listing[Part],
    drawing: Listing[bool],
    query_start: np.ndarray,
    seq_lens: np.ndarray,
    sampler: Sampler,
) -> tuple[np.ndarray, np.ndarray, SamplingArrays]:
    """Where logits are asked for, int32 [R] of the T tokens and int32 [R] of the S rows, and what is made of them: the
    last token of each row that draws, or the positions that a part, alone in its step, scores."""
    if (asked := scoring(parts[0])) is not None:
        count, first = len(asked.positions), asked.positions.start
        behind = rows[0].tokens(first + 1, first + 1 + count)
        logits_rows = np.arange(count, dtype=np.int32) + np.int32(first - rows[0].stored - rows[0].fed)
        return logits_rows, np.zeros(count, np.int32), sampler.pack_scores(behind, asked.top)
    draw_rows = np.flatnonzero(np.asarray(drawing, bool)).astype(np.int32)
    sampling = sampler.pack(
        [rows[int(r)].sampler_state for r in draw_rows],
        [int(seq_lens[r]) for r in draw_rows],
        [rows[int(r)].drawing > 0 for r in draw_rows],
    )
    return query_start[1:][draw_rows] - 1, draw_rows, sampling


def _page_copies(rows: Listing[Sequence], kv: KVStore) -> np.ndarray:
    """int32 [N, 3] of the rows whose reservation needs a page of their own."""
    copies = [copy for row in rows if (copy := kv.page_copy(row.id)) is not None]
    return np.array(copies, np.int32).reshape(-1, 3)


def _page_table(row: Sequence, length: int, kv: KVStore) -> np.ndarray:
    """int32 [P] of a row that will hold `length` positions (spec E5). A wrong page would be written to another row."""
    table = kv.page_table(row.id)
    if len(table) * kv.page_size < length or table.min() < 0 or table.max() >= kv.num_pages:
        raise CapacityError(
            f"sequence {row.id}: the KV store {kv.name!r} gives {length} positions the pages {table.tolist()}, "
            f"of {kv.num_pages} pages of {kv.page_size}"
        )
    return table


def _token_ids(row: Sequence, part: Part) -> np.ndarray:
    """int32 ids a part feeds. The newest token of a row whose draw is in flight is known to the device alone."""
    if not isinstance(part, Decode):
        return part.plan.token_ids(part.index)
    at = row.stored + row.fed
    return row.tokens(at, at + 1) if at < row.length else np.array([CARRY], np.int32)
