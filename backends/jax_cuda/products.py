"""Matrix products, x [T, D] and w [F, D] -> [T, F], sums in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel_jax_cuda.numerics import TILE, Numerics


def row_products(matrix: jax.Array, x: jax.Array, numerics: Numerics, count: jax.Array | None = None) -> jax.Array:
    """x @ matrix.T, float32 [T, F]; only the first `count` tokens are asked for.

    At R2 on XLA:CPU tile by tile of eight rows, padded at the end. The number of tiles is known at run time alone, so
    the program of a tile is the same whatever T is.
    """
    if not numerics.tiled:
        return _product(x, matrix)
    tokens, depth = x.shape
    filled = jnp.pad(x, ((0, -tokens % TILE), (0, 0)))
    tiles = filled.shape[0] // TILE
    used = lax.optimization_barrier(jnp.int32(tiles)) if count is None else (count + TILE - 1) // TILE

    def tile(number: jax.Array, y: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice(filled, (number * TILE, 0), (TILE, depth))
        return lax.dynamic_update_slice(y, _product(rows, matrix), (number * TILE, 0))

    return lax.fori_loop(0, used, tile, jnp.zeros((tiles * TILE, matrix.shape[0]), jnp.float32))[:tokens]


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("td,fd->tf", x, matrix, preferred_element_type=jnp.float32)
