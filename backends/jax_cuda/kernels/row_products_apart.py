"""Row products for some tokens by a weight that is split: each part of its depth by a block of its own, and a second
launch that adds the parts and ends them.

Between `stream`, whose tokens are few, and `tiled`, which has blocks enough where tokens are many: of 128 tokens and a
weight of 32 row tiles `tiled` is 16 blocks that work a part after the other. The parts are added in index order, so
that this does not show in the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import TILED, across, launch, load, plgpu, shaped, store
from mlxcel_jax_cuda.kernels.row_products_ends import End
from mlxcel_jax_cuda.kernels.row_products_order import banded
from mlxcel_jax_cuda.kernels.row_products_parts import added_in_order, sums_of_parts
from mlxcel_jax_cuda.kernels.row_products_stream import inverse_rms
from mlxcel_jax_cuda.kernels.row_products_tiled import END_COLUMNS, of_tokens
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight, check_tiles
from mlxcel_jax_cuda.kernels.sizes import SMEM_BYTES, SMS, TILE

COLUMNS = (64, 128)


def worth_it(tokens: int, weight: Weight, sms: int) -> bool:
    """Whether `tiled` of one tile of tokens would leave half of the device without a block, and parts are there to
    take. Of more tokens the second launch costs what the blocks gain (docs/rejected.md)."""
    return weight.split > 1 and tokens <= COLUMNS[-1] and weight.rows // (2 * TILE) * 2 <= sms


@functools.partial(jax.jit, static_argnames=("weight", "columns", "end", "eps", "sms", "at"))
def apart(
    tiles: jax.Array,
    x: jax.Array,
    layer: jax.Array | None = None,
    squares: jax.Array | None = None,
    extra: tuple[jax.Array, ...] = (),
    *,
    weight: Weight,
    columns: int,
    end: End,
    eps: float | None = None,
    sms: int = SMS,
    at: Stacked | None = None,
) -> tuple[jax.Array, ...]:
    """One split weight's product for T tokens: what `end` gives, then what it wrote in place. As `tiled` with an end;
    squares: [D/64, T] float32 with `eps`, of which 1 / rms multiplies the sums."""
    parts = parts_of(tiles, x, layer, weight=weight, columns=columns, sms=sms, at=at)
    made: tuple[jax.Array, ...] = ended(parts, layer, squares, extra, weight=weight, end=end, eps=eps)
    return made


@functools.partial(jax.jit, static_argnames=("weight", "columns", "sms", "at"))
def parts_of(
    tiles: jax.Array,
    x: jax.Array,
    layer: jax.Array | None = None,
    *,
    weight: Weight,
    columns: int,
    sms: int = SMS,
    at: Stacked | None = None,
) -> jax.Array:
    """The parts of a product, [S, F/64, 64, T] float32, the rows of a paired weight in the order of its tiles. tiles:
    packed [F * D / 64, 64] bf16; x: [T, D] bf16, T a multiple of columns (64 or 128); layer and at: as in `stream`."""
    (T, D), F, S = x.shape, weight.rows, weight.split
    if columns not in COLUMNS or T % columns or weight.depth != D:
        raise ValueError(f"x is {x.shape}: T must be a multiple of columns={columns} (64 or 128), and D {weight.depth}")
    check_tiles(tiles.shape, weight, layer, at)
    steps, token_tiles, pairs = D // TILE, T // columns, F // (2 * TILE)
    own = steps // S
    slots = min((SMEM_BYTES + 2048) // ((2 * TILE + columns) * TILE * 2), 8)
    items = pairs * token_tiles * S
    place = [] if layer is None else [layer]

    def kernel(tiles_g: Any, x_g: Any, *refs: Any) -> None:
        layer_g, (parts_g, w_s, x_s, full, empty) = refs[: len(place)], refs[len(place) :]
        thread, block = lax.axis_index("thread"), lax.axis_index("block")
        mine = lax.div(items - block + sms - 1, jnp.int32(sms))

        def find(n: Any) -> tuple[Any, Any, Any]:
            """Parts vary slowest: blocks side by side read the same tokens."""
            item = block + n * sms
            part, within = lax.div(item, jnp.int32(pairs * token_tiles)), lax.rem(item, jnp.int32(pairs * token_tiles))
            pair, token = banded(within, pairs, token_tiles)
            return part, pair, token * columns

        @pl.when(thread == 2)
        def _memory_warpgroup() -> None:
            base = layer_g[0][0] * at.stride + at.first if at else 0
            plgpu.set_max_registers(40, action="decrease")

            def item(n: Any, carry: Any) -> Any:
                part, pair, token = find(n)

                def fetch(k: Any, carry: Any) -> Any:
                    slot, step = lax.rem(n * own + k, jnp.int32(slots)), part * own + k
                    plgpu.barrier_wait(empty.at[slot])
                    for i in range(2):
                        row = pl.multiple_of(base + ((pair * 2 + i) * steps + step) * TILE, TILE)
                        plgpu.copy_gmem_to_smem(tiles_g.at[pl.ds(row, TILE)], w_s.at[slot, i], full.at[slot])
                    depth = pl.ds(pl.multiple_of(step * TILE, TILE), TILE)
                    tokens = pl.ds(pl.multiple_of(token, columns), columns)
                    plgpu.copy_gmem_to_smem(x_g.at[tokens, depth], x_s.at[slot], full.at[slot])
                    return carry

                return lax.fori_loop(0, own, fetch, carry)

            lax.fori_loop(0, mine, item, 0)

        @pl.when(thread < 2)
        def _compute_warpgroups() -> None:
            plgpu.set_max_registers(232, action="increase")
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])

            def item(n: Any, carry: Any) -> Any:
                part, pair, token = find(n)

                def multiply(k: Any, sums: tuple[Any, ...]) -> None:
                    slot = lax.rem(n * own + k, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(sums[0], w_s.at[slot, thread], x_s.at[slot].T)

                def release(k: Any) -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(n * own + k, jnp.int32(slots))])

                accumulators = [plgpu.ACC((TILE, columns), jnp.float32)]
                (total,), _ = sums_of_parts(1, own, accumulators, multiply, release, lambda: None)
                store(parts_g.at[part, pair * 2 + thread, :, pl.ds(token, columns)], total)
                return carry

            lax.fori_loop(0, mine, item, 0)

    (parts,) = launch(
        kernel,
        [shaped((S, F // TILE, TILE, T), jnp.float32)],
        [
            plgpu.SMEM((slots, 2, TILE, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, columns, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=3, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        *(tiles, x, *place),
        grid=(min(sms, items),),
        grid_names=("block",),
        num_threads=3,
        thread_name="thread",
    )
    return parts


@functools.partial(jax.jit, static_argnames=("weight", "end", "eps"))
def ended(
    parts: jax.Array,
    layer: jax.Array | None = None,
    squares: jax.Array | None = None,
    extra: tuple[jax.Array, ...] = (),
    *,
    weight: Weight,
    end: End,
    eps: float | None = None,
) -> tuple[jax.Array, ...]:
    """What `end` makes of the parts that `parts_of` gave, T a multiple of 32, 32 tokens of a row tile or a pair a
    block; then what it wrote in place."""
    S, count, rows, T = parts.shape
    if (S, count, rows) != (weight.split, weight.rows // TILE, TILE) or T % END_COLUMNS:
        raise ValueError(f"parts are {parts.shape}: not those of {weight} and of whole {END_COLUMNS} tokens")
    if (squares is None) != (eps is None):
        raise ValueError("squares and eps must be there together")
    pools = [jax.new_ref(pool) for pool in extra[len(extra) - end.in_place :]]
    given = [*extra[: len(extra) - len(pools)], *pools]
    optional = [operand for operand in (layer, squares) if operand is not None]
    out, pair = end.out(weight, T), weight.pair

    def kernel(parts_g: Any, *refs: Any) -> None:
        few, refs = list(refs[: len(optional)]), refs[len(optional) :]
        extra_g, refs = refs[: len(given)], refs[len(given) :]
        outs_g, own_s = refs[: len(out)], refs[len(out) :]
        squares_g: Any = None if squares is None else few.pop()
        number = few[0][0] if few else jnp.int32(0)
        item, tokens = lax.axis_index("item"), pl.ds(lax.axis_index("run") * END_COLUMNS, END_COLUMNS)
        extra_axes, out_axes = end.token_axes
        own, made = of_tokens(extra_g, extra_axes, tokens), of_tokens(outs_g, out_axes, tokens)
        ready = end.before(item, number, own)
        scale = None if eps is None else inverse_rms(squares_g.at[:, tokens], weight.depth, eps)

        def part(number: int) -> Iterator[jax.Array]:
            return (load(parts_g.at[number, item * pair + i, :, tokens]) for i in range(pair))

        sums = added_in_order(S, part)
        if scale is not None:
            sums = [total * across(scale, END_COLUMNS) for total in sums]
        end.finish(sums, item, number, ready, own, made, own_s)
        plgpu.wait_smem_to_gmem(0)

    result = launch(
        kernel,
        out,
        end.scratch(END_COLUMNS),
        *(parts, *optional, *given),
        grid=(weight.items, T // END_COLUMNS),
        grid_names=("item", "run"),
        num_threads=1,
        thread_name="thread",
    )
    return (*result, *(jax.freeze(pool) for pool in pools))
