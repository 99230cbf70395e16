"""Row products for many tokens: 128 rows of the weight by up to 256 tokens a block, both streamed.

A block does the parts of a tile's depth one after the other, in the order in which `stream` adds them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import (
    LANE,
    TILED,
    TRANSPOSED,
    WGMMA,
    across,
    load,
    plgpu,
    shaped,
    store_tokens,
)
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight, check_tiles
from mlxcel_jax_cuda.kernels.sizes import SMEM_BYTES, SMS, TILE

COLUMNS = (64, 128, 256)
MOST_SPLIT_COLUMNS = 128
"""The parts of a split weight are added in registers, which leaves none for more tokens."""


@functools.partial(jax.jit, static_argnames=("weight", "columns", "gate", "dtype", "sms", "at"))
def tiled(
    tiles: jax.Array,
    x: jax.Array,
    layer: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    weight: Weight,
    columns: int,
    gate: bool = False,
    dtype: Any = jnp.bfloat16,
    sms: int = SMS,
    at: Stacked | None = None,
) -> jax.Array:
    """One weight's product for many tokens. Each of a block's two compute warpgroups makes 64 of its 128 rows, or with
    `gate` both sides of a pair for half of the tokens, so that a gate meets its up in one thread.

    tiles: packed [F * D / 64, 64] bf16.   x: [T, D] bf16, T a multiple of columns (64, 128 or 256; 128 at most where
    the weight is split). Returns y [T, F] of `dtype`, bf16 or float32, the rows of a paired weight in the order of its
    tiles; with `gate` silu(gate) * up, [T, F/2] bf16. scale [T] float32: what a token's sums are multiplied by. layer
    and at: as in `stream`.
    """
    (T, D), F, S, half = x.shape, weight.rows, weight.split, columns // 2
    if columns not in COLUMNS or T % columns or weight.depth != D:
        raise ValueError(
            f"x is {x.shape}: T must be a multiple of columns={columns} (64, 128 or 256), and D {weight.depth}"
        )
    check_tiles(tiles.shape, weight, layer, at)
    if S > 1 and columns > MOST_SPLIT_COLUMNS:
        raise ValueError(f"columns={columns} leave no registers for the parts of a split weight: 128 at most")
    if gate and (weight.facing != F // 2 or dtype != jnp.bfloat16):
        raise ValueError(f"a gate needs rows that face their ups, F / 2 = {F // 2} apart, not {weight.facing}; in bf16")
    steps, token_tiles = D // TILE, T // columns
    chunk = TILE if columns > TILE else TILE // 2  # tokens of an output tile on its way to device memory
    slots = min((SMEM_BYTES + 2048 - 4 * chunk * TILE * 2) // ((2 * TILE + columns) * TILE * 2), 8)
    items = F // (2 * TILE) * token_tiles
    accumulators = [plgpu.ACC((TILE, half), jnp.float32)] * 2 if gate else [plgpu.ACC((TILE, columns), jnp.float32)]

    def kernel(tiles_g: Any, x_g: Any, *refs: Any) -> None:
        *given, out_g, w_s, x_s, out_s, full, empty = refs
        scale_g = None if scale is None else given.pop()
        layer_g = given
        thread, block = lax.axis_index("thread"), lax.axis_index("block")
        mine = lax.div(items - block + sms - 1, jnp.int32(sms))

        def place(n: Any) -> tuple[Any, Any]:
            """Token tiles vary fastest: one wave of blocks reads few rows of the weight and all tokens."""
            item = block + n * sms
            return lax.div(item, jnp.int32(token_tiles)), lax.rem(item, jnp.int32(token_tiles)) * columns

        @pl.when(thread == 2)
        def _memory_warpgroup() -> None:
            base = layer_g[0][0] * at.stride + at.first if at else 0
            plgpu.set_max_registers(40, action="decrease")

            def item(n: Any, carry: Any) -> Any:
                pair, token = place(n)

                def fetch(k: Any, carry: Any) -> Any:
                    slot = lax.rem(n * steps + k, jnp.int32(slots))
                    plgpu.barrier_wait(empty.at[slot])
                    for i in range(2):
                        row = pl.multiple_of(base + ((pair * 2 + i) * steps + k) * TILE, TILE)
                        plgpu.copy_gmem_to_smem(tiles_g.at[pl.ds(row, TILE)], w_s.at[slot, i], full.at[slot])
                    depth = pl.ds(pl.multiple_of(k * TILE, TILE), TILE)
                    tokens = pl.ds(pl.multiple_of(token, columns), columns)
                    plgpu.copy_gmem_to_smem(x_g.at[tokens, depth], x_s.at[slot], full.at[slot])
                    return carry

                return lax.fori_loop(0, steps, fetch, carry)

            lax.fori_loop(0, mine, item, 0)

        @pl.when(thread < 2)
        def _compute_warpgroups() -> None:
            plgpu.set_max_registers(232, action="increase")
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])

            def item(n: Any, carry: Any) -> Any:
                pair, token = place(n)

                def part(first: Any) -> tuple[jax.Array, ...]:
                    start = n * steps + first

                    def multiply(k: Any, sums: tuple[Any, ...]) -> None:
                        slot = lax.rem(start + k, jnp.int32(slots))
                        plgpu.barrier_wait(full.at[slot])
                        if gate:
                            tokens = x_s.at[slot, pl.ds(thread * half, half)].T
                            for i, acc in enumerate(sums):
                                plgpu.wgmma(acc, w_s.at[slot, i], tokens)
                        else:
                            plgpu.wgmma(sums[0], w_s.at[slot, thread], x_s.at[slot].T)

                    def release(k: Any) -> None:
                        plgpu.barrier_arrive(empty.at[lax.rem(start + k, jnp.int32(slots))])

                    def scope(*sums: Any) -> tuple[jax.Array, ...]:
                        def step(k: Any, carry: Any) -> Any:
                            multiply(k, sums)
                            plgpu.wgmma_wait(len(sums))  # the step before has been read
                            release(k - 1)
                            return carry

                        multiply(0, sums)
                        lax.fori_loop(1, steps // S, step, 0)
                        plgpu.wgmma_wait(0)
                        release(steps // S - 1)
                        return tuple(acc[...] for acc in sums)

                    found: tuple[jax.Array, ...] = pl.run_scoped(scope, *accumulators)
                    return found

                def add_part(i: Any, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    return tuple(a + b for a, b in zip(total, part(i * (steps // S)), strict=True))

                total = lax.fori_loop(1, S, add_part, part(0))
                if scale_g is not None:
                    width, own = (half, token + thread * half) if gate else (columns, token)
                    by = across(load(scale_g.at[pl.ds(own, width)], WGMMA.reduce(0)), width)
                    total = tuple(x * by for x in total)
                if gate:
                    rows, tokens = pl.ds(pair * TILE, TILE), token + thread * half
                    y = total[0] / (1 + jnp.exp(-total[0])) * total[1]
                else:
                    rows, tokens, y = pl.ds((pair * 2 + thread) * TILE, TILE), token, total[0]
                if dtype != jnp.bfloat16:
                    store_tokens(out_g.at[pl.ds(tokens, columns), rows], y)
                    return carry
                count = y.shape[1] // chunk
                for i in range(count):  # by way of shared memory: the next item need not wait
                    stage = out_s.at[thread, lax.rem(n * count + i, jnp.int32(2))]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    values = y[:, i * chunk : (i + 1) * chunk].astype(jnp.bfloat16)
                    stage.T[...] = plgpu.layout_cast(values, TRANSPOSED)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, out_g.at[pl.ds(tokens + i * chunk, chunk), rows])
                return carry

            lax.fori_loop(0, mine, item, 0)
            plgpu.wait_smem_to_gmem(0)

    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=shaped((T, F // 2 if gate else F), dtype),
        scratch_types=[
            plgpu.SMEM((slots, 2, TILE, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, columns, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((2, 2, chunk, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=3, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        grid=(sms,),
        grid_names=("block",),
        num_threads=3,
        thread_name="thread",
        compiler_params=LANE,
    )(tiles, x, *[operand for operand in (layer, scale) if operand is not None])
    return made
