"""Row products for few tokens: every weight byte is read once, as fast as memory gives it.

A block streams packed tiles through a ring while its tokens lie in shared memory (or stream too, where they are too
many). Of a depth in parts each of two blocks, a cluster, does half, one part after the other; they meet in the shared
memory of the first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import TILED, WGMMA, across, launch, load, plgpu, tiling
from mlxcel_jax_cuda.kernels.row_products_ends import End
from mlxcel_jax_cuda.kernels.row_products_weight import STEP, Stacked, Weight, check_tiles
from mlxcel_jax_cuda.kernels.sizes import SMEM_BYTES, SMS, TILE

COLUMNS = (8, 16, 32)
MOST_SLOTS, FEWEST_SLOTS = 13, 5
SLOT_BYTES = STEP * TILE * 2
LOADED = 128
"""Registers of a thread for values that are loaded together."""


def sides(weight: Weight) -> int:
    """Blocks that share a row tile."""
    return 1 if weight.split == 1 else 2


def ring(weight: Weight, columns: int) -> tuple[int, bool]:
    """Ring slots, and whether a block's tokens are held whole beside them."""
    meeting = (weight.split // 2) * weight.pair * TILE * columns * 4
    room, own_bytes = SMEM_BYTES - meeting - 2 * columns * TILE * 2, weight.depth // sides(weight) * columns * 2
    slots = (room - own_bytes) // SLOT_BYTES
    if slots >= FEWEST_SLOTS:
        return min(slots, MOST_SLOTS), True
    return min(room // (SLOT_BYTES + columns * STEP * 2), MOST_SLOTS), False


def inverse_rms(squares_g: Any, depth: int, eps: float) -> jax.Array:
    """squares_g [D/64, N] float32 -> [N]: the partial sums of squares in index order.

    As many are loaded at a time as registers hold: each thread has N/4 values of a partial sum.
    """
    (count, columns), layout = squares_g.shape, WGMMA.reduce(0)
    most = LOADED * 4 // columns
    together = next(size for size in range(min(count, most), 0, -1) if count % size == 0)

    def add(i: Any, total: jax.Array) -> jax.Array:
        loaded = [load(squares_g.at[i * together + j], layout) for j in range(together)]
        return functools.reduce(jnp.add, loaded, total)

    none = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
    total = lax.fori_loop(0, count // together, add, none)
    return lax.rsqrt(total / depth + eps)


@functools.partial(
    jax.jit, static_argnames=("weight", "end", "eps", "sms", "at")
)  # lowered once for all copies of a weight
def stream(
    tiles: jax.Array,
    x: jax.Array,
    squares: jax.Array | None = None,
    extra: tuple[jax.Array, ...] = (),
    layer: jax.Array | None = None,
    *,
    weight: Weight,
    end: End,
    eps: float = 0.0,
    sms: int = SMS,
    at: Stacked | None = None,
) -> tuple[jax.Array, ...]:
    """One weight's product for N = 8, 16 or 32 columns: what `end` gives, then what it wrote in place.

    tiles: packed [F * D / 64, 64] bf16.   x: [N, D] bf16.   squares: [D/64, N] float32 or None: with them the sums are
    multiplied by 1 / sqrt(their total / D + eps), the norm that x is still to have. extra: as `end` says.
    layer: int32 [1] or None: which layer's part of the tiles, that lie as `at` says, and of the end's arrays; read on
    the device, so that all layers run one kernel.
    """
    D, S, pair, N = weight.depth, weight.split, weight.pair, x.shape[0]
    if N not in COLUMNS or x.shape != (N, D):
        raise ValueError(f"x is {x.shape}: it must be [8, 16 or 32, {D}]")
    check_tiles(tiles.shape, weight, layer, at)
    if S > 1 and S % 2:
        raise ValueError(f"{S} parts: two blocks share them, so they must be even")
    own_depth, own_parts, part_steps = D // sides(weight), S // sides(weight), D // S // STEP
    item_steps, blocks = own_parts * part_steps * pair, weight.items if S > 1 else min(sms, weight.items)
    slots, resident = ring(weight, N)
    pools = [jax.new_ref(pool) for pool in extra[len(extra) - end.in_place :]]
    inputs = [*([] if squares is None else [squares]), *extra[: len(extra) - end.in_place], *pools]
    own, place = end.scratch(N), [] if layer is None else [layer]

    def kernel(tiles_g: Any, x_g: Any, *refs: Any) -> None:
        layer_g, refs = refs[: len(place)], refs[len(place) :]
        inputs_g, rest = refs[: len(inputs)], refs[len(inputs) :]
        squares_g, extra_g = (None, inputs_g) if squares is None else (inputs_g[0], inputs_g[1:])
        out_g, (x_s, ring_s, x_full, full, empty, *meeting) = rest[: len(out)], rest[len(out) : len(rest) - len(own)]
        own_s = rest[len(rest) - len(own) :]
        first_item = lax.axis_index("item")
        side = lax.axis_index("side") if S > 1 else jnp.int32(0)
        count = 1 if S > 1 else lax.div(weight.items - first_item + blocks - 1, jnp.int32(blocks))
        thread = lax.axis_index("thread")

        def own_layer() -> Any:
            """Each warpgroup reads it for itself, first of all: the read is behind the first transfer of either."""
            return layer_g[0][0] if layer_g else jnp.int32(0)

        @pl.when(thread == 1)
        def _memory_warpgroup() -> None:
            base = own_layer() * at.stride + at.first if at else 0
            plgpu.set_max_registers(64, action="decrease")
            plgpu.griddepcontrol_launch_dependents()

            def depth_of(within: Any) -> Any:
                """Of a step of an item, from the block's first: part by part, each for one tile after the other."""
                part = lax.div(within, jnp.int32(part_steps * pair))
                return (part * part_steps + lax.rem(within, jnp.int32(part_steps))) * STEP

            def fetch_tiles(step: Any) -> None:
                slot, within = lax.rem(step, jnp.int32(slots)), lax.rem(step, jnp.int32(item_steps))
                tile = (first_item + lax.div(step, jnp.int32(item_steps)) * blocks) * pair
                tile = tile + lax.rem(lax.div(within, jnp.int32(part_steps)), jnp.int32(pair))
                row = base + tile * D + side * own_depth + depth_of(within)
                packed = tiles_g.at[pl.ds(pl.multiple_of(row, STEP), STEP)]
                plgpu.copy_gmem_to_smem(packed, ring_s.at[slot], full.at[slot])

            def fetch_tokens(step: Any) -> None:
                if not resident:
                    slot, within = lax.rem(step, jnp.int32(slots)), lax.rem(step, jnp.int32(item_steps))
                    depth = pl.ds(pl.multiple_of(side * own_depth + depth_of(within), STEP), STEP)
                    plgpu.copy_gmem_to_smem(x_g.at[:, depth], x_s.at[slot], full.at[slot])

            def refill(step: Any) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(step, jnp.int32(slots))])
                fetch_tiles(step)
                fetch_tokens(step)

            def loop(first: Any, last: Any, body: Any) -> None:
                lax.fori_loop(first, last, lambda step, carry: (body(step), carry)[1], 0)

            total = count * item_steps
            begun = jnp.minimum(total, slots)
            loop(0, begun, fetch_tiles)  # the weights wait for nobody
            plgpu.griddepcontrol_wait()
            if resident:
                columns = pl.ds(pl.multiple_of(side * own_depth, STEP), own_depth)
                plgpu.copy_gmem_to_smem(x_g.at[:, columns], x_s, x_full)
            else:
                loop(0, begun, fetch_tokens)
            loop(begun, total, refill)

        @pl.when(thread == 0)
        def _compute_warpgroup() -> None:
            number = own_layer()
            plgpu.set_max_registers(232, action="increase")
            plgpu.griddepcontrol_wait()  # before anything of the previous kernel's is read or overwritten
            scale = None if squares_g is None else across(inverse_rms(squares_g, D, eps), N)
            if resident:
                plgpu.barrier_wait(x_full)

            def product(first_step: Any, first_k: Any) -> jax.Array:
                def multiply(k: Any, acc: Any) -> None:
                    slot = lax.rem(first_step + k, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    for half in range(STEP // TILE):
                        rows = ring_s.at[slot, pl.ds(half * TILE, TILE)]
                        if resident:
                            tokens = x_s.at[:, pl.ds((first_k + k) * STEP + half * TILE, TILE)]
                        else:
                            tokens = x_s.at[slot, :, pl.ds(half * TILE, TILE)]
                        plgpu.wgmma(acc, rows, tokens.T)

                def release(k: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(first_step + k, jnp.int32(slots))])

                def scope(acc: Any) -> jax.Array:
                    def step(k: Any, carry: Any) -> Any:
                        multiply(k, acc)
                        plgpu.wgmma_wait(STEP // TILE)  # the step before has been read
                        release(k - 1)
                        return carry

                    multiply(0, acc)
                    lax.fori_loop(1, part_steps, step, 0)
                    plgpu.wgmma_wait(0)
                    release(part_steps - 1)
                    sums: jax.Array = acc[...]
                    return sums

                found: jax.Array = pl.run_scoped(scope, plgpu.ACC((TILE, N), jnp.float32))
                return found

            def finish(sums: list[jax.Array], item: Any, ready: Any) -> None:
                scaled = sums if scale is None else [total * scale for total in sums]
                end.finish(scaled, item, number, ready, extra_g, out_g, own_s)

            def item(n: Any, carry: Any) -> Any:
                index = first_item + n * blocks
                ready = end.before(index, number, extra_g)

                def part(number: Any) -> list[jax.Array]:
                    first = n * item_steps + number * (part_steps * pair)
                    sums = [product(first + i * part_steps, number * part_steps) for i in range(pair)]
                    if S > 1:
                        pl.when(side == 1)(functools.partial(send, sums, number))
                    return sums

                def send(sums: list[jax.Array], number: Any) -> None:
                    for i, own_sums in enumerate(sums):
                        target = meeting[0].at[number, i]
                        plgpu.async_store_smem(own_sums, target, meeting[1], cluster_idx=0, cluster_dim="side")

                def add_part(number: Any, totals: list[jax.Array]) -> list[jax.Array]:
                    return [total + more for total, more in zip(totals, part(number), strict=True)]

                sums = part(jnp.int32(0))
                if own_parts > 1:
                    sums = lax.fori_loop(1, own_parts, add_part, sums)
                if S == 1:
                    finish(sums, index, ready)
                    return carry

                @pl.when(side == 0)
                def _add_those_of_the_other() -> None:
                    meeting_s, arrived = meeting
                    plgpu.barrier_wait(arrived)
                    totals = list(sums)
                    for number in range(own_parts):
                        totals = [total + load(meeting_s.at[number, i]) for i, total in enumerate(totals)]
                    finish(totals, index, ready)

                return carry

            lax.fori_loop(0, count, item, 0)

    out = end.out(weight, N)
    x_shape = (N, own_depth) if resident else (slots, N, STEP)
    kept = [
        plgpu.SMEM(x_shape, jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((slots, STEP, TILE), jnp.bfloat16, transforms=TILED),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=1 if resident else 2, num_barriers=slots),
        plgpu.Barrier(num_barriers=slots),
    ]
    grid: dict[str, Any] = {"grid": (blocks,), "grid_names": ("item",)}
    if S > 1:  # where the other block's parts meet
        grid |= {"cluster": (2,), "cluster_names": ("side",)}
        kept.append(plgpu.SMEM((own_parts, pair, TILE, N), jnp.float32, transforms=tiling(N * 4)(4)))
        kept.append(plgpu.Barrier(num_arrivals=own_parts * pair))
    result = launch(kernel, out, [*kept, *own], tiles, x, *place, *inputs, **grid, num_threads=2, thread_name="thread")
    return (*result, *(jax.freeze(pool) for pool in pools))
