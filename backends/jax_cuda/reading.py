"""How the ops of a forward find a model's weights: each an array of its own, or those of a standard block in few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import jax
import jax.numpy as jnp

from mlxcel_jax_cuda.block_arrays import BlockIndex, BlockWeights
from mlxcel_jax_cuda.kernels.row_products import gated_product, row_product
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, Weight, embedding_rows, natural_rows
from mlxcel_jax_cuda.products import row_products
from mlxcel_jax_cuda.weights import WeightIndex


@attrs.frozen(eq=False)
class Projection:
    """A fused group of one layer: the matrix [sum of F, D], or its tiles, alone or among those of all layers."""

    sizes: tuple[int, ...]  # the F of each weight
    matrix: jax.Array
    bias: jax.Array | None  # [sum of F] float32
    packed: Weight | None
    layer: int | None = None
    at: Stacked | None = None

    @property
    def gates(self) -> bool:
        """Whether a kernel can make silu(gate) * up of it."""
        return self.packed is not None and self.packed.facing > 0 and self.bias is None

    def product(self, x: jax.Array, dtype: Any, *, sms: int) -> jax.Array:
        """x [T, D] @ w.T with the bias, [T, F], of `dtype` where a kernel can give it, else float32."""
        if self.packed is None:
            y = row_products(self.matrix, x)
        else:
            wanted = dtype if self.bias is None else jnp.float32
            y = row_product(self.matrix, x, self.packed, layer=self.layer, at=self.at, dtype=wanted, sms=sms)
        return y if self.bias is None else y + self.bias

    def gated(self, x: jax.Array, *, sms: int) -> jax.Array:
        """silu(gate) * up, [T, F/2], where it `gates`."""
        if self.packed is None:
            raise ValueError("a plain matrix has no gate")
        return gated_product(self.matrix, x, self.packed, layer=self.layer, at=self.at, sms=sms)


class Reading(Protocol):
    """The weights of a model. Layer None is outside layers."""

    def weight(self, name: str, layer: int | None) -> jax.Array:
        """One that is no part of a projection."""
        ...

    def gain(self, name: str, layer: int | None, offset: float) -> jax.Array:
        """float32 [D]: a norm's weight, `offset` added."""
        ...

    def embedding(self, name: str, ids: jax.Array) -> jax.Array:
        """Rows [T, D]."""
        ...

    def projection(self, group: str, layer: int | None) -> Projection: ...


class LeafReading:
    """Each weight is a leaf."""

    def __init__(self, index: WeightIndex, leaves: Sequence[jax.Array]) -> None:
        self._leaves, self._embedding = leaves, index.embedding
        self._linear, self._plain = dict(index.linear), dict(index.plain)

    def weight(self, name: str, layer: int | None) -> jax.Array:
        return self._leaves[self._plain[name, layer or 0]]

    def gain(self, name: str, layer: int | None, offset: float) -> jax.Array:
        weight = self.weight(name, layer)
        return weight + jnp.float32(offset) if offset else weight

    def embedding(self, name: str, ids: jax.Array) -> jax.Array:
        table = self.weight(name, None)
        if name == "embed" and self._embedding is not None:
            return embedding_rows(table, ids, self._embedding)
        return table[ids]

    def projection(self, group: str, layer: int | None) -> Projection:
        linear = self._linear[group, layer or 0]
        bias = None if linear.bias is None else self._leaves[linear.bias]
        return Projection(linear.sizes, self._leaves[linear.matrix], bias, linear.packed)


class BlockReading:
    """The arrays of a standard block, whose forward asks for its embedding, norms and groups, and for nothing else."""

    def __init__(self, index: BlockIndex, weights: BlockWeights) -> None:
        self._index, self._weights = index, weights

    def weight(self, name: str, layer: int | None) -> jax.Array:
        raise KeyError(f"a standard block has no weight {name!r} by itself")

    def gain(self, name: str, layer: int | None, offset: float) -> jax.Array:
        """The offset is in the array."""
        weights, number = self._weights, layer or 0
        if weights.head_gains is not None and name in ("q_norm", "k_norm"):
            return weights.head_gains[number, int(name == "k_norm")].reshape(-1)
        row = {"attn_norm": 2 * number, "mlp_norm": 2 * number + 1, "final_norm": len(weights.gains) - 1}[name]
        return weights.gains[row]

    def embedding(self, name: str, ids: jax.Array) -> jax.Array:
        embed = self._weights.embed
        return embedding_rows(self._weights.head, ids, self._index.shapes.unembed) if embed is None else embed[ids]

    def projection(self, group: str, layer: int | None) -> Projection:
        weights, shapes, sizes = self._weights, self._index.shapes, self._index.sizes(group)
        if layer is None:
            return Projection(sizes, weights.head, None, shapes[group])
        bias = None
        if group == "qkv" and weights.bias is not None:
            bias = natural_rows(weights.bias[layer], shapes.qkv)
        return Projection(sizes, weights.tiles, bias, shapes[group], layer, shapes.at(group))


def reading(index: WeightIndex | BlockIndex, weights: Any) -> Reading:
    """`weights` as the index has them."""
    return BlockReading(index, weights) if isinstance(index, BlockIndex) else LeafReading(index, weights)
