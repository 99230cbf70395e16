"""Attention of a chunk of one row's tokens over paged keys on Hopper: prefill, with the bits of decoding.

A block of threads takes 64 tokens of two query heads that share a KV head, or 128 tokens of one head, half for each
of two compute warpgroups; a third streams the row's keys and values through a ring that both read. Here the tokens are
wgmma's 64-row operand, so that the weights go from the first product to the second in registers. An element of either
product is the same chain of k-steps as in `decode_attention`, where the operands are swapped, and everything else
follows the order of `attention`: so a token has the bits that it would have alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels import attention
from mlxcel_jax_cuda.kernels.attention import BLOCK, FAST, HALF, MASKED, SLOT, Scoring, check_pages
from mlxcel_jax_cuda.kernels.layers import check_layers, layer_operand
from mlxcel_jax_cuda.kernels.mosaic import SMS, TILED, WGMMA, along, plgpu, shaped
from mlxcel_jax_cuda.kernels.rounding import add_scaled

TOKENS = 64
"""Tokens of a warpgroup's tile."""

SMEM_BYTES = 226 * 1024
"""For queries and ring: this kernel has no other scratch than barriers."""


def chunk_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    start: jax.Array | int,
    length: jax.Array | int,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> jax.Array:
    """The same in float32, without rings. q [T, H, d], page_table [P] -> [T, H, d] float32."""
    k, v = (x[page_table].swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in (k_pages, v_pages))
    token = jnp.arange(q.shape[0])
    positions = jnp.where(token < length, start + token, -1)
    return attention.reference(q, k, v, positions, jnp.arange(k.shape[1]), Scoring(scale, softcap, window))


def chunk_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    start: jax.Array | int,
    length: jax.Array | int,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sms: int = SMS,
    turns: bool = True,
    layer: int | None = None,
    layers: int = 1,
) -> jax.Array:
    """T tokens of one row, at positions start ... start + T - 1, whose keys and values are in the pages already.

    q [T, H, d] bf16, T a multiple of 64; pages [pages, K, page_size, d] bf16, d 64 or 128; page_table [P] int32.
    -> [T, H, d] bf16: causal attention for the first `length` tokens, zeros for the rest. Pools hold no NaN. With a
    window one page may be a ring, in which position p lies at p modulo page_size. Pages of several `layers` lie behind
    one another, those of `layer` are read. ValueError for other shapes.
    `turns`: the warpgroups take turns at the tensor cores, one's exponentials beside the other's products; same bits.
    """
    check_pages(q, k_pages, v_pages)
    (T, H, d), K = q.shape, k_pages.shape[1]
    return attend_columns(
        q.reshape(T, K, H // K, d),
        k_pages,
        v_pages,
        page_table,
        start,
        length,
        group=H // K,
        scale=scale,
        softcap=softcap,
        window=window,
        sms=sms,
        turns=turns,
        layer=layer,
        layers=layers,
    )


def attend_columns(
    columns: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    start: jax.Array | int,
    length: jax.Array | int,
    *,
    group: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sms: int = SMS,
    turns: bool = True,
    layer: int | None = None,
    layers: int = 1,
) -> jax.Array:
    """`chunk_attention` of queries as qkv's product leaves them: columns [T, K, C, d] bf16, of which the first `group`
    are heads and the others may hold anything. Returns [T, K * group, d] bf16."""
    T, K, C, d = columns.shape
    check_pages(columns.reshape(T, K * C, d), k_pages, v_pages)
    check_layers(len(k_pages), layer, layers)
    if k_pages.shape[1] != K or not 0 < group <= C:
        raise ValueError(
            f"columns are {columns.shape}, for {group} heads of each of {k_pages.shape[1]} KV heads they must be "
            f"[T, {k_pages.shape[1]}, {group} or more, {d}]"
        )
    if T % TOKENS or not T:
        raise ValueError(f"{T} tokens: they must be a multiple of {TOKENS}; pad the chunk")
    if page_table.ndim != 1:
        raise ValueError(f"page_table is {page_table.shape}, it must be one row's, [P]")
    heads = 1 if group % 2 else 2
    if T * heads % (2 * TOKENS):
        columns = jnp.pad(columns, ((0, TOKENS), (0, 0), (0, 0), (0, 0)))
    bounds = jnp.stack([jnp.asarray(x, jnp.int32) for x in (start, length)])
    scoring = Scoring(scale, softcap, window)
    out: jax.Array = _attend(
        columns,
        k_pages,
        v_pages,
        page_table,
        bounds,
        layer_operand(layer),
        group=group,
        heads=heads,
        scoring=scoring,
        layers=layers,
        sms=sms,
        turns=turns,
    )
    return out[:T]


def item_at(n: Any, sm: Any, sms: int) -> Any:
    """The n-th item of a multiprocessor: in rounds that go to and fro, so that from a list that begins with the
    longest all have about as much."""
    return n * sms + jnp.where(lax.rem(n, jnp.int32(2)) == 0, sm, sms - 1 - sm)


def items_of(sm: Any, sms: int, total: int) -> Any:
    """How many of `total` items a multiprocessor has."""
    rounds = total // sms
    return rounds + jnp.where(rounds * sms + (sms - 1 - sm if rounds % 2 else sm) < total, 1, 0)


def block_bounds(token: Any, span: int, begin: Any, length: Any, window: int) -> tuple[Any, Any, Any]:
    """Blocks [first, end) hold every key that tokens token ... token + span - 1 of the chunk see, and [first, whole)
    none that one of them does not. None at all for a tile that is only padding."""
    end = jnp.where(token < length, begin + jnp.minimum(token + span, length), 0)
    end = lax.div(end + BLOCK - 1, jnp.int32(BLOCK))
    if window:
        first = jnp.minimum(lax.div(jnp.maximum(begin + token - window + 1, 0), jnp.int32(BLOCK)), end)
        return first, first, end
    return jnp.int32(0), jnp.minimum(lax.div(begin + token + 1, jnp.int32(BLOCK)), end), end


def _sum_over_half(p: jax.Array) -> jax.Array:
    """[64, HALF] -> [64], in the order in which `decode_attention` adds the 64 rows of a half.

    There a key is a row: first come rows 8 apart, which one thread has; then the 8 rows of a warp's lanes, by
    shuffles; then the 16 rows of each warp.
    """
    warps = [jnp.sum(p[:, i : i + 8] + p[:, i + 8 : i + 16], axis=1) for i in range(0, HALF, 16)]
    return (warps[0] + warps[1]) + (warps[2] + warps[3])


@functools.partial(
    jax.jit, static_argnames=("group", "heads", "scoring", "layers", "sms", "turns")
)  # lowered once for all layers
def _attend(
    columns: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    bounds: jax.Array,
    layer: jax.Array | None,
    *,
    group: int,
    heads: int,
    scoring: Scoring,
    layers: int,
    sms: int,
    turns: bool,
) -> jax.Array:
    """`heads` of a tile: 2, or 1 where an odd number of them shares a KV head."""
    (T, K, _, d), page_size, pages, H = columns.shape, k_pages.shape[2], page_table.shape[0], columns.shape[1] * group
    tile, span = min(page_size, SLOT), TOKENS * 2 // heads  # keys of a copy; tokens of an item
    tiles, slot_tiles, block_slots = BLOCK // tile, SLOT // tile, 2 * BLOCK // SLOT
    total = T // span * (H // heads)
    q_slots = 2 if d == HALF else 1
    slots = (SMEM_BYTES - q_slots * 2 * TOKENS * d * 2) // (SLOT * d * 2)
    spread = functools.partial(along, columns=HALF)
    part_sums = plgpu.ACC((TOKENS, HALF), jnp.float32)

    def kernel(q_g: Any, k_g: Any, v_g: Any, table_g: Any, bounds_g: Any, *refs: Any) -> None:
        # q_s [q_slots, 2, TOKENS, d], ring [slots, SLOT, d]
        *layer_g, out_g, q_s, ring, q_full, q_empty, full, empty, turn = refs
        sm, thread = lax.axis_index("sm"), lax.axis_index("thread")
        begin, length = bounds_g[0], bounds_g[1]
        items = items_of(sm, sms, total)

        def place(n: Any) -> tuple[Any, Any, Any, Any, Any]:
            """Item n of this multiprocessor: first token, first head, and `block_bounds`."""
            item = item_at(n, sm, sms)
            token = (T // span - 1 - lax.div(item, jnp.int32(H // heads))) * span  # the longest first
            head = lax.rem(item, jnp.int32(H // heads)) * heads
            return token, head, *block_bounds(token, span, begin, length, scoring.window)

        def slot_of(base: Any, i: int) -> Any:  # a block takes the slots of its keys, then those of its values
            return lax.rem(base + i, jnp.int32(slots))

        @pl.when(thread == 2)
        def _memory_warpgroup() -> None:
            base_row = layer_g[0][0] * (k_pages.shape[0] // layers * K * page_size) if layer_g else 0
            plgpu.set_max_registers(24, action="decrease")

            def pool_row(key: Any) -> Any:
                page = table_g[jnp.minimum(lax.div(key, jnp.int32(page_size)), pages - 1)]
                inside = key < begin + length
                return jnp.where(inside, page * (K * page_size) + lax.rem(key, jnp.int32(page_size)), 0)

            def item(n: Any, base: Any) -> Any:
                token, head, first, _, end = place(n)
                kv_head, column = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
                at = lax.rem(n, jnp.int32(q_slots))
                plgpu.barrier_wait(q_empty.at[at])
                for i in range(2):
                    tokens = pl.ds(pl.multiple_of(token + (i * TOKENS if heads == 1 else 0), TOKENS), TOKENS)
                    plgpu.copy_gmem_to_smem(
                        q_g.at[tokens, kv_head, column + (i if heads == 2 else 0)], q_s.at[at, i], q_full.at[at]
                    )

                def block(b: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                    base, *pool_rows = carry
                    following = [pool_row((b + 1) * BLOCK + i * tile) for i in range(tiles)]
                    for i in range(2 * tiles):
                        source, slot = (k_g, v_g)[i // tiles], slot_of(base, i // slot_tiles)
                        if i % slot_tiles == 0:
                            plgpu.barrier_wait(empty.at[slot])
                        row = pl.multiple_of(base_row + pool_rows[i % tiles] + kv_head * page_size, HALF)
                        part = pl.ds(i % slot_tiles * tile, tile)
                        plgpu.copy_gmem_to_smem(source.at[pl.ds(row, tile)], ring.at[slot, part], full.at[slot])
                    return base + block_slots, *following

                rows = [pool_row(first * BLOCK + i * tile) for i in range(tiles)]
                return lax.fori_loop(first, end, block, (base, *rows))[0]

            lax.fori_loop(0, items, item, jnp.int32(0))

        @pl.when(thread < 2)
        def _compute_warpgroups() -> None:
            plgpu.set_max_registers(240, action="increase")
            for i in range(q_slots):
                plgpu.barrier_arrive(q_empty.at[i])
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])
            row_of = plgpu.broadcasted_iota(jnp.int32, (TOKENS,), 0, layout=WGMMA.reduce(1))
            key_of = plgpu.broadcasted_iota(jnp.int32, (TOKENS, SLOT), 1, layout=WGMMA)
            eighth, within = (
                key_of & -8,
                key_of & 7,
            )  # the first is a constant of a register, the second the same in all

            def pass_turn() -> None:
                if turns:
                    plgpu.barrier_arrive(turn)

            def await_turn() -> None:
                if turns:
                    plgpu.barrier_wait(turn)

            def exchange() -> None:
                pass_turn()
                await_turn()

            def item(n: Any, base: Any) -> Any:
                token, head, first, whole, end = place(n)
                at = lax.rem(n, jnp.int32(q_slots))
                own_token = token + (thread * TOKENS if heads == 1 else 0)
                own_head = head + (thread if heads == 2 else 0)
                plgpu.barrier_wait(q_full.at[at])
                pl.when(thread == 1)(exchange)  # the second is behind by half a block, within an item

                def block(b: Any, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
                    base, merged_m, merged_total, *values = carry

                    def scores(*accumulators: Any) -> list[jax.Array]:
                        for i, s in enumerate(accumulators):
                            plgpu.barrier_wait(full.at[slot_of(base, i)])
                            plgpu.wgmma(s, q_s.at[at, thread], ring.at[slot_of(base, i)].T)
                        exchange()
                        plgpu.wgmma_wait(0)
                        return [s[...] for s in accumulators]

                    s = pl.run_scoped(scores, *[plgpu.ACC((TOKENS, SLOT), jnp.float32)] * (BLOCK // SLOT))
                    for i in range(BLOCK // SLOT):
                        plgpu.barrier_arrive(empty.at[slot_of(base, i)])
                    s = [scoring.squash(x) for x in s]
                    if masked:
                        behind = along(begin + own_token - b * BLOCK + row_of, SLOT) - within  # own key: 0
                        for i, x in enumerate(s):
                            seen = behind >= eighth + i * SLOT
                            if scoring.window:
                                seen &= behind < eighth + (i * SLOT + scoring.window)
                            s[i] = jnp.where(seen, x, MASKED)
                    m = scoring.maximum(jnp.max(functools.reduce(jnp.maximum, s), axis=1))
                    weights: list[jax.Array] = []
                    rounded = []
                    for x in (x[:, i : i + HALF] for x in s for i in range(0, SLOT, HALF)):
                        p = scoring.weights(x, along(m, HALF))
                        weights = [weights[0] + p] if weights else [p]  # halves first: few registers at a time
                        rounded.append(p.astype(jnp.bfloat16))
                    total = _sum_over_half(weights[0])

                    def weigh(values: Any, columns: Any) -> Any:
                        for i, x in enumerate(rounded):
                            keys = pl.ds(i % 2 * HALF, HALF)
                            plgpu.wgmma(values, x, ring.at[slot_of(base, (BLOCK // HALF + i) // 2), keys, columns])
                        plgpu.wgmma_wait(0)
                        return values[...]

                    pass_turn()
                    for i in range(BLOCK // SLOT, block_slots):
                        plgpu.barrier_wait(full.at[slot_of(base, i)])
                    await_turn()
                    merged_m, by, by_added = attention.factors(merged_m, m)
                    merged_total = add_scaled(merged_total, by, total, by_added)
                    for i in range(d // HALF):  # by parts of d: few registers at a time
                        columns = pl.ds(i * HALF, HALF)
                        part = pl.run_scoped(functools.partial(weigh, columns=columns), part_sums)
                        values[i] = add_scaled(values[i], spread(by), part, spread(by_added))
                    for i in range(BLOCK // SLOT, block_slots):
                        plgpu.barrier_arrive(empty.at[slot_of(base, i)])
                    return base + block_slots, merged_m, merged_total, *values

                empty_m, empty_total, empty_values = attention.start(WGMMA, (TOKENS, HALF), 1)
                carry = (base, empty_m, empty_total, *[empty_values] * (d // HALF))
                carry = lax.fori_loop(first, whole, functools.partial(block, masked=False), carry)
                base, _, total, *values = lax.fori_loop(whole, end, functools.partial(block, masked=True), carry)
                pl.when(thread == 0)(exchange)
                real = along(row_of, HALF) < length - own_token
                own = q_s.at[at, thread]
                for i, x in enumerate(values):
                    result = jnp.where(real, attention.finish(total, x, spread), 0.0)
                    own.at[:, pl.ds(i * HALF, HALF)][...] = result.astype(jnp.bfloat16)
                plgpu.commit_smem()
                tokens = pl.ds(pl.multiple_of(own_token, TOKENS), TOKENS)
                plgpu.copy_smem_to_gmem(own, out_g.at[tokens, own_head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_empty.at[at])
                return base

            lax.fori_loop(0, items, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    flat = [x.reshape(-1, d) for x in (k_pages, v_pages)]
    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=shaped((T, H, d), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((q_slots, 2, TOKENS, d), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, SLOT, d), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=2, num_barriers=q_slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=q_slots),
            plgpu.Barrier(num_arrivals=slot_tiles, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="thread",
        compiler_params=FAST,
    )(columns, *flat, page_table, bounds, *([] if layer is None else [layer]))
    return out
