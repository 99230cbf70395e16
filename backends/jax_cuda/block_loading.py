"""The arrays of a standard block, filled weight by weight: the device never holds a big one twice."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import IN_LAYERS, BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, pack, paired_rows


class BlockLoading:
    """Takes weights as a family has them, in float32 on the host."""

    def __init__(self, block: StandardBlock, *, tied: bool, dtype: Any, device: jax.Device) -> None:
        """`tied`: whether "embed" is the head too. dtype: of the big arrays."""
        self._block, self._shapes, self._tied, self._dtype, self._device = block, Shapes.of(block), tied, dtype, device
        L, D, d = block.layers, block.hidden, block.head_dim
        with jax.default_device(device):
            self._tiles = jnp.zeros((L * self._shapes.layer_rows, 64), dtype)
        self._big: dict[str, jax.Array] = {}
        self._gains = np.zeros((2 * L + 1, D), np.float32)
        self._bias = np.zeros((L, self._shapes.qkv.rows), np.float32) if block.qkv_bias else None
        self._head_gains = np.zeros((L, 2, 2, d // 2), np.float32) if block.qk_norm else None

    def put(self, name: str, layer: int, values: np.ndarray) -> None:
        """The matrix of a group of `IN_LAYERS`, "unembed", "embed" [V, D], a norm, or "qkv_bias" [F], of q, k and v.
        layer: 0 outside layers."""
        # So that these float32 values take the place of the last ones, and not one behind it.
        jax.block_until_ready((self._tiles, self._big))  # type: ignore[no-untyped-call]
        if name in IN_LAYERS:
            weight, at = self._shapes[name], self._shapes.at(name)
            first = np.int32(layer * at.stride + at.first)
            self._tiles = _filled(self._tiles, jax.device_put(values, self._device), first, weight)
        elif name == "unembed" or (name == "embed" and self._tied):
            self._big["head"] = _packed(jax.device_put(values, self._device), self._shapes.unembed, self._dtype)
        elif name == "embed":
            self._big["embed"] = jax.device_put(values, self._device).astype(self._dtype)
        elif name == "qkv_bias" and self._bias is not None:
            self._bias[layer] = paired_rows(values, self._shapes.qkv)
        elif name in ("q_norm", "k_norm") and self._head_gains is not None:
            self._head_gains[layer, int(name == "k_norm")] = self._gain(values).reshape(2, -1)
        else:
            row = {"attn_norm": 2 * layer, "mlp_norm": 2 * layer + 1, "final_norm": 2 * self._block.layers}[name]
            self._gains[row] = self._gain(values)

    def _gain(self, values: np.ndarray) -> np.ndarray:
        return values + np.float32(self._block.norm_offset)

    def done(self) -> BlockWeights:
        """When all have been put."""
        small = {"gains": self._gains, "bias": self._bias, "head_gains": self._head_gains}
        placed = {name: None if x is None else jax.device_put(x, self._device) for name, x in small.items()}
        made: Any = {"tiles": self._tiles, "embed": None, **self._big, **placed}
        return BlockWeights(**made)


@functools.partial(jax.jit, static_argnames=("weight",), donate_argnums=0)
def _filled(tiles: jax.Array, values: jax.Array, first: Any, weight: Weight) -> jax.Array:
    """`tiles` with a matrix from row `first` on, written in place."""
    return lax.dynamic_update_slice(tiles, pack(values.astype(tiles.dtype), weight), (first, 0))


@functools.partial(jax.jit, static_argnames=("weight", "dtype"))
def _packed(values: jax.Array, weight: Weight, dtype: Any) -> jax.Array:
    packed: jax.Array = pack(values.astype(dtype), weight)
    return packed
