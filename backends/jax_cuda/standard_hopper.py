"""The launches of a standard block's layer by the kernels for Hopper."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels import step_begin
from mlxcel_jax_cuda.kernels.layers import layer_operand
from mlxcel_jax_cuda.kernels.row_products_ends import End, Gate, Heads, Residual, Store
from mlxcel_jax_cuda.kernels.row_products_stream import stream
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.standard_steps import NORM_BEHIND, Carried, Pools, Rows


def embedding(weights: BlockWeights) -> jax.Array:
    """What embeddings are read from."""
    return weights.head if weights.embed is None else weights.embed


def packed(shapes: Shapes, weights: BlockWeights) -> Weight | None:
    """Whose tiles the embedding's are, where the head is the embedding too."""
    return shapes.unembed if weights.embed is None else None


def heads_end(
    block: StandardBlock, weights: BlockWeights, rows: Rows, pools: Pools
) -> tuple[Heads, tuple[jax.Array, ...]]:
    """How qkv ends, and what that takes."""
    d, small = block.head_dim, [array for array in (weights.bias, weights.head_gains) if array is not None]
    end = Heads(block.heads, block.kv_heads, d, block.qkv_bias, block.qk_norm, block.eps, block.layers)
    turns = [jnp.tile(table, (end.together, 1)) for table in (rows.cos, rows.sin)]
    halves = [pool.reshape(*pool.shape[:3], 2, d // 2) for pool in pools]
    return end, (*small, *turns, rows.page, rows.place, *halves)


@attrs.frozen
class HopperSteps:
    """By the kernels: bf16 weights and activations, float32 sums. One launch each."""

    sms: int

    def begin(self, shapes: Shapes, weights: BlockWeights, ids: jax.Array) -> Carried:
        return Carried(*step_begin.begin(ids, embedding(weights), weights.gains, packed=packed(shapes, weights)))

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
        x, squares = carried.scaled, carried.squares
        q, *written = self._in_layer("qkv", shapes, weights, layer, x, squares, extra, end, block.eps)
        keys, values = (array.reshape(pool.shape) for array, pool in zip(written, pools, strict=True))
        return q.reshape(*q.shape[:3], -1), (keys, values)

    def residual(
        self, group: str, shapes: Shapes, weights: BlockWeights, layer: int, x: jax.Array, old: jax.Array
    ) -> Carried:
        extra, end = (old, weights.gains), Residual(NORM_BEHIND[group])
        return Carried(*self._in_layer(group, shapes, weights, layer, x, None, extra, end, 0.0))

    def gated(self, shapes: Shapes, weights: BlockWeights, layer: int, carried: Carried, eps: float) -> jax.Array:
        x, squares = carried.scaled, carried.squares
        (hidden,) = self._in_layer("gate_up", shapes, weights, layer, x, squares, (), Gate(), eps)
        return hidden

    def logits(self, shapes: Shapes, weights: BlockWeights, carried: Carried, eps: float) -> jax.Array:
        made: tuple[jax.Array, ...] = stream(
            weights.head,
            carried.scaled,
            carried.squares,
            weight=shapes.unembed,
            end=Store(jnp.float32),
            eps=eps,
            sms=self.sms,
        )
        return made[0]

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
        eps: float,
    ) -> tuple[jax.Array, ...]:
        weight, at = shapes[group], shapes.at(group)
        number = layer_operand(layer)
        made: tuple[jax.Array, ...] = stream(
            weights.tiles, x, squares, extra, number, weight=weight, end=end, eps=eps, sms=self.sms, at=at
        )
        return made
