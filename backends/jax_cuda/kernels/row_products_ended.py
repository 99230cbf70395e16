"""The end of a product of many tokens, in a launch of its own: the sums that `tiled` left, finished as `stream` does.

What a token comes to is the same expression, by the same code, as where `stream` ends: so it has the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import TRANSPOSED, WGMMA, across, launch, load, plgpu, shaped, store
from mlxcel_jax_cuda.kernels.row_products_ends import End
from mlxcel_jax_cuda.kernels.row_products_stream import inverse_rms
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.kernels.sizes import TILE

COLUMNS = 32
"""Tokens of a block."""


@functools.partial(jax.jit, static_argnames=("depth", "eps"))
def inverse_rms_of(squares: jax.Array, *, depth: int, eps: float) -> jax.Array:
    """1 / rms of T tokens, float32 [T], as `stream` has it for a few. squares [D/64, T] float32, T a multiple of 32."""
    _check(squares.shape[1])

    def kernel(squares_g: Any, out_g: Any) -> None:
        tokens = pl.ds(lax.axis_index("tokens") * COLUMNS, COLUMNS)
        store(out_g.at[tokens], inverse_rms(squares_g.at[:, tokens], depth, eps))

    return _on_grid(kernel, [shaped((squares.shape[1],), jnp.float32)], [], squares, tokens=squares.shape[1])[0]


@functools.partial(jax.jit, static_argnames=("weight", "end", "eps"))
def ended(
    sums: jax.Array,
    squares: jax.Array | None = None,
    extra: tuple[jax.Array, ...] = (),
    layer: jax.Array | None = None,
    *,
    weight: Weight,
    end: End,
    eps: float = 0.0,
) -> tuple[jax.Array, ...]:
    """What `stream` gives of the product whose sums these are, [T, F] float32 in the order of the weight's tiles, T a
    multiple of 32. All else as there, of T tokens."""
    T = sums.shape[0]
    _check(T)
    if sums.shape != (T, weight.rows):
        raise ValueError(f"sums are {sums.shape}, of this weight they are [T, {weight.rows}]")
    pools = [jax.new_ref(pool) for pool in extra[len(extra) - end.in_place :]]
    inputs = [*([] if squares is None else [squares]), *extra[: len(extra) - end.in_place], *pools]
    own, place, out = end.scratch(COLUMNS), [] if layer is None else [layer], end.out(weight, T)
    extra_axes, out_axes = end.token_axes

    def kernel(sums_g: Any, *refs: Any) -> None:
        layer_g, refs = refs[: len(place)], refs[len(place) :]
        inputs_g, rest = refs[: len(inputs)], refs[len(inputs) :]
        out_g, own_s = rest[: len(out)], rest[len(out) :]
        item, tokens = lax.axis_index("item"), pl.ds(lax.axis_index("tokens") * COLUMNS, COLUMNS)

        def of_tokens(refs: Any, axes: Any) -> tuple[Any, ...]:
            return tuple(
                ref if axis is None else ref.at[(*[slice(None)] * axis, tokens)]
                for ref, axis in zip(refs, axes, strict=True)
            )

        squares_g, extra_g = (None, inputs_g) if squares is None else (inputs_g[0], inputs_g[1:])
        extra_g, out_g = of_tokens(extra_g, extra_axes), of_tokens(out_g, out_axes)
        number = layer_g[0][0] if layer_g else jnp.int32(0)
        ready = end.before(item, number, extra_g)
        rows = [pl.ds((item * weight.pair + i) * TILE, TILE) for i in range(weight.pair)]
        totals = [plgpu.layout_cast(load(sums_g.at[tokens, row].T, TRANSPOSED), WGMMA) for row in rows]
        if squares_g is not None:
            by = across(inverse_rms(squares_g.at[:, tokens], weight.depth, eps), COLUMNS)
            totals = [total * by for total in totals]
        end.finish(totals, item, number, ready, extra_g, out_g, own_s)

    made = _on_grid(kernel, out, own, sums, *place, *inputs, items=weight.items, tokens=T)
    return (*made, *(jax.freeze(pool) for pool in pools))


def _on_grid(
    kernel: Any, out: list[Any], scratch: list[Any], *operands: Any, tokens: int, items: int = 1
) -> tuple[jax.Array, ...]:
    """One warpgroup for each item and so many tokens."""
    return launch(
        kernel,
        out,
        scratch,
        *operands,
        grid=(items, tokens // COLUMNS),
        grid_names=("item", "tokens"),
        num_threads=1,
        thread_name="thread",
    )


def _check(tokens: int) -> None:
    if tokens % COLUMNS or not tokens:
        raise ValueError(f"{tokens} tokens: they must be a multiple of {COLUMNS}")
