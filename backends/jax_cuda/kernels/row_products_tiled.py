"""Row products for many tokens: 128 rows of the weight by up to 256 tokens a block, both streamed.

A block does the parts of a tile's depth one after the other, in the order in which `stream` adds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import (
    TILED,
    TRANSPOSED,
    across,
    launch,
    plgpu,
    shaped,
    store_tokens,
    tiling,
)
from mlxcel_jax_cuda.kernels.row_products_ends import End
from mlxcel_jax_cuda.kernels.row_products_order import banded
from mlxcel_jax_cuda.kernels.row_products_parts import RUN, Sums, sums_of_parts, sums_with_room
from mlxcel_jax_cuda.kernels.row_products_scales import Scales, scale_or_squares
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight, check_tiles
from mlxcel_jax_cuda.kernels.sizes import SMEM_BYTES, SMS, TILE

COLUMNS = (64, 128, 256)
END_COLUMNS = RUN
"""Tokens that are ended at a time."""

BAND = 2048
"""Tokens for which all rows of a weight pass before those behind them: the L2 holds them meanwhile."""

MOST_SPLIT_COLUMNS = 128
"""Of a split weight whose parts are added in registers alone."""

RUNS_AWAY = 3
"""Of the eight runs of a warpgroup's sums so far those that are in shared memory, where a split weight has more
columns."""


@functools.partial(jax.jit, static_argnames=("weight", "columns", "end", "dtype", "eps", "sms", "at"))
def tiled(
    tiles: jax.Array,
    x: jax.Array,
    layer: jax.Array | None = None,
    scale: jax.Array | None = None,
    extra: tuple[jax.Array, ...] = (),
    *,
    weight: Weight,
    columns: int,
    end: End | None = None,
    dtype: Any = jnp.bfloat16,
    eps: float | None = None,
    sms: int = SMS,
    at: Stacked | None = None,
) -> tuple[jax.Array, ...]:
    """One weight's product for many tokens. Each of a block's two compute warpgroups makes 64 of its 128 rows, or where
    an `end` takes pairs both sides of a pair for half of the tokens, so that they meet in one thread.

    tiles: packed [F * D / 64, 64] bf16.   x: [T, D] bf16, T a multiple of columns (64, 128 or 256; of a split weight
    256 only with an end, and neither a scale nor pairs). Returns y [T, F] of `dtype`, bf16 or float32, the rows of a
    paired weight in the order of its tiles; with an `end` what it gives and wrote in place, of T tokens.
    scale [T] float32: what a token's sums are multiplied by; with `eps` [D/64, T], sums of squares, of which it is
    1 / rms. extra, layer and at: as in `stream`.
    """
    (T, D), F, S, half = x.shape, weight.rows, weight.split, columns // 2
    if columns not in COLUMNS or T % columns or weight.depth != D:
        raise ValueError(
            f"x is {x.shape}: T must be a multiple of columns={columns} (64, 128 or 256), and D {weight.depth}"
        )
    check_tiles(tiles.shape, weight, layer, at)
    both = end is not None and weight.pair > 1
    away = S > 1 and columns > MOST_SPLIT_COLUMNS
    if away and (end is None or both or scale is not None):
        raise ValueError(
            f"columns={columns} of a split weight: 128 at most without an end, with a scale, or of a paired weight"
        )
    scale, eps = scale_or_squares(scale, eps, D, columns)
    steps, token_tiles = D // TILE, T // columns
    pools = [jax.new_ref(pool) for pool in extra[len(extra) - end.in_place :]] if end is not None else []
    given = [*extra[: len(extra) - len(pools)], *pools]
    optional = [operand for operand in (layer, scale) if operand is not None]
    out = [shaped((T, F), dtype)] if end is None else end.out(weight, T)
    chunk = TILE if columns > TILE else TILE // 2  # tokens of an output tile on its way to device memory
    if end is None:
        stages = [plgpu.SMEM((2, 2, chunk, TILE), jnp.bfloat16, transforms=TILED)]
    else:
        stages = end.scratch(END_COLUMNS, 2)
    room = [] if eps is None else [plgpu.SMEM((2, columns), jnp.float32)]
    apart = [plgpu.SMEM((2, RUNS_AWAY, TILE, RUN), jnp.float32, transforms=tiling(128)(4))] if away else []
    taken = sum(math.prod(own.shape) * jnp.dtype(own.dtype).itemsize for own in (*stages, *room, *apart))
    slots = min((SMEM_BYTES + 2048 - taken) // ((2 * TILE + columns) * TILE * 2), 8)
    pairs = F // (2 * TILE)
    band = band_of(T, columns)
    items = pairs * token_tiles
    accumulators = [plgpu.ACC((TILE, half), jnp.float32)] * 2 if both else [plgpu.ACC((TILE, columns), jnp.float32)]

    def kernel(tiles_g: Any, x_g: Any, *refs: Any) -> None:
        few, refs = list(refs[: len(optional)]), refs[len(optional) :]
        extra_g, refs = refs[: len(given)], refs[len(given) :]
        outs_g, (w_s, x_s, full, empty, *rest) = refs[: len(out)], refs[len(out) :]
        room_s, rest = rest[: len(room)], rest[len(room) :]
        apart_s, staged = rest[: len(apart)], rest[len(apart) :]
        scale_g = None if scale is None else few.pop()
        layer_g, out_g = few, outs_g[0]
        thread, block = lax.axis_index("thread"), lax.axis_index("block")
        mine = lax.div(items - block + sms - 1, jnp.int32(sms))

        def place(n: Any) -> tuple[Any, Any]:
            pair, token = banded(block + n * sms, pairs, band)
            return pair, token * columns

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
            number = layer_g[0][0] if layer_g and end is not None else jnp.int32(0)
            plgpu.set_max_registers(232, action="increase")
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])

            def few_of(end: End, pair: Any, token: Any, i: int) -> tuple[Any, Any, Any]:
                """Of an item's i-th few tokens: the row tile, and what the end is given of them."""
                extra_axes, out_axes = end.token_axes
                own, first = (pair, token + thread * half) if both else (pair * 2 + thread, token)
                tokens = pl.ds(first + i * END_COLUMNS, END_COLUMNS)
                return own, of_tokens(extra_g, extra_axes, tokens), of_tokens(outs_g, out_axes, tokens)

            def buffers(i: int) -> tuple[Any, ...]:
                return tuple(ref.at[thread, i % ref.shape[1]] for ref in staged)

            def before(end: End, pair: Any, token: Any, i: int) -> Any:
                own, extra, _ = few_of(end, pair, token, i)
                return end.before(own, number, extra)

            scales = Scales(scale_g, room_s[0].at[thread] if room_s else None, eps, D, columns)
            first_column, own_columns = (thread * half, half) if both else (0, columns)
            width = own_columns if end is None else END_COLUMNS

            def prepare(pair: Any, token: Any) -> tuple[list[jax.Array], list[Any]]:
                """Loads that go ahead of the sums: for their factors, and for the end of the first few tokens."""
                ready = [] if end is None else [before(end, pair, token, i) for i in range(end.ahead)]
                return scales.ahead(token, first_column, own_columns, width), ready

            def finish(
                end: End,
                sums_of: Callable[[int], Sums],
                by: list[jax.Array],
                pair: Any,
                token: Any,
                ready: list[Any],
            ) -> None:
                """A few tokens after the others, as `stream` has them; what they need is asked for early."""
                runs = own_columns // END_COLUMNS
                for i in range(runs):
                    ready += [before(end, pair, token, j) for j in range(len(ready), min(i + end.ahead + 1, runs))]
                    own, extra, out = few_of(end, pair, token, i)
                    sums = sums_of(i)
                    if by:
                        sums = [x * across(by[i], END_COLUMNS) for x in sums]
                    end.finish(sums, own, number, ready[i], extra, out, buffers(i))

            def item(n: Any, carry: Any) -> Any:
                pair, token = place(n)

                start = n * steps

                def multiply(k: Any, sums: tuple[Any, ...]) -> None:
                    slot = lax.rem(start + k, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    if both:
                        tokens = x_s.at[slot, pl.ds(thread * half, half)].T
                        for i, acc in enumerate(sums):
                            plgpu.wgmma(acc, w_s.at[slot, i], tokens)
                    else:
                        plgpu.wgmma(sums[0], w_s.at[slot, thread], x_s.at[slot].T)

                def release(k: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(start + k, jnp.int32(slots))])

                if end is not None and away:
                    sums_of = sums_with_room(S, steps, accumulators, multiply, release, apart_s[0].at[thread])
                    finish(end, sums_of, [], pair, token, [])
                    return carry
                total, (ahead, ready) = sums_of_parts(
                    S, steps, accumulators, multiply, release, lambda: prepare(pair, token)
                )
                by = scales.found(ahead, first_column, own_columns, width)
                if end is not None:

                    def sums_at(i: int) -> Sums:
                        return [x[:, i * END_COLUMNS : (i + 1) * END_COLUMNS] for x in total]

                    finish(end, sums_at, by, pair, token, list(ready))
                    return carry
                (y,) = [x * across(by[0], columns) for x in total] if by else total
                rows = pl.ds((pair * 2 + thread) * TILE, TILE)
                if dtype != jnp.bfloat16:
                    store_tokens(out_g.at[pl.ds(token, columns), rows], y)
                    return carry
                count = y.shape[1] // chunk
                for i in range(count):  # by way of shared memory: the next item need not wait
                    stage = staged[0].at[thread, lax.rem(n * count + i, jnp.int32(2))]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    values = y[:, i * chunk : (i + 1) * chunk].astype(jnp.bfloat16)
                    stage.T[...] = plgpu.layout_cast(values, TRANSPOSED)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, out_g.at[pl.ds(token + i * chunk, chunk), rows])
                return carry

            lax.fori_loop(0, mine, item, 0)
            plgpu.wait_smem_to_gmem(0)

    made = launch(
        kernel,
        out,
        [
            plgpu.SMEM((slots, 2, TILE, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, columns, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=3, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            *room,
            *apart,
            *stages,
        ],
        *(tiles, x, *optional, *given),
        grid=(sms,),
        grid_names=("block",),
        num_threads=3,
        thread_name="thread",
    )
    return (*made, *(jax.freeze(pool) for pool in pools))


def band_of(tokens: int, columns: int) -> int:
    """Token tiles of a band: the most that divide them, up to BAND tokens."""
    return max(size for size in range(1, BAND // columns + 1) if tokens // columns % size == 0)


def of_tokens(refs: Any, axes: tuple[int | None, ...], tokens: Any) -> tuple[Any, ...]:
    """Those tokens of what an end is given: see `End.token_axes`."""
    return tuple(
        ref if axis is None else ref.at[(*[slice(None)] * axis, tokens)] for ref, axis in zip(refs, axes, strict=True)
    )
