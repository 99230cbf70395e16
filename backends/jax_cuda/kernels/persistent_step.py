"""A decode step of a standard block in one launch: every layer, the final norm, and the logits, for up to 8 rows.

One block of threads on each multiprocessor, all resident. Its memory warpgroup streams weight tiles and old KV through
a ring and waits for nobody but the ring; its compute warpgroup goes through the phases of a layer (`Products`,
`Attention`) and waits for other blocks' results by counters that only grow. Between the phases activations lie in
device memory, which is to say in L2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.attention import FAST
from mlxcel_jax_cuda.kernels.attention_schedule import Schedule
from mlxcel_jax_cuda.kernels.mosaic import TILED, launch, plgpu, shaped
from mlxcel_jax_cuda.kernels.persistent_attention import HALVES, Attention
from mlxcel_jax_cuda.kernels.persistent_barrier import Counters
from mlxcel_jax_cuda.kernels.persistent_products import Ends, Products
from mlxcel_jax_cuda.kernels.persistent_shape import COLUMNS, Step
from mlxcel_jax_cuda.kernels.persistent_stream import Ring, Work, fill
from mlxcel_jax_cuda.kernels.persistent_watch import EVENTS, Watch
from mlxcel_jax_cuda.kernels.row_products_weight import STEP
from mlxcel_jax_cuda.kernels.sizes import TILE

N = COLUMNS


class Stacked(NamedTuple):
    """Every array of a model, the layers in one."""

    tiles: jax.Array  # bf16 [L * R, 64]: of each layer in turn the packed qkv, o, gate_up and down
    head: jax.Array  # bf16, packed
    gains: jax.Array  # float32 [2 L + 1, D], offsets added: attention's and MLP's norm of each layer, the final norm
    bias: jax.Array | None  # float32 [L, F] of qkv, in the order of its tiles
    head_gains: jax.Array | None  # float32 [L, 2, 2, d/2]: of q and of k, the halves of a head apart


class Tokens(NamedTuple):
    """The tokens of a step, and where they go. As `standard_steps.Carried` and `Rows` have them."""

    x: jax.Array  # [D, N] float32
    scaled: jax.Array  # [N, D] bf16, x times the first gain
    squares: jax.Array  # [D/64, N] float32
    cos: jax.Array  # [d/2, N] float32
    sin: jax.Array
    page: jax.Array  # [N] int32, -1 for a row that is padding
    place: jax.Array  # [N] int32, on its page


class Made(NamedTuple):
    """What a step leaves."""

    logits: jax.Array  # [N, V] float32
    x: jax.Array  # [D, N] float32, behind the last layer
    keys: jax.Array
    values: jax.Array
    places: jax.Array | None  # [2, sms] int32 of a watched step: see `Watch`; phase p of layer l is 5 l + p
    times: jax.Array | None  # [L, EVENTS, sms, 2] int32 of a timed step: see `Watch`


@functools.partial(jax.jit, static_argnames=("step",))
def decode_step(
    step: Step, stacked: Stacked, tokens: Tokens, keys: jax.Array, values: jax.Array, schedule: Schedule
) -> Made:
    """One token of each of up to 8 rows through every layer. keys and values [L * pages, K, page_size, d] bf16: donate
    them, and they are written in place. The schedule is `make_schedule`'s for the 8 rows and the pages of one layer."""
    _check(step, stacked, tokens, keys, values)
    d = step.head_dim
    times = [jnp.zeros((step.layers, EVENTS, step.sms, 2), jnp.int32)] if step.timed else []
    in_place = [jax.new_ref(array) for array in (tokens.x, tokens.scaled, tokens.squares, keys, values, *times)]
    small = [array for array in (stacked.bias, stacked.head_gains) if array is not None]
    turns = [jnp.tile(table, (step.together, 1)) for table in (tokens.cos, tokens.sin)]
    split = [w for w in (step.qkv, step.o, step.gate_up, step.down) if w.split > 1]
    most_parts = max((w.split - 1 for w in split), default=1)
    most_tiles = max((w.rows // TILE for w in split), default=1)
    items = schedule.work.shape[0]

    def persistent_step(
        tiles_g: Any, head_g: Any, gains_g: Any, cos_g: Any, sin_g: Any, page_g: Any, place_g: Any, *refs: Any
    ) -> None:
        work_g, rows_g, tables_g, *rest = refs
        x_g, scaled_g, squares_g, keys_g, values_g, *rest = rest
        times_g = rest.pop(0) if step.timed else None
        bias_g, head_gains_g = (None if array is None else rest.pop(0) for array in (stacked.bias, stacked.head_gains))
        logits_g, queries_g, mixed_g, hidden_g, parts_g, partials_g, stats_g, *rest = rest
        places_g = rest.pop(0) if step.watched else None
        x_s, ring_s, queries_s, weights_s, staged_s, out_s, *barriers = rest
        x_here, full, empty, queries_here, newest_here = barriers
        block, thread = lax.axis_index("block"), lax.axis_index("thread")
        work, ring = Work(step, block, work_g, rows_g, tables_g), Ring(ring_s, full, empty)
        watch = Watch(block, places_g, times_g)
        counters = Counters.of_grid(
            step.tile_counters + N * step.kv_heads,
            active="barriers" not in step.left_out,
            watch=watch if step.watched else None,
        )

        @pl.when(thread == 1)
        def _memory_warpgroup() -> None:
            plgpu.set_max_registers(64, action="decrease")
            fill(step, ring, tiles_g, head_g, keys_g, values_g, work, watch)

        @pl.when(thread == 0)
        def _compute_warpgroup() -> None:
            plgpu.set_max_registers(232, action="increase")
            for i in range(step.slots):
                plgpu.barrier_arrive(empty.at[i])
            watch.begin()
            products = Products(step, block, ring, counters, watch, x_s, x_here, parts_g)
            attention = Attention(
                step, work, ring, counters, watch, queries_g, keys_g, values_g, page_g, place_g, partials_g, stats_g,
                mixed_g, queries_s, weights_s, out_s, queries_here, newest_here,
            )  # fmt: skip
            ends = Ends(
                step, counters, gains_g, bias_g, head_gains_g, cos_g, sin_g, page_g, place_g, x_g, scaled_g, squares_g,
                queries_g, hidden_g, logits_g, keys_g, values_g, staged_s,
            )  # fmt: skip
            phases = step.product_phases

            def layer(n: Any, at: Any) -> Any:
                before = n * step.layer_results
                watch.phase(n, 0)
                at = products.run("qkv", phases["qkv"], at, n, before, scaled_g, squares_g, *ends.heads(n))
                watch.phase(n, 1)
                if "attention" not in step.left_out:
                    at = attention.run(n, at, before + step.results("qkv"))
                watch.phase(n, 2)
                known = before + step.results("attention")
                at = products.run("o", phases["o"], at, n, known, mixed_g, None, *ends.residual(2 * n + 1))
                watch.phase(n, 3)
                known = before + step.results("o")
                at = products.run(
                    "gate_up", phases["gate_up"], at, n, known, scaled_g, squares_g, ends.nothing, ends.gate
                )
                watch.phase(n, 4)
                known = before + step.results("gate_up")
                return products.run("down", phases["down"], at, n, known, hidden_g, None, *ends.residual(2 * n + 2))

            at = lax.fori_loop(0, step.layers, layer, jnp.int32(0))
            watch.phase(jnp.int32(step.layers), 0)
            if "head" not in step.left_out:
                known = jnp.int32(step.layers * step.layer_results)
                products.run(
                    "head", step.head_units, at, jnp.int32(0), known, scaled_g, squares_g, ends.nothing, ends.logit
                )
            watch.phase(jnp.int32(step.layers), 1)

    out = [
        shaped((N, step.head.rows), jnp.float32),
        shaped((N, step.kv_heads, N, d), jnp.bfloat16),
        shaped((N, step.heads * d), jnp.bfloat16),
        shaped((N, step.down.depth), jnp.bfloat16),
        shaped((most_parts, most_tiles, TILE, N), jnp.float32),
        shaped((items, step.kv_heads, d, N), jnp.float32),
        shaped((items, step.kv_heads, 2, N), jnp.float32),
        *([shaped((2, step.sms), jnp.int32)] if step.watched else []),
    ]
    scratch = [
        plgpu.SMEM((N, step.token_depth), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((step.slots, STEP, TILE), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, N, d), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((HALVES, N, TILE), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, N, step.together, d // 2), jnp.bfloat16),
        plgpu.SMEM((N, TILE), jnp.bfloat16),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=step.copies, num_barriers=step.slots),
        plgpu.Barrier(num_barriers=step.slots),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=2 * step.chunks),
    ]
    logits, *_, last = launch(
        persistent_step,
        out,
        scratch,
        *(stacked.tiles, stacked.head, stacked.gains, *turns, tokens.page, tokens.place, *schedule),
        *in_place,
        *small,
        compiler_params=FAST,
        grid=(step.sms,),
        grid_names=("block",),
        num_threads=2,
        thread_name="thread",
    )
    x, _, _, keys, values, *times = (jax.freeze(ref) for ref in in_place)
    return Made(logits, x, keys, values, last if step.watched else None, times[0] if step.timed else None)


def _check(step: Step, stacked: Stacked, tokens: Tokens, keys: jax.Array, values: jax.Array) -> None:
    D, L, d = step.hidden, step.layers, step.head_dim
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
        "cos": (tokens.cos, (d // 2, N)),
        "page": (tokens.page, (N,)),
    }
    if step.bias:
        wanted["bias"] = stacked.bias, (L, step.qkv.rows)
    if step.normed:
        wanted["head_gains"] = stacked.head_gains, (L, 2, 2, d // 2)
    for name, (array, shape) in wanted.items():
        if array is None or array.shape != shape:
            raise ValueError(f"{name} is {None if array is None else array.shape}, this step has {shape}")
    if step.bias != (stacked.bias is not None) or step.normed != (stacked.head_gains is not None):
        raise ValueError("bias and head_gains must be there if the step has them, and only then")
