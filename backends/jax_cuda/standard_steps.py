"""The launches of a standard block's layer as functions, and the formulas of all of them by jnp, for any device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import attrs
import jax
import jax.numpy as jnp
from jax import lax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, natural_rows, paired_rows, product_reference
from mlxcel_jax_cuda.kernels.sizes import TILE


class Carried(NamedTuple):
    """What one launch leaves for the next: the residual x, and its norm but for the division by its root mean square.

    The division is due on the sums of a product: (x * gain / rms) @ w.T = (x * gain) @ w.T / rms.
    """

    x: jax.Array  # [D, N] float32
    scaled: jax.Array  # [N, D] of the compute type: x * gain
    squares: jax.Array  # [D/64, N] float32: sums of x * x over 64 values each


class LayerWeights(NamedTuple):
    """The arrays of one layer: packed groups, gains of norms with their offset, and small arrays in kernel form."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array
    attn_norm: jax.Array  # [D] float32
    mlp_norm: jax.Array  # [D] float32
    bias: jax.Array | None  # [F] float32 of qkv, in the order of its tiles
    head_gains: jax.Array | None  # [2, 2, d/2] float32: of q and of k, the halves of a head apart

    @classmethod
    def of(
        cls,
        qkv: jax.Array,
        o: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        *,
        attn_norm: jax.Array,
        mlp_norm: jax.Array,
        bias: jax.Array | None,
        head_gains: tuple[jax.Array, jax.Array] | None,
        qkv_weight: Weight,
    ) -> LayerWeights:
        """bias [F] and head_gains ([d], [d]) in the family's order."""
        paired = None if bias is None else paired_rows(bias, qkv_weight)
        halves = None if head_gains is None else jnp.stack(head_gains).reshape(2, 2, -1)
        return cls(qkv, o, gate_up, down, attn_norm, mlp_norm, paired, halves)


class Rows(NamedTuple):
    """Where the N tokens of a launch are."""

    cos: jax.Array  # [d/2, N] float32
    sin: jax.Array  # [d/2, N] float32
    page: jax.Array  # [N] int32, -1 for a row that is padding
    place: jax.Array  # [N] int32, on its page


class Steps(Protocol):
    """What `standard_block.decode` runs. N rows; arrays [N, …] but for `Carried`."""

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
        """q [N, K, C, d], the H/K heads of a KV head in the first of its C columns, C a multiple of 8, what is in the
        others undefined; and the layer's pages with k and v of the rows' tokens."""
        ...

    def residual(self, weight: Weight, tiles: jax.Array, x: jax.Array, old: jax.Array, gain: jax.Array) -> Carried:
        """old [F, N] + x [N, D] @ w.T, ready for the norm of `gain` [F]."""
        ...

    def gated(self, weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
        """silu(gate) * up of the norm, [N, F/2]."""
        ...

    def logits(self, weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
        """float32 [N, V] of the norm."""
        ...


@attrs.frozen
class PlainSteps:
    """The formulas of the kernels by jnp, in whatever type weights and activations have."""

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
        y = _normed_product(weight, layer.qkv, carried, block.eps)
        if layer.bias is not None:
            y = y + natural_rows(layer.bias, weight)
        H, K, d = block.heads, block.kv_heads, block.head_dim
        heads = y.reshape(len(y), H + 2 * K, 2, d // 2)
        q, k, v = heads[:, :H], heads[:, H : H + K], heads[:, H + K :]
        if layer.head_gains is not None:
            q, k = (_head_norm(x, gain, block.eps) for x, gain in zip((q, k), layer.head_gains, strict=True))
        q, k = (_turned(x, rows).reshape(len(y), -1, d).astype(keys.dtype) for x in (q, k))
        v = v.reshape(len(y), K, d).astype(values.dtype)
        page = jnp.where(rows.page < 0, len(keys), rows.page)
        keys, values = (pool.at[page, :, rows.place].set(x, mode="drop") for pool, x in ((keys, k), (values, v)))
        group = H // K
        columns = jnp.pad(q.reshape(len(q), K, group, d), ((0, 0), (0, 0), (0, -group % 8), (0, 0)))
        return columns, keys, values

    def residual(self, weight: Weight, tiles: jax.Array, x: jax.Array, old: jax.Array, gain: jax.Array) -> Carried:
        new = old + product_reference(tiles, x, weight).T
        squares = (new * new).reshape(-1, TILE, new.shape[1]).sum(axis=1)
        return Carried(new, (new * gain[:, None]).T.astype(x.dtype), squares)

    def gated(self, weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
        gate, up = jnp.split(_normed_product(weight, tiles, carried, eps), 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(carried.scaled.dtype)

    def logits(self, weight: Weight, tiles: jax.Array, carried: Carried, eps: float) -> jax.Array:
        return _normed_product(weight, tiles, carried, eps)


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
