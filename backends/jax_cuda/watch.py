"""Where the numbers of a forward stop being finite: looked at for each layer and token, where somebody asked for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mlxcel.core.plan import FINITE
from mlxcel_jax_cuda.launch import Fields


def nothing_seen(tokens: int) -> jax.Array:
    """int32 [T], before any layer ran."""
    return jnp.full(tokens, FINITE, jnp.int32)


def look(seen: jax.Array, layer: int, x: jax.Array) -> jax.Array:
    """`seen` [T], with `layer` for tokens that were finite so far and are not in its output x [T, …]."""
    finite = jnp.all(jnp.isfinite(x.reshape(len(x), -1)), axis=1)
    return jnp.where((seen == FINITE) & ~finite, jnp.int32(layer), seen)


def of_rows(seen: jax.Array, fields: Fields) -> jax.Array:
    """int32 [S]: the first layer of any real token of a row, of `seen` [T] of all tokens."""
    positions = fields.positions
    return jnp.min(jnp.where(positions < 0, FINITE, seen.reshape(positions.shape)), axis=1)
