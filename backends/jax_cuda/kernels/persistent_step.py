"""A decode step of a standard block in one launch: every layer, the final norm, and the logits, for up to 32 rows.

One block of threads on each multiprocessor, all resident. Its memory warpgroup streams weight tiles and old KV through
a ring and waits for nobody but the ring; its compute warpgroup goes through the phases of a layer (`Products`,
`Attention`) and waits for other blocks' results by counters that only grow. Between the phases activations lie in
device memory, which is to say in L2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.attention import FAST
from mlxcel_jax_cuda.kernels.attention_schedule import Schedule, Tables
from mlxcel_jax_cuda.kernels.mosaic import TILED, launch, plgpu, shaped
from mlxcel_jax_cuda.kernels.persistent_attention import Attention
from mlxcel_jax_cuda.kernels.persistent_barrier import Together
from mlxcel_jax_cuda.kernels.persistent_products import Carried, Ends, Products, Source
from mlxcel_jax_cuda.kernels.persistent_ptx import THREADS
from mlxcel_jax_cuda.kernels.persistent_shape import MOST_GROUP, SUM_BYTES, Step
from mlxcel_jax_cuda.kernels.persistent_stream import Ring, Work, fill
from mlxcel_jax_cuda.kernels.persistent_watch import EVENTS, Watch
from mlxcel_jax_cuda.kernels.persistent_words import Exchange, clear
from mlxcel_jax_cuda.kernels.persistent_words import fill as fill_words
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import FEW_IDS, TILE

UNGUARDED = dataclasses.replace(FAST, unsafe_no_auto_barriers=True, reduction_scratch_bytes=SUM_BYTES)
"""Without a barrier of the warpgroup before and behind every store, and before every copy. What some threads write and
others of the block read lies in shared memory, and has `commit_smem` between (tokens, queries, weights of attention,
the newest key and value) or is Mosaic's own (sums over rows); who writes it again has passed a barrier behind the
reading."""

COMPUTE_REGISTERS, MEMORY_REGISTERS = 248, 96
"""Of a thread. With 64 the memory warpgroup keeps values that come in pages of 64 in local memory."""


class Stacked(NamedTuple):
    """Every array of a model, the layers in one."""

    tiles: jax.Array  # bf16 [L * R, 64]: of each layer in turn the packed qkv, o, gate_up and down
    head: jax.Array  # bf16, packed
    gains: jax.Array  # float32 [2 L + 1, D], offsets added: attention's and MLP's norm of each layer, the final norm
    bias: jax.Array | None  # float32 [L, F] of qkv, in the order of its tiles
    head_gains: jax.Array | None  # float32 [L, 2, 2, d/2]: of q and of k, the halves of a head apart


class Removed(NamedTuple):
    """Ids that are no row's largest logit, whatever it is."""

    ids: jax.Array  # [FEW_IDS, N] int32, -1 for none
    tiles: jax.Array  # [2] int32: the first and the last row tile of the head that has one, the last below it if none


class Tokens(NamedTuple):
    """The tokens of a step, and where they go. As `standard_steps.Carried` and `Rows` have them."""

    x: jax.Array  # [D, N] float32
    scaled: jax.Array  # [N, D] bf16, x times the first gain
    squares: jax.Array  # [D/64, N] float32
    cos: jax.Array  # [d/2, N] float32, or repeated for each of the heads of a tile
    sin: jax.Array
    page: jax.Array  # [N] int32, -1 for a row that is padding
    place: jax.Array  # [N] int32, on its page
    come: jax.Array | None = None  # [1] int32, 0, to count blocks in; without one the program zeroes one
    removed: Removed | None = None  # of a step with `named` ids


class Made(NamedTuple):
    """What a step leaves."""

    logits: jax.Array  # [N, V] float32
    x: jax.Array  # [D, N] float32, behind the last layer
    keys: jax.Array
    values: jax.Array
    places: jax.Array | None  # [2, sms] int32 of a watched step: see `Watch`; phase p of layer l is 5 l + p
    largest: tuple[jax.Array, ...]  # of a step with `named` ids float32 [V/64, N] twice: see `Ends.best`
    times: jax.Array | None  # [L, EVENTS, sms, 2] int32 of a timed step: see `Watch`


@functools.partial(jax.jit, static_argnames=("step", "at"))
def decode_step(
    step: Step,
    stacked: Stacked,
    tokens: Tokens,
    keys: jax.Array,
    values: jax.Array,
    schedule: Schedule,
    at: Tables | None = None,
) -> Made:
    """One token of each of up to N rows through every layer. keys and values [L * pages, K, page_size, d] bf16: donate
    them, and they are written in place. The schedule is `make_schedule`'s for the N rows and the pages of one layer;
    or, where its tables are a part of an int32 array, they are `at` a place of it. The first row has an item in it even
    if it is padding: blocks that nobody's tokens hold back run ahead, and forget words that others still wait for."""
    _check(step, stacked, tokens, keys, values)
    N, D, d, L = step.rows, step.hidden, step.head_dim, step.layers
    times = [jnp.zeros((L, len(EVENTS), step.sms, 2), jnp.int32)] if step.timed else []
    counts = [] if tokens.come is None or step.watched else [tokens.come]
    in_place = [jax.new_ref(array) for array in (keys, values, *counts, *times)]
    small = [array for array in (stacked.bias, stacked.head_gains) if array is not None]
    small += [*tokens.removed] if tokens.removed is not None else []
    repeats = TILE // len(tokens.cos)  # 1 where they are repeated already
    turns = [jnp.tile(table, (repeats, 1)) if repeats > 1 else table for table in (tokens.cos, tokens.sin)]
    items = schedule.work.shape[0]
    if at is None:
        at, schedule = Tables(0, schedule.tables.shape[1]), schedule._replace(tables=schedule.tables.reshape(-1))

    def persistent_step(
        tiles_g: Any, head_g: Any, gains_g: Any, cos_g: Any, sin_g: Any, page_g: Any, place_g: Any, *refs: Any
    ) -> None:
        x_first, scaled_first, squares_first, work_g, rows_g, tables_g, keys_g, values_g, *rest = refs
        come_g = rest.pop(0) if counts else None
        times_g = rest.pop(0) if step.timed else None
        bias_g, head_gains_g = (None if array is None else rest.pop(0) for array in (stacked.bias, stacked.head_gains))
        removed_g = None if tokens.removed is None else Removed(rest.pop(0), rest.pop(0))
        logits_g, heads_g, mixed_g, hidden_g, parts_g, partials_g, stats_g, *rest = rest
        by_o, by_down = Carried(*rest[:3]), Carried(*rest[3:6])
        best_g = (rest.pop(6), rest.pop(6)) if step.named else None
        places_g = rest.pop(6) if step.watched else None
        x_s, ring_s, newest_s, full, empty = rest[6:]
        block, thread = lax.axis_index("block"), lax.axis_index("thread")
        work, ring, watch = (
            Work(step, block, work_g, rows_g, tables_g, at),
            Ring(ring_s, full, empty),
            Watch(block, places_g, times_g),
        )
        patient = "barriers" not in step.left_out
        begin_together = Together.of_grid(step.sms, active=patient, watch=watch if step.watched else None, here=come_g)

        @pl.when(thread == 1)
        def _memory_warpgroup() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            fill(step, ring, tiles_g, head_g, keys_g, values_g, work, watch)

        @pl.when(thread == 0)
        def _compute_warpgroup() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            for i in range(step.slots):
                plgpu.barrier_arrive(empty.at[i])
            watch.begin()

            def missing(ref: Any, source: Any | None = None, used: Any | None = None) -> None:
                fill_words(ref, block * THREADS, step.sms * THREADS, source, used)

            for exchange_g in (heads_g, mixed_g, hidden_g, parts_g, by_o.x, by_o.scaled, by_o.squares):
                missing(exchange_g)
            for exchange_g in (partials_g, stats_g):
                for place in (0, 1):
                    missing(exchange_g.at[place], used=work.used)
            first = Carried(x_first, scaled_first, squares_first)
            for exchange_g, source in zip(attrs.astuple(by_down), attrs.astuple(first), strict=True):
                missing(exchange_g.at[0])
                missing(exchange_g.at[1], source)  # what a layer before the first would have left
            clear(x_s)
            begin_together.wait()

            exchange = Exchange(patient, watch if step.watched else None)
            used = jnp.int32(1)  # the first row goes through all of the step, or a launch of padding had no order
            for column in range(N):
                used = jnp.where(page_g[column] >= 0, column + 1, used)
            products = Products(step, block, ring, exchange, watch, used, x_s, parts_g)
            attention = Attention(
                step, work, ring, exchange, watch, heads_g, partials_g, stats_g, mixed_g, x_s, newest_s
            )  # fmt: skip
            ends = Ends(
                step, gains_g, bias_g, head_gains_g, cos_g, sin_g, page_g, place_g, heads_g, hidden_g, logits_g,
                best_g, removed_g, keys_g, values_g,
            )  # fmt: skip
            phases = step.product_phases

            def normed(carried: Carried, place: Any) -> Source:
                return Source(carried.scaled.at[place], carried.squares.at[place])

            def layer(n: Any, at: Any) -> Any:
                here, before = lax.rem(n, jnp.int32(2)), lax.rem(n + 1, jnp.int32(2))
                watch.phase(n, 0)
                at = products.run("qkv", phases["qkv"], at, n, normed(by_down, before), ends.heads(n))
                watch.phase(n, 1)
                if "attention" not in step.left_out:
                    at = attention.run(n, at)
                watch.phase(n, 2)
                mixed = Source(mixed_g.at[here], run=step.group * d, gap=(MOST_GROUP - step.group) * d)
                residual = ends.residual(n, 2 * n + 1, by_down.x.at[before], by_o)
                at = products.run("o", phases["o"], at, n, mixed, residual)
                watch.phase(n, 3)
                at = products.run("gate_up", phases["gate_up"], at, n, normed(by_o, here), ends.gate(n))
                watch.phase(n, 4)
                residual = ends.residual(n, 2 * n + 2, by_o.x.at[here], by_down)
                return products.run("down", phases["down"], at, n, Source(hidden_g.at[here]), residual)

            at = lax.fori_loop(0, L, layer, jnp.int32(0))
            watch.phase(jnp.int32(L), 0)
            if "head" not in step.left_out:
                last = normed(by_down, (L - 1) % 2)
                products.run("head", step.head_units, at, jnp.int32(L), last, ends.logit())
            plgpu.wait_smem_to_gmem(0)
            watch.phase(jnp.int32(L), 1)

    most_parts, part_tiles = step.parts
    carried = [shaped((2, D, N), jnp.float32), shaped((2, N, D), jnp.bfloat16), shaped((2, D // TILE, N), jnp.float32)]
    out = [
        shaped((N, step.head.rows), jnp.float32),
        shaped((2, step.qkv.items, 2, N, TILE), jnp.bfloat16),
        shaped((2, N, step.kv_heads, MOST_GROUP, d), jnp.bfloat16),
        shaped((2, N, step.down.depth), jnp.bfloat16),
        shaped((2, most_parts, part_tiles, TILE, N), jnp.float32),
        shaped((2, items, step.kv_heads, d, MOST_GROUP), jnp.float32),
        shaped((2, items, step.kv_heads, 2, MOST_GROUP), jnp.float32),
        *carried,
        *carried,
        *([shaped((step.head.rows // TILE, N), jnp.float32)] * 2 if step.named else []),
        *([shaped((2, step.sms), jnp.int32)] if step.watched else []),
    ]
    scratch = [
        plgpu.SMEM((N, step.token_room), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((step.slots, STEP, TILE), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, d), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=step.copies, num_barriers=step.slots),
        plgpu.Barrier(num_barriers=step.slots),
    ]
    made = launch(
        persistent_step,
        out,
        scratch,
        *(stacked.tiles, stacked.head, stacked.gains, *turns, tokens.page, tokens.place),
        *(tokens.x, tokens.scaled, tokens.squares, *schedule),
        *in_place,
        *small,
        compiler_params=UNGUARDED,
        grid=(step.sms,),
        grid_names=("block",),
        num_threads=2,
        thread_name="thread",
    )
    keys, values, *rest = (jax.freeze(ref) for ref in in_place)
    x, largest = made[10][(L - 1) % 2], tuple(made[13:15]) if step.named else ()
    return Made(made[0], x, keys, values, made[-1] if step.watched else None, largest, rest[-1] if step.timed else None)


def _check(step: Step, stacked: Stacked, tokens: Tokens, keys: jax.Array, values: jax.Array) -> None:
    N, D, L, d = step.rows, step.hidden, step.layers, step.head_dim
    pool = (L * step.pages, step.kv_heads, step.page_size, d)
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tiles": (stacked.tiles, (L * step.layer_rows, TILE)),
        "head": (stacked.head, step.head.packed_shape),
        "gains": (stacked.gains, (2 * L + 1, D)),
        "keys": (keys, pool),
        "values": (values, pool),
        "x": (tokens.x, (D, N)),
        "scaled": (tokens.scaled, (N, D)),
        "squares": (tokens.squares, (D // TILE, N)),
        "cos": (tokens.cos, (TILE if len(tokens.cos) == TILE else d // 2, N)),
        "page": (tokens.page, (N,)),
    }
    if tokens.come is not None:
        wanted["come"] = tokens.come, (1,)
    if step.named:
        ids, tiles = tokens.removed or (None, None)
        wanted |= {"removed ids": (ids, (FEW_IDS, N)), "tiles of removed ids": (tiles, (2,))}
    if step.bias:
        wanted["bias"] = stacked.bias, (L, step.qkv.rows)
    if step.normed:
        wanted["head_gains"] = stacked.head_gains, (L, 2, 2, d // 2)
    for name, (array, shape) in wanted.items():
        if array is None or array.shape != shape:
            raise ValueError(f"{name} is {None if array is None else array.shape}, this step has {shape}")
    if step.bias != (stacked.bias is not None) or step.normed != (stacked.head_gains is not None):
        raise ValueError("bias and head_gains must be there if the step has them, and only then")
