"""The launches of a standard block's layer by the kernels for Hopper."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.kernels.row_products_ends import Gate, Heads, Residual, Store
from mlxcel_jax_cuda.kernels.row_products_stream import stream
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.standard_steps import Carried, LayerWeights, Rows


@attrs.frozen
class HopperSteps:
    """By the kernels: bf16 weights and activations, float32 sums. One launch each."""

    sms: int

    def qkv(
        self,
        block: StandardBlock,
        weight: Weight,
        layer: LayerWeights,
        carried: Carried,
        rows: Rows,
        keys: jax.Array,
        values: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        d, small = block.head_dim, [array for array in (layer.bias, layer.head_gains) if array is not None]
        end = Heads(block.heads, block.kv_heads, d, block.qkv_bias, block.qk_norm, block.eps)
        turns = [jnp.tile(table, (end.together, 1)) for table in (rows.cos, rows.sin)]
        pools = [pool.reshape(*pool.shape[:3], 2, d // 2) for pool in (keys, values)]
        extra = (*small, *turns, rows.page, rows.place, *pools)
        q, *written = self._stream(layer.qkv, carried.scaled, carried.squares, extra, weight, end, block.eps)
        queries = q.reshape(*q.shape[:3], d)
        return queries, written[0].reshape(keys.shape), written[1].reshape(values.shape)

    def residual(self, weight: Weight, tiles: jax.Array, x: jax.Array, old: jax.Array, gain: jax.Array) -> Carried:
        return Carried(*self._stream(tiles, x, None, (old, gain), weight, Residual(), 0.0))

    def gated(self, weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
        return self._stream(tiles, carried.scaled, carried.squares, (), weight, Gate(), eps)[0]

    def logits(self, weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
        return self._stream(tiles, carried.scaled, carried.squares, (), weight, Store(jnp.float32), eps)[0]

    def _stream(
        self,
        tiles: jax.Array,
        x: jax.Array,
        squares: jax.Array | None,
        extra: tuple[jax.Array, ...],
        weight: Weight,
        end: Any,
        eps: float,
    ) -> tuple[jax.Array, ...]:
        made: tuple[jax.Array, ...] = stream(tiles, x, squares, extra, weight=weight, end=end, eps=eps, sms=self.sms)
        return made
