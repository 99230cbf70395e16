"""What the sums of many tokens are multiplied by: their norms' 1 / rms, which `stream` takes from its own inputs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import launch, shaped, store
from mlxcel_jax_cuda.kernels.row_products_stream import inverse_rms

COLUMNS = 32
"""Tokens of a block."""


@functools.partial(jax.jit, static_argnames=("depth", "eps"))
def inverse_rms_of(squares: jax.Array, *, depth: int, eps: float) -> jax.Array:
    """1 / rms of T tokens, float32 [T], as `stream` has it for a few. squares [D/64, T] float32, T a multiple of 32."""
    T = squares.shape[1]
    if T % COLUMNS or not T:
        raise ValueError(f"{T} tokens: they must be a multiple of {COLUMNS}")

    def kernel(squares_g: Any, out_g: Any) -> None:
        tokens = pl.ds(lax.axis_index("tokens") * COLUMNS, COLUMNS)
        store(out_g.at[tokens], inverse_rms(squares_g.at[:, tokens], depth, eps))

    return launch(
        kernel,
        [shaped((T,), jnp.float32)],
        [],
        squares,
        grid=(T // COLUMNS,),
        grid_names=("tokens",),
        num_threads=1,
        thread_name="thread",
    )[0]
