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
from mlxcel_jax_cuda.kernels.row_products_apart import apart, worth_it
from mlxcel_jax_cuda.kernels.row_products_ends import End, Residual
from mlxcel_jax_cuda.kernels.row_products_gated import gated
from mlxcel_jax_cuda.kernels.row_products_stream import COLUMNS as FEW
from mlxcel_jax_cuda.kernels.row_products_tiled import COLUMNS, tiled
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.kernels.sizes import TILE
from mlxcel_jax_cuda.standard_hopper import HopperSteps, heads_end
from mlxcel_jax_cuda.standard_steps import NORM_BEHIND, Carried, Pools, Rows

MULTIPLE = 64
"""Tokens come in so many."""


@attrs.frozen
class TiledSteps:
    """Products by `tiled` and `gated`, which end as those of `stream` do. One launch each."""

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
        end = attrs.evolve(end, runs=True)
        x, squares = carried.scaled, carried.squares
        q, *written = self._in_layer("qkv", shapes, weights, layer, x, squares, extra, end, block.eps)
        keys, values = (array.reshape(pool.shape) for array, pool in zip(written, pools, strict=True))
        return q.reshape(*q.shape[:3], -1), (keys, values)

    def residual(
        self, group: str, shapes: Shapes, weights: BlockWeights, layer: int, x: jax.Array, old: jax.Array
    ) -> Carried:
        extra, end = (old, weights.gains), Residual(NORM_BEHIND[group])
        return Carried(*self._in_layer(group, shapes, weights, layer, x, None, extra, end))

    def gated(self, shapes: Shapes, weights: BlockWeights, layer: int, carried: Carried, eps: float) -> jax.Array:
        weight, x = shapes.gate_up, carried.scaled
        hidden: jax.Array = gated(
            weights.tiles, x, layer_operand(layer), carried.squares, weight=weight, columns=_columns(len(x), weight),
            eps=eps, sms=self.sms, at=shapes.at("gate_up"),
        )  # fmt: skip
        return hidden

    def logits(self, shapes: Shapes, weights: BlockWeights, carried: Carried, eps: float) -> jax.Array:
        count, weight = len(carried.scaled), shapes.unembed
        if count in FEW:
            return HopperSteps(self.sms).logits(shapes, weights, carried, eps)
        more = -count % MULTIPLE
        scaled = jnp.pad(carried.scaled, ((0, more), (0, 0)))
        squares = jnp.pad(carried.squares, ((0, 0), (0, more)))
        made: tuple[jax.Array, ...] = tiled(
            weights.head,
            scaled,
            None,
            squares,
            weight=weight,
            columns=_columns(len(scaled), weight),
            dtype=jnp.float32,
            eps=eps,
            sms=self.sms,
        )
        return made[0][:count]

    def _in_layer(
        self,
        group: str,
        shapes: Shapes,
        weights: BlockWeights,
        layer: int,
        x: jax.Array,
        squares: jax.Array | None,
        extra: tuple[jax.Array, ...],
        end: End,
        eps: float | None = None,
    ) -> tuple[jax.Array, ...]:
        weight, number = shapes[group], layer_operand(layer)
        columns, at = ended_columns(len(x), weight, self.sms), shapes.at(group)
        product = apart if worth_it(len(x), weight, self.sms) else tiled
        made: tuple[jax.Array, ...] = product(
            weights.tiles, x, number, squares, extra, weight=weight, columns=columns, end=end, eps=eps,
            sms=self.sms, at=at,
        )  # fmt: skip
        return made


def _columns(tokens: int, weight: Weight) -> int:
    """Of a launch of `tiled`: the most that divide the tokens."""
    most = columns_for(tokens, weight)
    return next(columns for columns in (256, 128, 64) if columns <= most and tokens % columns == 0)


def ended_columns(tokens: int, weight: Weight, sms: int) -> int:
    """Of a launch of `tiled` with an end, whose split weights may have 256 unless they are paired: those whose rounds
    of blocks fetch the least, since that is what such a launch waits for."""

    def fetched(columns: int) -> int:
        blocks = weight.rows // (2 * TILE) * (tokens // columns)
        return -(-blocks // sms) * (2 * TILE + columns)

    fewer, most = _columns(tokens, weight), COLUMNS[-1]
    more = weight.pair == 1 and tokens % most == 0 and fetched(most) < fetched(fewer)
    return most if more else fewer
