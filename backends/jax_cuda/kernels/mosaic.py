"""What all kernels share: wgmma's layouts and tiles, moves between device memory and registers, sizes of a Hopper SM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Rows of wgmma's first operand, and bf16 values in the widest swizzle."""

SMS = 132
"""Streaming multiprocessors of an H100 SXM and an H200. A device with fewer runs the same blocks in more rounds."""

SMEM_BYTES = 222 * 1024
"""Shared memory of a block for rings and operands; the rest of 227 KiB is barriers and scratch."""

WGMMA, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def tiling(width: int) -> Callable[[int], tuple[Any, Any]]:
    """Shared-memory transforms, by itemsize, of a tile whose rows are `width` bytes: wgmma's, the widest swizzle."""
    swizzle = min(128, width)
    return lambda itemsize: (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


TILED = tiling(128)(2)


def store(ref: Any, value: jax.Array) -> None:
    """To device memory. jax 0.12 refuses less than whole sectors unless told; before it there is no way to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_tokens(ref: Any, value: jax.Array) -> None:
    """value [64, N] float32 in wgmma's layout -> ref [N, 64], bf16 or float32, in device memory."""
    if ref.dtype == jnp.bfloat16:
        store(ref.T, plgpu.layout_cast(value.astype(jnp.bfloat16), TRANSPOSED))
    else:
        store(ref.T, value)


def load(ref: Any, layout: Any = WGMMA) -> jax.Array:
    """A reference's values in registers, by default [64, N] as wgmma has its sums."""
    return plgpu.load(ref, (), layout=layout, optimized=False)


def across(x: jax.Array, columns: int) -> jax.Array:
    """One value a column, [N] -> [64, N]."""
    return lax.broadcast_in_dim(x, (TILE, columns), (1,))


def along(x: jax.Array, columns: int) -> jax.Array:
    """One value a row, [64] -> [64, N]."""
    return lax.broadcast_in_dim(x, (TILE, columns), (0,))
