"""Who reads what in a step's decode attention: made once a step, by XLA, and shared by every layer."""

from __future__ import annotations

import typing

import attrs
import jax
import jax.numpy as jnp

from mlxcel_jax_cuda.kernels.attention import BLOCK, HALF, SLOT

MOST_ITEMS = 4096
"""Items of a schedule, unless it has more rows: about 30 for every multiprocessor and KV head. More would only cost
memory for their partials."""

FEW_ROWS = 8
"""Rows whose items are counted one by one, with no launch of its own."""

FIELDS = 4
"""Numbers of an item before its pool rows."""


@attrs.frozen
class Tables:
    """Where page tables lie in an array of int32: the n-th page of row r at `first` + r * `pages` + n."""

    first: int
    pages: int  # of a row

    def place(self, row: typing.Any, number: typing.Any) -> typing.Any:
        return self.first + row * self.pages + number


class Schedule(typing.NamedTuple):
    """Items of work in order of rows. An item is one block of a row, or the row's first blocks when there are many:
    those are merged by the block of threads that reads them, in the same order."""

    work: jax.Array  # [items, FIELDS + tiles] int32: row, first key, blocks, keys of the row, pool row of each tile
    rows: jax.Array  # [S, 2] int32: a row's first item, and how many it has
    tables: jax.Array  # [S, P] int32


def capacity(rows: int, row_blocks: int, pool_positions: int) -> int:
    """Items of a schedule, a bound on the partials in memory.

    Rows that share no page cannot have more blocks than the pool holds, and one begun block each. Rows that share
    pages can, and then their first blocks are merged on the way; so they are beyond `MOST_ITEMS`.
    """
    return min(rows * row_blocks, pool_positions // BLOCK + rows, max(rows, MOST_ITEMS))


def make_schedule(
    page_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    window: int = 0,
    most_items: int | None = None,
) -> Schedule:
    """page_tables [S, P] and seq_lens [S] int32, positions in KV with this step's token: 0 for an empty row.

    A dense cache is one page a row, and so is a ring of a multiple of 128 positions, in which position p lies at
    p modulo its length. `most_items` (at least S) is for tests.
    """
    if page_size % SLOT and page_size != HALF:
        raise ValueError(f"page_size={page_size} must be {HALF} or a multiple of {SLOT}: a tile never straddles pages")
    if page_tables.ndim != 2 or seq_lens.shape != page_tables.shape[:1]:
        raise ValueError(f"tables are {page_tables.shape}, lengths {seq_lens.shape}: they must be [S, P] and [S]")
    S, P = page_tables.shape
    tile = min(page_size, SLOT)
    blocks = (window + BLOCK - 2) // BLOCK + 1 if window else -(-P * page_size // BLOCK)
    items = most_items or capacity(S, blocks, num_pages * page_size)
    if items < S:
        raise ValueError(f"most_items={items} is less than one for each of {S} rows")
    first = jnp.maximum(seq_lens - window, 0) // BLOCK if window else jnp.zeros_like(seq_lens)
    blocks_of = -(-seq_lens // BLOCK) - first
    share = blocks_of
    if items < S * blocks:
        share = jnp.where(jnp.sum(blocks_of) <= items, blocks_of, jnp.minimum(blocks_of, items // S))
    row_number = jnp.arange(S)
    if S <= FEW_ROWS:
        ends = sum(jnp.where(row_number >= row, share[row], 0) for row in range(S))
    else:
        ends = jnp.sum(jnp.where(row_number <= row_number[:, None], share, 0), axis=1)  # cumsum, in one launch
    item = jnp.arange(items)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), S - 1)
    place, merged = item - (ends - share)[row], (blocks_of - share)[row]
    key = (first[row] + jnp.where(place == 0, 0, place + merged)) * BLOCK
    run = jnp.where(place == 0, merged + 1, 1)
    position = key[:, None] + jnp.arange(0, BLOCK, tile)
    page = page_tables[row[:, None], jnp.clip(position // page_size, 0, P - 1)]
    pool_row = jnp.where(position < seq_lens[row][:, None], page * (kv_heads * page_size) + position % page_size, 0)
    fields = jnp.stack([row, key, run, seq_lens[row]], 1)
    return Schedule(
        jnp.concatenate([fields, pool_row], 1).astype(jnp.int32),
        jnp.stack([ends - share, share], 1).astype(jnp.int32),
        jnp.maximum(page_tables, 0),  # an array of its own: a part of a host buffer would be cut out for every kernel
    )
