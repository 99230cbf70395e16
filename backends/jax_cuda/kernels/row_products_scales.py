"""What the sums of many tokens are multiplied by: their norms' 1 / rms, which `stream` takes from its own inputs."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import WGMMA, launch, load, plgpu, shaped, store
from mlxcel_jax_cuda.kernels.row_products_stream import inverse_rms

COLUMNS = 32
"""Tokens of a block."""

THREADS = 128
"""Of a warpgroup."""

MOST_DEPTH = 2048
"""Of a product that works them out beside its own sums: registers hold no more sums of squares."""


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


def beside(depth: int, columns: int) -> bool:
    """Whether a product for so many tokens a block works 1 / rms out itself, instead of by a launch before it."""
    return depth <= MOST_DEPTH and columns % THREADS == 0


@attrs.frozen
class Scales:
    """What the sums of an item's `columns` tokens are multiplied by, as a warpgroup of a product has it: loads that go
    ahead of the sums, and what becomes of them."""

    given: Any  # in device memory: [T]; with `eps` the sums of squares [D/64, T] that 1 / rms is of; or None
    room: Any  # with `eps`: shared memory of the warpgroup, [columns]
    eps: float | None
    depth: int
    columns: int

    def ahead(self, token: Any, first: Any, count: int, width: int) -> list[jax.Array]:
        """Of an item whose tokens begin at `token`; the others are as in `found`."""
        if self.given is None:
            return []
        if self.eps is None:
            return [_factors(self.given, token + first + i, width) for i in range(0, count, width)]
        layout = plgpu.Layout.WG_STRIDED((self.columns,), vec_size=self.columns // THREADS)
        rows = range(self.given.shape[0])
        return [load(self.given.at[i, pl.ds(token, self.columns)], layout) for i in rows]

    def found(self, ahead: list[jax.Array], first: Any, count: int, width: int) -> list[jax.Array]:
        """Of `count` tokens from an item's `first` on, `width` by `width`: one a column. None if there are none."""
        if self.eps is None:
            return ahead
        layout = plgpu.Layout.WG_STRIDED((self.columns,), vec_size=self.columns // THREADS)
        none = plgpu.layout_cast(jnp.zeros((self.columns,), jnp.float32), layout)
        total = functools.reduce(jnp.add, ahead, none)  # as `inverse_rms` adds them
        plgpu.commit_smem()  # nobody reads those of the last item any more
        store(self.room, lax.rsqrt(total / self.depth + self.eps))
        plgpu.commit_smem()
        return [_factors(self.room, first + i, width) for i in range(0, count, width)]


def _factors(source: Any, first: Any, count: int) -> jax.Array:
    return load(source.at[pl.ds(first, count)], WGMMA.reduce(0))


def scale_or_squares(
    scale: jax.Array | None, eps: float | None, depth: int, columns: int
) -> tuple[jax.Array | None, float | None]:
    """Sums of squares, where `eps` says that they are, as 1 / rms by a launch of its own where a product cannot work
    that out itself."""
    if scale is not None and eps is not None and not beside(depth, columns):
        return inverse_rms_of(scale, depth=depth, eps=eps), None
    return scale, eps
