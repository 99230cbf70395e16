"""What all kernels share: wgmma's layouts and tiles, and moves between device memory and registers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mlxcel_jax_cuda.kernels.sizes import SMEM_BYTES as SMEM_BYTES
from mlxcel_jax_cuda.kernels.sizes import SMS as SMS
from mlxcel_jax_cuda.kernels.sizes import TILE as TILE

plgpu: Any = mosaic_gpu  # half of it has no types

WGMMA, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED

_WHOLE: tuple[Any, ...] = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
"""The index that `load` wants up to jax 0.11: all of a reference."""

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def tiling(width: int) -> Callable[[int], tuple[Any, Any]]:
    """Shared-memory transforms, by itemsize, of a tile whose rows are `width` bytes: wgmma's, the widest swizzle."""
    swizzle = min(128, width)
    return lambda itemsize: (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


TILED = tiling(128)(2)


def store(ref: Any, value: jax.Array) -> None:
    """To device or shared memory. jax 0.12 refuses less than whole sectors and bank conflicts unless told; before it
    there is no way to be told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def store_tokens(ref: Any, value: jax.Array) -> None:
    """value [64, N] float32 in wgmma's layout -> ref [N, 64], bf16 or float32, in device memory."""
    store(ref.T, plgpu.layout_cast(value.astype(ref.dtype), TRANSPOSED))


def load(ref: Any, layout: Any = WGMMA) -> jax.Array:
    """A reference's values in registers, by default [64, N] as wgmma has its sums."""
    loaded: jax.Array = plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)
    return loaded


def across(x: jax.Array, columns: int) -> jax.Array:
    """One value a column, [N] -> [64, N]."""
    return lax.broadcast_in_dim(x, (TILE, columns), (1,))


ROOM = 512
"""float32 values that `added_rows` wants."""


def added_rows(x: jax.Array, room: Any = None) -> jax.Array:
    """x [64, N] float32 in wgmma's layout -> the sums of its columns, [N].

    The four warps of a warpgroup meet in `room`, ROOM float32 of shared memory. Without one they meet where Mosaic lets
    every warpgroup of a block meet, which then must be one alone. The order, and so the bits, are the same.
    """
    if room is None:
        return jnp.sum(x, axis=0)

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=WGMMA.reduce(0)),
    )
    def add(_context: Any, values: Any, room: Any) -> Any:
        return values.reduce("add", 0, room)

    found: jax.Array = add(x, room)
    return found


def along(x: jax.Array, columns: int) -> jax.Array:
    """One value a row, [64] -> [64, N]."""
    return lax.broadcast_in_dim(x, (TILE, columns), (0,))


def shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    """An output of a kernel."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def launch(
    body: Callable[..., None],
    out: Sequence[Any],
    scratch: Sequence[Any],
    *operands: Any,
    compiler_params: Any = LANE,
    **mesh: Any,
) -> tuple[jax.Array, ...]:
    """`plgpu.kernel` with operands that may be references, to be written in place: before jax 0.11 it refuses those.

    body(*operands, *out, *scratch). `mesh` is grid, grid_names, cluster, cluster_names, num_threads and thread_name.
    """

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes=mesh["thread_name"])

    name = body.__name__
    made: Sequence[jax.Array] = pl.kernel(
        scoped, out_type=tuple(out), mesh=plgpu.Mesh(**mesh), compiler_params=compiler_params, name=name
    )(*operands)
    return tuple(made)
