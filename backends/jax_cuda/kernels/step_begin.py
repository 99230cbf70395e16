"""What goes before the first layer: embeddings, ready for the first norm; and of a step in one launch everything.

A program of XLA's for each of these small arrays is a launch of its own, nine in all, each about as long as it takes to
begin one. Squares are summed as `row_products_ends.Residual` sums them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.attention import BLOCK, SLOT
from mlxcel_jax_cuda.kernels.attention_schedule import FIELDS, Schedule, Tables, capacity
from mlxcel_jax_cuda.kernels.mosaic import (
    TRANSPOSED,
    WGMMA,
    along,
    launch,
    load,
    plgpu,
    shaped,
    store,
    store_tokens,
)
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.kernels.sizes import SMS, TILE

ROWS = 8
"""Tokens of a block of threads."""


class Begun(NamedTuple):
    """As `standard_steps.Carried`, of N tokens."""

    x: jax.Array  # [D, N] float32
    scaled: jax.Array  # [N, D] bf16
    squares: jax.Array  # [D/64, N] float32


class Planned(NamedTuple):
    """Where the rows of a step are, and who attends to what."""

    page: jax.Array  # [N] int32, -1 for a row that is padding
    place: jax.Array  # [N] int32, on its page
    schedule: Schedule  # its tables lie where they came from: in the launch's buffer, at `Buffer.tables`


@attrs.frozen
class Buffer:
    """Where things lie in the host buffer of a launch, in words."""

    rows: int  # N, whole eights
    token_ids: int
    positions: int
    seq_lens: int
    slots: int
    page_tables: int
    pages: int  # of a row
    carry: int  # the token id of a row whose token the device has drawn

    @property
    def tables(self) -> Tables:
        return Tables(self.page_tables, self.pages)


@attrs.frozen
class Pages:
    """Of one layer."""

    count: int
    page_size: int
    kv_heads: int

    def items(self, rows: int, row_pages: int) -> int:
        """Of a step's schedule; see `capacity`."""
        return capacity(rows, -(-row_pages * self.page_size // BLOCK), self.count * self.page_size)


def item_fields(
    item: Any, lengths: list[Any], table: Callable[[Any, Any], Any], pages: Pages, row_pages: int, sms: int = SMS
) -> Any:
    """([fields of an item], [(first item, items) of each row]) of the schedule that `make_schedule` makes, in scalars;
    of many rows with one item a row where `_whole` says so. The first row has an item even if it is padding, as
    `decode_step` wants it.

    lengths: of the rows; table(row, n): the n-th page of a row.
    """
    rows, int32 = len(lengths), jnp.int32
    lengths = [jnp.maximum(lengths[0], 1), *lengths[1:]]
    items = pages.items(rows, row_pages)
    blocks = [lax.div(length + (BLOCK - 1), int32(BLOCK)) for length in lengths]
    share = blocks
    if items < rows * -(-row_pages * pages.page_size // BLOCK):
        fit = functools.reduce(jnp.add, blocks) <= items
        share = [jnp.where(fit, own, jnp.minimum(own, items // rows)) for own in blocks]
    if rows > ROWS:
        whole = _whole(blocks, pages.kv_heads, sms)
        share = [jnp.where(whole, jnp.minimum(own, 1), apart) for own, apart in zip(blocks, share, strict=True)]
    ends = list(itertools.accumulate(share))
    row = functools.reduce(jnp.add, [jnp.where(end <= item, int32(1), int32(0)) for end in ends])
    row = jnp.minimum(row, rows - 1)

    def of_row(values: list[Any]) -> Any:
        found = values[0]
        for number in range(1, rows):
            found = jnp.where(row == number, values[number], found)
        return found

    length = of_row(lengths)
    place, merged = item - (of_row(ends) - of_row(share)), of_row(blocks) - of_row(share)
    key = jnp.where(place == 0, int32(0), place + merged) * BLOCK
    fields = [row, key, jnp.where(place == 0, merged + 1, int32(1)), length]
    for begin in range(0, BLOCK, min(pages.page_size, SLOT)):
        position = key + begin
        page = table(row, jnp.clip(lax.div(position, int32(pages.page_size)), 0, row_pages - 1))
        pool_row = page * (pages.kv_heads * pages.page_size) + lax.rem(position, int32(pages.page_size))
        fields.append(jnp.where(position < length, pool_row, int32(0)))
    return fields, [(end - own, own) for end, own in zip(ends, share, strict=True)]


def _whole(blocks: list[Any], kv_heads: int, sms: int) -> Any:
    """Whether rows of so many blocks of keys are attended to sooner if each is one item, whose blocks one block of
    threads merges on the way. A block that is an item of its own takes about four thirds of the time, for its queries
    and its partial, and the merging of a round of rows about a third; but the longest row is then no bound."""
    sharing = sms // kv_heads  # blocks of threads for the items of a KV head, see `persistent_stream.Work`

    def rounds(count: Any) -> Any:
        return lax.div(count + (sharing - 1), jnp.int32(sharing))

    longest = functools.reduce(jnp.maximum, blocks)
    of_rows = rounds(functools.reduce(jnp.add, [jnp.minimum(own, 1) for own in blocks]))
    return 3 * of_rows * longest < 4 * rounds(functools.reduce(jnp.add, blocks)) + of_rows


@functools.partial(jax.jit, static_argnames=("packed",))
def begin(ids: jax.Array, embed: jax.Array, gains: jax.Array, *, packed: Weight | None) -> Begun:
    """ids [N] int32, N a multiple of 8. embed: bf16 [V, D], or the tiles of a `packed` one. gains [G, D] float32, of
    which the first norm's is the first."""
    N, D = len(ids), gains.shape[1]
    if N % ROWS or not N:
        raise ValueError(f"{N} tokens: they must be a multiple of {ROWS}")

    def kernel(ids_g: Any, embed_g: Any, gains_g: Any, *refs: Any) -> None:
        part, first = lax.axis_index("part"), lax.axis_index("tokens") * ROWS
        embed_tokens([ids_g[first + n] for n in range(ROWS)], part, first, embed_g, gains_g, packed, *refs)

    made = launch(
        kernel,
        begun(N, D),
        scratch(),
        *(ids, embed, gains),
        grid=(D // TILE, N // ROWS),
        grid_names=("part", "tokens"),
        num_threads=1,
        thread_name="thread",
    )
    return Begun(*made)


@functools.partial(jax.jit, static_argnames=("packed", "at", "pages", "sms"))
def begin_step(
    buffer: jax.Array,
    last_tokens: jax.Array,
    embed: jax.Array,
    gains: jax.Array,
    *,
    packed: Weight | None,
    at: Buffer,
    pages: Pages,
    sms: int = SMS,
) -> tuple[Begun, Planned]:
    """Of a step of N rows on so many multiprocessors. buffer int32 of the launch, last_tokens int32 [slots + 1]; others
    as in `begin`. Page tables are left where they are: to copy them took as many reads one behind the other as a row
    has pages."""
    N, D, int32 = at.rows, gains.shape[1], jnp.int32
    parts = D // TILE
    embedding = parts * (N // ROWS)

    def kernel(buffer_g: Any, last_g: Any, embed_g: Any, gains_g: Any, *refs: Any) -> None:
        x_g, scaled_g, squares_g, *planned, scratch = (*refs[:7], refs[7:])
        block = lax.axis_index("block")

        @pl.when(block < embedding)
        def _tokens() -> None:
            part, first, ids = lax.rem(block, int32(parts)), lax.div(block, int32(parts)) * ROWS, []
            for row in range(ROWS):
                asked, own = buffer_g[at.token_ids + first + row], last_g[buffer_g[at.slots + first + row]]
                ids.append(jnp.where(asked == at.carry, own, asked))
            embed_tokens(ids, part, first, embed_g, gains_g, packed, x_g, scaled_g, squares_g, *scratch)

        plan(block, buffer_g, 0, at, pages, sms, *planned)

    made = launch(
        kernel,
        [*begun(N, D), *planned_shapes(at, pages)],
        scratch(),
        *(buffer, last_tokens, embed, gains),
        grid=(max(pages.items(N, at.pages), embedding, N),),
        grid_names=("block",),
        num_threads=1,
        thread_name="thread",
    )
    x, scaled, squares, page, place, work, rows = made
    return Begun(x, scaled, squares), Planned(page, place, Schedule(work, rows, buffer))


def plan(
    block: Any,
    buffer_g: Any,
    base: Any,
    at: Buffer,
    pages: Pages,
    sms: int,
    page_g: Any,
    place_g: Any,
    work_g: Any,
    rows_g: Any,
) -> None:
    """A block's share of `Planned`, from a launch's buffer that begins at `base`."""
    N, P, int32 = at.rows, at.pages, jnp.int32
    items = pages.items(N, P)

    def table(row: Any, number: Any) -> Any:
        return jnp.maximum(buffer_g[base + at.tables.place(row, number)], 0)

    lengths = [buffer_g[base + at.seq_lens + row] for row in range(N)]
    own, rows = item_fields(jnp.minimum(block, items - 1), lengths, table, pages, P, sms)

    @pl.when(block < items)
    def _item() -> None:
        for number, value in enumerate(own):
            work_g[block, number] = value.astype(int32)

    @pl.when(block < N)
    def _row() -> None:
        position = buffer_g[base + at.positions + jnp.minimum(block, N - 1)]
        place = jnp.maximum(position, 0)
        page = table(jnp.minimum(block, N - 1), lax.div(place, int32(pages.page_size)))
        page_g[block] = jnp.where(position >= 0, page, int32(-1))
        place_g[block] = lax.rem(place, int32(pages.page_size))

    for row, (first, count) in enumerate(rows):

        @pl.when(block == row)
        def _items(row: int = row, first: Any = first, count: Any = count) -> None:
            rows_g[row, 0], rows_g[row, 1] = first, count


def planned_shapes(at: Buffer, pages: Pages) -> list[Any]:
    """Of what `plan` writes."""
    N, fields = at.rows, FIELDS + BLOCK // min(pages.page_size, SLOT)
    small = [(N,), (N,), (pages.items(N, at.pages), fields), (N, 2)]
    return [shaped(shape, jnp.int32) for shape in small]


def begun(tokens: int, hidden: int) -> list[Any]:
    of_squares = shaped((hidden // TILE, tokens), jnp.float32)
    return [shaped((hidden, tokens), jnp.float32), shaped((tokens, hidden), jnp.bfloat16), of_squares]


def scratch() -> list[Any]:
    return [plgpu.SMEM((ROWS, TILE), jnp.bfloat16), plgpu.Barrier(num_arrivals=ROWS)]


def embed_tokens(
    ids: list[Any],
    part: Any,
    first: Any,
    embed_g: Any,
    gains_g: Any,
    packed: Weight | None,
    x_g: Any,
    scaled_g: Any,
    squares_g: Any,
    embedded_s: Any,
    arrived: Any,
) -> None:
    """64 dims, the `part`-th, of the tokens from `first` on."""
    dims, tokens = pl.ds(pl.multiple_of(part * TILE, TILE), TILE), pl.ds(first, ROWS)
    for place, asked in enumerate(ids):
        number = jnp.maximum(asked, 0)
        if packed is None:
            source = embed_g.at[number, dims]
        else:
            tile = lax.div(number, jnp.int32(TILE)) * (packed.depth // TILE) + part
            source = embed_g.at[tile * TILE + lax.rem(number, jnp.int32(TILE))]
        plgpu.copy_gmem_to_smem(source, embedded_s.at[place], arrived)
    gain = load(gains_g.at[0, dims], WGMMA.reduce(1))
    plgpu.barrier_wait(arrived)
    x = plgpu.layout_cast(load(embedded_s.T, TRANSPOSED), WGMMA).astype(jnp.float32)
    store(x_g.at[dims, tokens], x)
    store_tokens(scaled_g.at[tokens, dims], x * along(gain, ROWS))
    store(squares_g.at[part, tokens], jnp.sum(x * x, axis=0))
