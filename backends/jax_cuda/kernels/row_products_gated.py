"""Gated row products for many tokens: silu(gate) * up, of 64 gate rows and the 64 that they face by up to 256 tokens a
block.

The copy engine lays 8 rows of gates and the 8 of their ups in turns, so that each of a block's two compute warpgroups
has 32 gates and their ups as one operand of 64 rows, with all the tokens beside them. A thread then has the sums of a
gate in the one half of its registers and those of its up in the other. A sum is the same chain of products as in
`stream`: which row of an operand it belongs to is not in it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir.dialects import arith as _arith

from mlxcel_jax_cuda.kernels.mosaic import TILED, WGMMA, across, launch, plgpu, shaped, tiling
from mlxcel_jax_cuda.kernels.persistent_ptx import integer, shared_address, store_matrices, this_thread, word_of
from mlxcel_jax_cuda.kernels.row_products_order import banded
from mlxcel_jax_cuda.kernels.row_products_parts import sums_of_parts
from mlxcel_jax_cuda.kernels.row_products_scales import Scales, scale_or_squares
from mlxcel_jax_cuda.kernels.row_products_tiled import COLUMNS, MOST_SPLIT_COLUMNS, band_of
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight, check_tiles
from mlxcel_jax_cuda.kernels.sizes import SMS, TILE

arith: Any = _arith

SMEM_BYTES = 226 * 1024
"""For operands and results: this kernel has no other scratch than barriers."""

GROUP = 8
"""Rows that the swizzle keeps together."""

ROWS = TILE // 2
"""Gates of a warpgroup."""

STAGED = tiling(ROWS * 2)(2)


@functools.partial(jax.jit, static_argnames=("weight", "columns", "eps", "sms", "at"))
def gated(
    tiles: jax.Array,
    x: jax.Array,
    layer: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    weight: Weight,
    columns: int,
    eps: float | None = None,
    sms: int = SMS,
    at: Stacked | None = None,
) -> jax.Array:
    """silu(gate) * up of many tokens, [T, F/2] bf16.

    tiles: packed [F * D / 64, 64] bf16 of a weight whose rows face those F / 2 behind them. x: [T, D] bf16, T a
    multiple of columns (64, 128 or 256; 128 at most where the weight is split). scale, eps, layer, at: as in `tiled`.
    """
    (T, D), F, S, half = x.shape, weight.rows, weight.split, columns // 2
    if columns not in COLUMNS or T % columns or weight.depth != D:
        raise ValueError(
            f"x is {x.shape}: T must be a multiple of columns={columns} (64, 128 or 256), and D {weight.depth}"
        )
    if S > 1 and columns > MOST_SPLIT_COLUMNS:
        raise ValueError(f"columns={columns} leave no registers for the parts of a split weight: 128 at most")
    if weight.facing != F // 2:
        raise ValueError(f"a gate needs rows that face their ups, F / 2 = {F // 2} apart, not {weight.facing}")
    check_tiles(tiles.shape, weight, layer, at)
    steps, token_tiles, pairs = D // TILE, T // columns, F // (2 * TILE)
    if at and (at.first % D or at.stride % D):
        raise ValueError(f"tiles lie as {at}: a gate's must begin at a multiple of {D}, as many as 64 of its rows take")
    scale, eps = scale_or_squares(scale, eps, D, columns)
    band, items = band_of(T, columns), pairs * token_tiles
    chunk = min(TILE, half)  # tokens of either half that go to device memory together
    staged = (2, 2, 2, chunk, ROWS)
    room = [] if eps is None else [plgpu.SMEM((2, columns), jnp.float32)]
    slots = min((SMEM_BYTES - 2 * int(np.prod(staged)) - 8 * columns) // ((2 * TILE + columns) * TILE * 2), 8)
    optional = [operand for operand in (layer, scale) if operand is not None]
    accumulators = [plgpu.ACC((TILE, columns), jnp.float32)]

    def kernel(tiles_g: Any, x_g: Any, *refs: Any) -> None:
        few, (out_g, w_s, x_s, full, empty, stage_s, *room_s) = (
            list(refs[: len(optional)]),
            refs[len(optional) :],
        )
        rows_s, groups_s = w_s
        scale_g = None if scale is None else few.pop()
        thread, block = lax.axis_index("thread"), lax.axis_index("block")
        mine = lax.div(items - block + sms - 1, jnp.int32(sms))

        def place(n: Any) -> tuple[Any, Any]:
            return banded(block + n * sms, pairs, band)

        @pl.when(thread == 2)
        def _memory_warpgroup() -> None:
            base = lax.div(few[0][0] * at.stride + at.first, jnp.int32(D)) if at else 0
            plgpu.set_max_registers(40, action="decrease")

            def item(n: Any, carry: Any) -> Any:
                pair, token = place(n)

                def fetch(k: Any, carry: Any) -> Any:
                    slot = lax.rem(n * steps + k, jnp.int32(slots))
                    plgpu.barrier_wait(empty.at[slot])
                    facing = groups_s.at[slot].transpose((1, 0, 2, 3))
                    plgpu.copy_gmem_to_smem(tiles_g.at[pl.ds(base + pair * 2, 2), k], facing, full.at[slot])
                    depth = pl.ds(pl.multiple_of(k * TILE, TILE), TILE)
                    tokens = pl.ds(pl.multiple_of(token * columns, columns), columns)
                    plgpu.copy_gmem_to_smem(x_g.at[tokens, depth], x_s.at[slot], full.at[slot])
                    return carry

                return lax.fori_loop(0, steps, fetch, carry)

            lax.fori_loop(0, mine, item, 0)

        @pl.when(thread < 2)
        def _compute_warpgroups() -> None:
            plgpu.set_max_registers(232, action="increase")
            scales = Scales(scale_g, room_s[0].at[thread] if room_s else None, eps, D, columns)
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])

            def item(n: Any, carry: Any) -> Any:
                pair, token = place(n)
                start = n * steps

                def multiply(k: Any, sums: tuple[Any, ...]) -> None:
                    slot = lax.rem(start + k, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(sums[0], rows_s.at[slot, thread], x_s.at[slot].T)

                def release(k: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(start + k, jnp.int32(slots))])

                def prepare() -> list[jax.Array]:
                    return scales.ahead(token * columns, 0, columns, columns)

                (total,), ahead = sums_of_parts(S, steps, accumulators, multiply, release, prepare)
                for by in scales.found(ahead, 0, columns, columns):
                    total = total * across(by, columns)
                gate, up = facing_rows(total)
                y = (gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16)
                rows, count = pl.ds(pair * TILE + thread * ROWS, ROWS), half // chunk
                for i in range(count):  # by way of shared memory: the next item need not wait
                    stage = stage_s.at[thread, lax.rem(n * count + i, jnp.int32(2))]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    put_halves(y[:, i * chunk : (i + 1) * chunk], stage)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, out_g.at[pl.ds(token * 2, 2), pl.ds(i * chunk, chunk), rows])
                return carry

            lax.fori_loop(0, mine, item, 0)
            plgpu.wait_smem_to_gmem(0)

    (made,) = launch(
        kernel,
        [shaped((2 * token_tiles, half, F // 2), jnp.bfloat16)],
        [
            plgpu.RefUnion(
                plgpu.SMEM((slots, 2, TILE, TILE), jnp.bfloat16, transforms=TILED),
                plgpu.SMEM((slots, 2 * TILE // (2 * GROUP), 2, GROUP, TILE), jnp.bfloat16, transforms=TILED),
            ),
            plgpu.SMEM((slots, columns, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.SMEM(staged, jnp.bfloat16, transforms=STAGED),
            *room,
        ],
        *(tiles.reshape(-1, steps, TILE // GROUP, GROUP, TILE), x, *optional),
        grid=(sms,),
        grid_names=("block",),
        num_threads=3,
        thread_name="thread",
    )
    return made.reshape(T, F // 2)


def facing_rows(sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums [64, N] of 8 rows and of the 8 that they face in turns -> both, [64, N / 2]: 8 rows with the first half of
    the tokens and the same 8 with the second, in turns. No value leaves its thread."""
    side = plgpu.ShapeDtypeStruct((TILE, sums.shape[1] // 2), sums.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=(side, side))  # type: ignore[untyped-decorator]
    def halves(_context: Any, values: Any) -> Any:
        _, wide, *rest = values.registers.shape
        return tuple(regrouped(values, i, wide // 2, rest) for i in (0, 1))

    found: tuple[jax.Array, jax.Array] = halves(sums)
    return found


def regrouped(values: Any, side: int, wide: int, rest: list[int]) -> Any:
    """Registers are [1, N / 8, …, 2, …]: columns by eights, and of two rows eight apart which."""
    made = np.empty((1, wide, *rest), dtype=object)
    for half in (0, 1):
        made[:, :, :, :, half] = values.registers[:, half * wide : (half + 1) * wide, :, :, side]
    return type(values)(_registers=made, _layout=values.layout, _is_signed=values.is_signed)


def put_halves(values: jax.Array, stage: Any) -> None:
    """values [64, N] bf16 as of `facing_rows` -> stage [2, N, 32], rows behind one another, swizzled by 64 bytes."""

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType(STAGED)))  # type: ignore[untyped-decorator]
    def put(_context: Any, values: Any, ref: Any) -> None:
        registers, thread = values.registers, this_thread()
        lane, warp = arith.andi(thread, integer(31)), arith.shrui(thread, integer(5))
        chunk = arith.xori(warp, arith.andi(arith.shrui(lane, integer(1)), integer(3)))
        own = arith.addi(arith.muli(lane, integer(ROWS * 2)), arith.muli(chunk, integer(16)))
        address = arith.addi(shared_address(ref), own)
        wide = registers.shape[1]
        for half in (0, 1):
            for first in range(0, wide, 4):  # 32 tokens, of which each lane tells the place of one
                words = [word_of(register) for register in registers[0, first : first + 4, 0, 0, half].flat]
                store_matrices(address, (half * wide + first) * GROUP * ROWS * 2, words)

    put(values, stage)
