"""Matrix products, x [T, D] and w [F, D] -> [T, F], sums in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_products(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """x @ matrix.T, float32 [T, F]."""
    return jnp.einsum("td,fd->tf", x, matrix, preferred_element_type=jnp.float32)
