"""Matrix products, x [T, D] and w [F, D] -> [T, F], sums in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel_jax_cuda.numerics import TILE, Numerics


def row_products(matrix: jax.Array, x: jax.Array, numerics: Numerics) -> jax.Array:
    """x @ matrix.T, float32 [T, F]. At R2 on XLA:CPU tile by tile of eight rows, padded at the end."""
    if not numerics.tiled:
        return _product(x, matrix)
    tokens = x.shape[0]
    filled = jnp.pad(x, ((0, -tokens % TILE), (0, 0)))
    tiles = lax.map(lambda tile: _product(tile, matrix), filled.reshape(-1, TILE, x.shape[1]))
    return tiles.reshape(-1, matrix.shape[0])[:tokens]


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum("td,fd->tf", x, matrix, preferred_element_type=jnp.float32)
