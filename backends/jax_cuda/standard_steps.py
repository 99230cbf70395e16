"""The launches of a standard block's layer as functions, and the formulas of all of them by jnp, for any device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.row_products_weight import (
    Weight,
    embedding_rows,
    natural_rows,
    own_tiles,
    product_reference,
)
from mlxcel_jax_cuda.kernels.sizes import TILE

Pools = tuple[jax.Array, jax.Array]
"""Keys and values, [L * pages, K, page_size, d]: page p of layer l is l * pages + p."""


class Carried(NamedTuple):
    """What one launch leaves for the next: the residual x, and its norm but for the division by its root mean square.

    The division is due on the sums of a product: (x * gain / rms) @ w.T = (x * gain) @ w.T / rms.
    """

    x: jax.Array  # [D, N] float32
    scaled: jax.Array  # [N, D] of the compute type: x * gain
    squares: jax.Array  # [D/64, N] float32: sums of x * x over 64 values each


class Rows(NamedTuple):
    """Where the N tokens of a launch are."""

    cos: jax.Array  # [d/2, N] float32
    sin: jax.Array  # [d/2, N] float32
    page: jax.Array  # [N] int32, -1 for a row that is padding
    place: jax.Array  # [N] int32, on its page


class Steps(Protocol):
    """What `standard_block.decode` runs. N rows; arrays [N, …] but for `Carried`."""

    def begin(self, shapes: Shapes, weights: BlockWeights, ids: jax.Array) -> Carried:
        """The embeddings of ids [N], ready for the first norm."""
        ...

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
        """q [N, K, C, d], the H/K heads of a KV head in the first of its C columns, C a multiple of 8, what is in the
        others undefined; and the pools with k and v of the rows' tokens on the layer's pages."""
        ...

    def residual(
        self, group: str, shapes: Shapes, weights: BlockWeights, layer: int, x: jax.Array, old: jax.Array
    ) -> Carried:
        """old [F, N] + x [N, D] @ w.T by "o" or "down", ready for the norm behind it."""
        ...

    def gated(self, shapes: Shapes, weights: BlockWeights, layer: int, carried: Carried, eps: float) -> jax.Array:
        """silu(gate) * up of the norm, [N, F/2]."""
        ...

    def logits(self, shapes: Shapes, weights: BlockWeights, carried: Carried, eps: float) -> jax.Array:
        """float32 [N, V] of the norm."""
        ...


NORM_BEHIND = {"o": 1, "down": 2}
"""Which of the gains is that of the next norm: 2 layer + so many."""


@attrs.frozen
class PlainSteps:
    """The formulas of the kernels by jnp, in whatever type weights and activations have."""

    def begin(self, shapes: Shapes, weights: BlockWeights, ids: jax.Array) -> Carried:
        ids = jnp.maximum(ids, 0)
        embedded = embedding_rows(weights.head, ids, shapes.unembed) if weights.embed is None else weights.embed[ids]
        return begin(embedded, weights.gains[0], weights.tiles.dtype)

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
        weight = shapes.qkv
        tiles = own_tiles(weights.tiles, weight, layer, shapes.at("qkv"))
        y = _normed_product(weight, tiles, carried, block.eps)
        if weights.bias is not None:
            y = y + natural_rows(weights.bias[layer], weight)
        H, K, d = block.heads, block.kv_heads, block.head_dim
        heads = y.reshape(len(y), H + 2 * K, 2, d // 2)
        q, k, v = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
        if weights.head_gains is not None:
            gains = weights.head_gains[layer]
            q, k = (_head_norm(x, gain, block.eps) for x, gain in zip((q, k), gains, strict=True))
        q, k = (_turned(x, rows).reshape(len(y), -1, d).astype(pools[0].dtype) for x in (q, k))
        v = v.reshape(len(y), K, d).astype(q.dtype)
        first = layer * (len(pools[0]) // block.layers)
        page = jnp.where(rows.page < 0, len(pools[0]), first + rows.page)
        keys, values = (pool.at[page, :, rows.place].set(x, mode="drop") for pool, x in zip(pools, (k, v), strict=True))
        group = H // K
        columns = jnp.pad(q.reshape(len(q), K, group, d), ((0, 0), (0, 0), (0, -group % 8), (0, 0)))
        return columns, (keys, values)

    def residual(
        self, group: str, shapes: Shapes, weights: BlockWeights, layer: int, x: jax.Array, old: jax.Array
    ) -> Carried:
        gain = weights.gains[2 * layer + NORM_BEHIND[group]]
        tiles = own_tiles(weights.tiles, shapes[group], layer, shapes.at(group))
        new = old + product_reference(tiles, x, shapes[group]).T
        squares = (new * new).reshape(-1, TILE, new.shape[1]).sum(axis=1)
        return Carried(new, (new * gain[:, None]).T.astype(x.dtype), squares)

    def gated(self, shapes: Shapes, weights: BlockWeights, layer: int, carried: Carried, eps: float) -> jax.Array:
        tiles = own_tiles(weights.tiles, shapes.gate_up, layer, shapes.at("gate_up"))
        gate, up = jnp.split(_normed_product(shapes.gate_up, tiles, carried, eps), 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(carried.scaled.dtype)

    def logits(self, shapes: Shapes, weights: BlockWeights, carried: Carried, eps: float) -> jax.Array:
        return _normed_product(shapes.unembed, weights.head, carried, eps)


def begin(embedded: jax.Array, gain: jax.Array, dtype: Any) -> Carried:
    """What the first norm needs of embeddings [N, D]."""
    x = embedded.astype(jnp.float32)
    squares = (x * x).reshape(len(x), -1, TILE).sum(axis=2)
    return Carried(x.T, (x * gain).astype(dtype), squares.T)


def _normed_product(weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
    inverse = lax.rsqrt(carried.squares.sum(axis=0) / weight.depth + eps)
    return product_reference(tiles, carried.scaled, weight) * inverse[:, None]


def _head_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """x [N, H, 2, d/2], gain [2, d/2]."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=(2, 3), keepdims=True) + eps) * gain


def _turned(x: jax.Array, rows: Rows) -> jax.Array:
    """x [N, H, 2, d/2] at the rows' positions."""
    cos, sin = rows.cos.T[:, None], rows.sin.T[:, None]
    first, second = x[:, :, 0], x[:, :, 1]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=2)
