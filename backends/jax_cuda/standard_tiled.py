"""The launches of a standard block's layer for many tokens, by the kernels for Hopper: each token has the bits that it
has among few."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.layers import layer_operand
from mlxcel_jax_cuda.kernels.row_products import columns_for
from mlxcel_jax_cuda.kernels.row_products_ended import ended, inverse_rms_of
from mlxcel_jax_cuda.kernels.row_products_ends import End, Residual
from mlxcel_jax_cuda.kernels.row_products_stream import COLUMNS as FEW
from mlxcel_jax_cuda.kernels.row_products_tiled import tiled
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.standard_hopper import HopperSteps, heads_end
from mlxcel_jax_cuda.standard_steps import NORM_BEHIND, Carried, Pools, Rows

MULTIPLE = 64
"""Tokens come in so many."""


@attrs.frozen
class TiledSteps:
    """A product by `tiled`, and what `stream` would have ended with in a launch behind it. A gate is ended in place."""

    sms: int

    def begin(self, shapes: Shapes, weights: BlockWeights, ids: jax.Array) -> Carried:
        return HopperSteps(self.sms).begin(shapes, weights, ids)

    def qkv(
        self,
        block: StandardBlock,
        shapes: Shapes,
        weights: BlockWeights,
        layer: int,
        carried: Carried,
        rows: Rows,
        pools: Pools,
    ) -> tuple[jax.Array, Pools]:
        end, extra = heads_end(block, weights, rows, pools)
        sums = self._sums("qkv", shapes, weights, layer, carried.scaled)
        q, *written = self._ended("qkv", shapes, layer, sums, carried.squares, extra, end, block.eps)
        keys, values = (array.reshape(pool.shape) for array, pool in zip(written, pools, strict=True))
        return q.reshape(*q.shape[:3], -1), (keys, values)

    def residual(
        self, group: str, shapes: Shapes, weights: BlockWeights, layer: int, x: jax.Array, old: jax.Array
    ) -> Carried:
        sums = self._sums(group, shapes, weights, layer, x)
        extra, end = (old, weights.gains), Residual(NORM_BEHIND[group])
        return Carried(*self._ended(group, shapes, layer, sums, None, extra, end, 0.0))

    def gated(self, shapes: Shapes, weights: BlockWeights, layer: int, carried: Carried, eps: float) -> jax.Array:
        weight = shapes.gate_up
        hidden: jax.Array = tiled(
            weights.tiles,
            carried.scaled,
            layer_operand(layer),
            inverse_rms_of(carried.squares, depth=weight.depth, eps=eps),
            weight=weight,
            columns=_columns(len(carried.scaled), weight),
            gate=True,
            sms=self.sms,
            at=shapes.at("gate_up"),
        )
        return hidden

    def logits(self, shapes: Shapes, weights: BlockWeights, carried: Carried, eps: float) -> jax.Array:
        count, weight = len(carried.scaled), shapes.unembed
        if count in FEW:
            return HopperSteps(self.sms).logits(shapes, weights, carried, eps)
        more = -count % MULTIPLE
        scaled = jnp.pad(carried.scaled, ((0, more), (0, 0)))
        squares = jnp.pad(carried.squares, ((0, 0), (0, more)))
        made: jax.Array = tiled(
            weights.head,
            scaled,
            None,
            inverse_rms_of(squares, depth=weight.depth, eps=eps),
            weight=weight,
            columns=_columns(len(scaled), shapes.unembed),
            dtype=jnp.float32,
            sms=self.sms,
        )
        return made[:count]

    def _sums(self, group: str, shapes: Shapes, weights: BlockWeights, layer: int, x: jax.Array) -> jax.Array:
        weight = shapes[group]
        made: jax.Array = tiled(
            weights.tiles,
            x,
            layer_operand(layer),
            weight=weight,
            columns=_columns(len(x), weight),
            dtype=jnp.float32,
            sms=self.sms,
            at=shapes.at(group),
        )
        return made

    def _ended(
        self,
        group: str,
        shapes: Shapes,
        layer: int,
        sums: jax.Array,
        squares: jax.Array | None,
        extra: tuple[jax.Array, ...],
        end: End,
        eps: float,
    ) -> tuple[jax.Array, ...]:
        number = layer_operand(layer)
        made: tuple[jax.Array, ...] = ended(sums, squares, extra, number, weight=shapes[group], end=end, eps=eps)
        return made


def _columns(tokens: int, weight: Weight) -> int:
    """Of a launch of `tiled`: the most that divide the tokens."""
    most = columns_for(tokens, weight)
    return next(columns for columns in (256, 128, 64) if columns <= most and tokens % columns == 0)
