"""Row products on Hopper: y[T, F] = x[T, D] @ w[F, D].T, with the same bits per row for every T and every place.

The product is swapped: the weight is wgmma's 64-row operand and the tokens its columns. One order of summation, fixed
by the weight alone (`Weight`): the depth is cut into `split` equal parts, a part is one chain of steps into one float32
accumulator, and the parts are added in index order. `stream` carries it out for few tokens, `tiled` for many,
`gated` for many and a gate. Which one ran, and with how many columns, does not show in the bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mlxcel_jax_cuda.kernels import row_products_stream, row_products_tiled
from mlxcel_jax_cuda.kernels.layers import layer_operand
from mlxcel_jax_cuda.kernels.row_products_ends import Gate, Store
from mlxcel_jax_cuda.kernels.row_products_gated import gated
from mlxcel_jax_cuda.kernels.row_products_stream import stream
from mlxcel_jax_cuda.kernels.row_products_tiled import tiled
from mlxcel_jax_cuda.kernels.row_products_weight import (
    Stacked,
    Weight,
    natural_columns,
    own_tiles,
    product_reference,
)
from mlxcel_jax_cuda.kernels.sizes import SMS


def columns_for(tokens: int, weight: Weight) -> int:
    """Columns of the launch for T tokens: the fewest that hold them, or the most there are, several times."""
    most = row_products_tiled.MOST_SPLIT_COLUMNS if weight.split > 1 else row_products_tiled.COLUMNS[-1]
    known = (*row_products_stream.COLUMNS, *row_products_tiled.COLUMNS)
    return next((columns for columns in known if tokens <= columns <= most), most)


def row_product(
    tiles: jax.Array,
    x: jax.Array,
    weight: Weight,
    *,
    layer: int | None = None,
    at: Stacked | None = None,
    dtype: Any = jnp.bfloat16,
    columns: int | None = None,
    sms: int = SMS,
) -> jax.Array:
    """x [T, D] bf16 times a packed weight -> [T, F], bf16 or float32, the rows of a weight as the family has them.

    `layer` and `at`: of tiles of several layers. `columns` (8, 16, 32, 64, 128, 256) is for
    measuring; `columns_for` chooses. Without SMs by the formula, on any device and in x's type. ValueError for shapes
    that do not fit.
    """
    if not sms:
        return product_reference(own_tiles(tiles, weight, layer, at), x, weight).astype(dtype)
    padded, count = _padded(x, weight, columns)
    if count in row_products_stream.COLUMNS:
        (y,) = stream(tiles, padded, layer=layer_operand(layer), weight=weight, end=Store(dtype), sms=sms, at=at)
    else:
        (y,) = tiled(tiles, padded, layer_operand(layer), weight=weight, columns=count, dtype=dtype, sms=sms, at=at)
    return natural_columns(y[: len(x)], weight)


def gated_product(
    tiles: jax.Array,
    x: jax.Array,
    weight: Weight,
    *,
    layer: int | None = None,
    at: Stacked | None = None,
    columns: int | None = None,
    sms: int = SMS,
) -> jax.Array:
    """silu(x @ gate.T) * (x @ up.T), [T, F/2] bf16, of a weight whose gate rows face its up rows. x [T, D] bf16.

    All else as in `row_product`."""
    if not sms:
        hidden: jax.Array = gated_reference(own_tiles(tiles, weight, layer, at), x, weight).astype(x.dtype)
        return hidden
    if weight.facing * 2 != weight.rows:
        raise ValueError(f"the gates of {weight} must face their ups: facing {weight.rows // 2}")
    padded, count = _padded(x, weight, columns)
    if count in row_products_stream.COLUMNS:
        (hidden,) = stream(tiles, padded, layer=layer_operand(layer), weight=weight, end=Gate(), sms=sms, at=at)
    else:
        hidden = gated(tiles, padded, layer_operand(layer), weight=weight, columns=count, sms=sms, at=at)
    real: jax.Array = hidden[: len(x)]
    return real


@functools.partial(jax.jit, static_argnames=("weight",))
def gated_reference(tiles: jax.Array, x: jax.Array, weight: Weight) -> jax.Array:
    """`gated_product` by jnp, in float32."""
    gate, up = jnp.split(product_reference(tiles, x, weight), 2, axis=1)
    hidden: jax.Array = jax.nn.silu(gate) * up
    return hidden


def _padded(x: jax.Array, weight: Weight, columns: int | None) -> tuple[jax.Array, int]:
    """x with tokens of zeros behind it, up to whole launches of so many columns."""
    if x.ndim != 2 or x.shape[1] != weight.depth or x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}: it must be bfloat16 [T, {weight.depth}]")
    count = columns_for(len(x), weight) if columns is None else columns
    return jnp.pad(x, ((0, -len(x) % count), (0, 0))), count
