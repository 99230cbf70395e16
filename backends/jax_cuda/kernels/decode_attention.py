"""Paged decode attention on Hopper: a row's bits depend on its own keys alone.

The product is swapped: keys are wgmma's 64-row operand, and the queries that share a KV head its columns, padded to 8.
One kernel goes over all (item of the schedule, KV head) with a memory warpgroup that streams through a ring; a second
one merges a row's partials. Nothing in the order of summation (see `attention`) knows the batch, the page size, page
numbers, the schedule or the number of multiprocessors.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels import attention
from mlxcel_jax_cuda.kernels.attention import (
    BLOCK,
    FAST,
    HALF,
    MASKED,
    SLOT,
    Scoring,
    check_pages,
)
from mlxcel_jax_cuda.kernels.attention_schedule import FIELDS, Schedule
from mlxcel_jax_cuda.kernels.layers import check_layers, layer_operand
from mlxcel_jax_cuda.kernels.mosaic import (
    SMEM_BYTES,
    SMS,
    TILED,
    TRANSPOSED,
    WGMMA,
    across,
    load,
    plgpu,
    shaped,
    store,
)

FAN = 16
"""Partials that are loaded at a time."""

MOST_COLUMNS = 32
"""Query heads of a KV head, padded to 8: more leave no registers for the scores of a block beside merged values."""


def decode_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
) -> jax.Array:
    """The same in float32, without rings. q [S, H, d], page_tables [S, P], seq_lens [S] -> [S, H, d] float32."""

    def row(q: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        k, v = (x[table].swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in (k_pages, v_pages))
        places = jnp.arange(k.shape[1])
        return attention.reference(q[None], k, v, length[None] - 1, places, Scoring(scale, softcap))[0]

    return jax.vmap(row)(q, page_tables, seq_lens)


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    schedule: Schedule,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sms: int = SMS,
    layer: int | None = None,
    layers: int = 1,
) -> jax.Array:
    """One token a row. q [S, H, d] bf16, pages [pages, K, page_size, d] bf16, d 64 or 128 -> [S, H, d] bf16.

    The schedule is `make_schedule`'s for the same rows, pages, window and K. A row of length 0 yields zeros. Pools hold
    no NaN, unused pages too. With a window the pages may be rings. Pages of several `layers` lie behind one another,
    those of `layer` are read; the schedule is that of one. ValueError for shapes that it cannot do.
    """
    check_pages(q, k_pages, v_pages)
    (S, H, d), K = q.shape, k_pages.shape[1]
    group = H // K
    columns = jnp.pad(q.reshape(S, K, group, d), ((0, 0), (0, 0), (0, -group % 8), (0, 0)))
    out = attend_columns(
        columns,
        k_pages,
        v_pages,
        schedule,
        group=group,
        scale=scale,
        softcap=softcap,
        window=window,
        sms=sms,
        layer=layer,
        layers=layers,
    )
    return out.reshape(S, H, d)


def attend_columns(
    columns: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    schedule: Schedule,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sms: int = SMS,
    layer: int | None = None,
    layers: int = 1,
) -> jax.Array:
    """`decode_attention` of queries that are padded already: columns [S, K, N, d] bf16, N a multiple of 8, of which the
    first `group` are heads and the others may hold anything. Returns [S, K, group, d] bf16."""
    S, K, N, d = columns.shape
    page_size = k_pages.shape[2]
    check_pages(columns.reshape(S, K * N, d), k_pages, v_pages)
    check_layers(len(k_pages), layer, layers)
    if group > MOST_COLUMNS:
        raise ValueError(f"{group} heads share a KV head, {MOST_COLUMNS} can: take XLA's form")
    if k_pages.shape[1] != K or -(-group // 8) * 8 != N:
        raise ValueError(
            f"columns are {columns.shape}: for {group} heads of each of {k_pages.shape[1]} KV heads they must be "
            f"[{S}, {k_pages.shape[1]}, {-(-group // 8) * 8}, {d}]"
        )
    wanted = FIELDS + BLOCK // min(page_size, SLOT)
    if schedule.work.shape[1] != wanted or schedule.rows.shape != (S, 2):
        raise ValueError(
            f"the schedule has items of {schedule.work.shape[1]} numbers for {schedule.rows.shape[0]} rows: "
            f"{S} rows and pages of {page_size} want {wanted}"
        )
    scoring = Scoring(scale, softcap, window)
    parts, stats = _partials(
        columns, k_pages, v_pages, schedule, layer_operand(layer), scoring=scoring, layers=layers, sms=sms
    )
    out: jax.Array = _combine(parts, stats, schedule.rows, group=group)
    return out


@functools.partial(jax.jit, static_argnames=("scoring", "layers", "sms"))  # lowered once for all layers
def _partials(
    columns: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    schedule: Schedule,
    layer: jax.Array | None,
    *,
    scoring: Scoring,
    layers: int,
    sms: int,
) -> list[jax.Array]:
    """columns [S, K, N, d] -> weighted values [items, K, d, N] and maxima and sums [items, K, 2, N], float32."""
    (rows, K, N, d), page_size = columns.shape, k_pages.shape[2]
    most, pages, tile = schedule.work.shape[0], schedule.tables.shape[1], min(page_size, SLOT)
    tiles, slot_tiles, halves, item_slots = BLOCK // tile, SLOT // tile, BLOCK // HALF, 2 * BLOCK // SLOT
    slots = (SMEM_BYTES - N * (2 * BLOCK + 4 * d)) // (SLOT * d * 2)
    spread = functools.partial(across, columns=N)

    def kernel(q_g: Any, k_g: Any, v_g: Any, work_g: Any, rows_g: Any, tables_g: Any, *refs: Any) -> None:
        # q_s [2, N, d], ring [slots, SLOT, d], p_s [halves, N, HALF]
        *layer_g, parts_g, stats_g, q_s, ring, p_s, q_full, q_empty, full, empty = refs
        sm, thread = lax.axis_index("sm"), lax.axis_index("thread")
        used = rows_g[rows - 1, 0] + rows_g[rows - 1, 1]
        items = lax.div(used * K - sm + sms - 1, jnp.int32(sms))

        def record(n: Any, fields: int) -> tuple[Any, ...]:  # read one item ahead of its use
            item = jnp.minimum(n * sms + sm, most * K - 1)
            return tuple(work_g[lax.div(item, jnp.int32(K)), i] for i in range(fields))

        def slot_of(base: Any, i: int) -> Any:  # a block takes the slots of its keys, then those of its values
            return lax.rem(base + i, jnp.int32(slots))

        @pl.when(thread == 1)
        def _memory_warpgroup() -> None:
            base_row = layer_g[0][0] * (k_pages.shape[0] // layers * K * page_size) if layer_g else 0
            plgpu.set_max_registers(40, action="decrease")

            def item(n: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                base, row, first, run, length, *pool_rows = carry
                head, upcoming = lax.rem(n * sms + sm, jnp.int32(K)), record(n + 1, FIELDS + tiles)

                def pool_row(key: Any) -> Any:
                    page = tables_g[row, jnp.minimum(lax.div(key, jnp.int32(page_size)), pages - 1)]
                    return jnp.where(key < length, page * (K * page_size) + lax.rem(key, jnp.int32(page_size)), 0)

                def block(b: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                    base, *pool_rows = carry
                    following = [pool_row(first + (b + 1) * BLOCK + i * tile) for i in range(tiles)]
                    for i in range(2 * tiles):
                        source, slot = (k_g, v_g)[i // tiles], slot_of(base, i // slot_tiles)
                        if i == tiles:  # between K and V: the keys do not wait for the queries

                            @pl.when(b == 0)
                            def _queries() -> None:
                                place = lax.rem(n, jnp.int32(2))
                                plgpu.barrier_wait(q_empty.at[place])
                                plgpu.copy_gmem_to_smem(q_g.at[row, head], q_s.at[place], q_full.at[place])

                        if i % slot_tiles == 0:
                            plgpu.barrier_wait(empty.at[slot])
                        begin = pl.multiple_of(base_row + pool_rows[i % tiles] + head * page_size, HALF)
                        part = pl.ds(i % slot_tiles * tile, tile)
                        plgpu.copy_gmem_to_smem(source.at[pl.ds(begin, tile)], ring.at[slot, part], full.at[slot])
                    return base + item_slots, *following

                base = lax.fori_loop(0, run, block, (base, *pool_rows))[0]
                return base, *upcoming

            lax.fori_loop(0, items, item, (jnp.int32(0), *record(0, FIELDS + tiles)))

        @pl.when(thread == 0)
        def _compute_warpgroup() -> None:
            plgpu.set_max_registers(232, action="increase")
            for i in range(2 + slots):
                plgpu.barrier_arrive(q_empty.at[i] if i < 2 else empty.at[i - 2])
            key = plgpu.broadcasted_iota(jnp.int32, (HALF, N), 0, layout=WGMMA)

            def item(n: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                base, _, first, run, length = carry
                number, place = n * sms + sm, lax.rem(n, jnp.int32(2))
                upcoming = record(n + 1, FIELDS)
                plgpu.barrier_wait(q_full.at[place])

                def block(b: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                    base, m_before, total_before, values_before = carry
                    ahead = length - first - b * BLOCK - key  # of a half's keys: 1 is the token's own

                    def scores(*accumulators: Any) -> list[jax.Array]:
                        for i, s in enumerate(accumulators):
                            slot = slot_of(base, i // 2)
                            if i % 2 == 0:
                                plgpu.barrier_wait(full.at[slot])
                            plgpu.wgmma(s, ring.at[slot, pl.ds(i % 2 * HALF, HALF)], q_s.at[place].T)
                        plgpu.wgmma_wait(0)
                        return [s[...] for s in accumulators]

                    def visible(i: int) -> Any:
                        seen = ahead > i * HALF
                        return seen & (ahead <= i * HALF + scoring.window) if scoring.window else seen

                    s = pl.run_scoped(scores, *[plgpu.ACC((HALF, N), jnp.float32)] * halves)
                    for i in range(item_slots // 2):
                        plgpu.barrier_arrive(empty.at[slot_of(base, i)])
                    s = [jnp.where(visible(i), scoring.squash(x), MASKED) for i, x in enumerate(s)]
                    m = scoring.maximum(jnp.max(functools.reduce(jnp.maximum, s), axis=0))
                    p = [scoring.weights(x, spread(m)) for x in s]
                    for i, x in enumerate(p):
                        p_s.at[i].T[...] = plgpu.layout_cast(x.astype(jnp.bfloat16), TRANSPOSED)
                    plgpu.commit_smem()

                    def weigh(values: Any) -> tuple[jax.Array, jax.Array]:
                        for i in range(halves):
                            slot = slot_of(base, (halves + i) // 2)
                            if i % 2 == 0:
                                plgpu.barrier_wait(full.at[slot])
                            plgpu.wgmma(values, ring.at[slot, pl.ds(i % 2 * HALF, HALF)].T, p_s.at[i].T)
                        # By halves, then over one half's rows: more rows would be added in an order that N changes.
                        total = jnp.sum(functools.reduce(jnp.add, p), axis=0)
                        plgpu.wgmma_wait(0)
                        return total, values[...]

                    partial = (m, *pl.run_scoped(weigh, plgpu.ACC((d, N), jnp.float32)))
                    for i in range(item_slots // 2, item_slots):
                        plgpu.barrier_arrive(empty.at[slot_of(base, i)])
                    before = (m_before, total_before, values_before)
                    m, total, values = attention.merge(before, partial, functools.partial(_spread_rows, rows=d))
                    return base + item_slots, m, total, values

                begin = (base, *attention.start(WGMMA, (d, N), 0))
                base, m, total, values = lax.fori_loop(0, run, block, begin)
                plgpu.barrier_arrive(q_empty.at[place])
                index, head = lax.div(number, jnp.int32(K)), lax.rem(number, jnp.int32(K))
                store(parts_g.at[index, head], values)
                store(stats_g.at[index, head, 0], m)
                store(stats_g.at[index, head, 1], total)
                return base, *upcoming

            lax.fori_loop(0, items, item, (jnp.int32(0), *record(0, FIELDS)))

    flat = [x.reshape(-1, d) for x in (k_pages, v_pages)]
    made: list[jax.Array] = plgpu.kernel(
        kernel,
        out_type=[shaped((most, K, x, N), jnp.float32) for x in (d, 2)],
        scratch_types=[
            plgpu.SMEM((2, N, d), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, SLOT, d), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((halves, N, HALF), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=slot_tiles, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(sms,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="thread",
        compiler_params=FAST,
    )(columns, *flat, schedule.work, schedule.rows, schedule.tables, *([] if layer is None else [layer]))
    return made


def _spread_rows(x: jax.Array, rows: int) -> jax.Array:
    """One value a column, [N] -> [rows, N]."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), (1,))


@functools.partial(jax.jit, static_argnames=("group",))
def _combine(parts: jax.Array, stats: jax.Array, rows: jax.Array, *, group: int) -> jax.Array:
    """Partials of all items, as `_partials` gives them, and rows [S, 2] -> [S, K, group, d] bf16."""
    (_, K, d, N), S = parts.shape, rows.shape[0]
    spread = functools.partial(across, columns=8)

    def kernel(parts_g: Any, stats_g: Any, rows_g: Any, out_g: Any, out_s: Any) -> None:
        """One (row, KV head), 64 of d and 8 columns."""
        row, head = lax.axis_index("row"), lax.axis_index("head")
        columns = lax.axis_index("columns")
        part_d, part_n = pl.ds(lax.axis_index("part_d") * HALF, HALF), pl.ds(columns * 8, 8)
        first, used = rows_g[row, 0], rows_g[row, 1]

        def add_some(i: Any, old: attention.Partial) -> attention.Partial:
            index = [first + jnp.minimum(i * FAN + s, used - 1) for s in range(FAN)]
            maxima, sums = (
                [load(stats_g.at[s, head, which, part_n], WGMMA.reduce(0)) for s in index] for which in (0, 1)
            )
            values = [load(parts_g.at[s, head, part_d, part_n]) for s in index]
            return attention.merge_run(old, i * FAN, used, maxima, sums, values, spread)

        begin, rounds = attention.start(WGMMA, (HALF, 8), 0), lax.div(used + FAN - 1, jnp.int32(FAN))
        _, total, acc = lax.fori_loop(0, rounds, add_some, begin)
        result = attention.finish(total, acc, spread).astype(jnp.bfloat16)
        store(out_s.T, plgpu.layout_cast(result, TRANSPOSED))
        plgpu.commit_smem()
        for size, here in ((8, columns < group // 8), (group % 8, columns == group // 8)):
            if size:

                @pl.when(here)
                def _write(size: int = size) -> None:
                    target = out_g.at[row, head, pl.ds(columns * 8, size), part_d]
                    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, size)], target)

        plgpu.wait_smem_to_gmem(0)

    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=shaped((S, K, group, d), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((8, HALF), jnp.bfloat16)],
        grid=(S, K, d // HALF, N // 8),
        grid_names=("row", "head", "part_d", "columns"),
        compiler_params=FAST,
    )(parts, stats, rows)
    return out
