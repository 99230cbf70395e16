"""Decode of a standard block by fused row products: one token of each of N = 8, 16 or 32 rows.

A layer is four launches beside its attention. qkv: the norm's 1 / rms on the sums, bias, norm by head, rotary
embedding, k and v onto their pages. o and down: the residual is added, and x times the next norm's gain and the sums of
its squares are left for the next launch. gate_up: silu(gate) * up. What each launch computes is a function of `Steps`,
of which there are two sets: kernels for Hopper, and the same by jnp for any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, embedding_rows, misfit
from mlxcel_jax_cuda.kernels.sizes import TILE
from mlxcel_jax_cuda.standard_steps import Carried, LayerWeights, Rows, Steps

HEAD_DIMS = (64, 128)

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [N, K, C, d], keys and values [pages, K, page_size, d] of a layer) -> [N, H * d], in q's dtype.

The H/K heads of a KV head are the first of its C columns, C a multiple of 8; what is in the others is not defined."""


@attrs.frozen
class Shapes:
    """The packed weights of a block, by group."""

    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    unembed: Weight

    @classmethod
    def of(cls, block: StandardBlock) -> Shapes:
        """ValueError with the reason where the block has no fused form; see `refusal`."""
        reason = refusal(block)
        if reason is not None:
            raise ValueError(f"no fused form: {reason}")
        rows = _rows(block)
        return cls(*(Weight.of(*shape, facing=facing) for shape, facing in rows.values()))


def _rows(block: StandardBlock) -> dict[str, tuple[tuple[int, int], int]]:
    """([rows, depth], facing) of each group."""
    D, heads = block.hidden, block.heads * block.head_dim
    return {
        "qkv": ((heads + 2 * block.kv_heads * block.head_dim, D), block.head_dim // 2),
        "o": ((D, heads), 0),
        "gate_up": ((2 * block.ffn, D), block.ffn),
        "down": ((D, block.ffn), 0),
        "unembed": ((block.vocab_size, D), 0),
    }


def refusal(block: StandardBlock) -> str | None:
    """Why a block cannot be run by this module's kernels, None if it can."""
    together = 2 * TILE // block.head_dim
    if block.activation != "silu":
        return f"its activation is {block.activation}, the kernels know silu"
    if block.head_dim not in HEAD_DIMS:
        return f"its heads have {block.head_dim} dims, the kernels know 64 and 128"
    if len(block.frequencies) * 2 != block.head_dim:
        return f"only {len(block.frequencies) * 2} of {block.head_dim} dims of a head are turned"
    group = block.heads // block.kv_heads
    if block.kv_heads % together or (group > 1 and group % together):
        return f"{block.heads} heads of {block.kv_heads} KV heads do not fill tiles of {together}, a group a tile"
    if block.qk_norm and together != 1:
        return f"heads of {block.head_dim} dims that are normed share a tile"
    for name, (shape, facing) in _rows(block).items():
        reason = misfit(*shape, facing)
        if reason is not None:
            return f"{name} {list(shape)}: {reason}"
    return None


class BlockWeights(NamedTuple):
    """Every array of a model."""

    embed: jax.Array  # [V, D], or the packed head where it is the embedding too
    unembed: jax.Array  # packed
    final_norm: jax.Array  # [D] float32, the offset added
    layers: tuple[LayerWeights, ...]


def block_weights(block: StandardBlock, shapes: Shapes, get: Callable[[str, int | None], Any]) -> BlockWeights:
    """Made once at load: big arrays are shared with whoever holds them, small ones are brought into the kernels' form.

    `get(name, layer)` gives the packed tiles of a group ("qkv", "o", "gate_up", "down", "unembed" with layer None),
    float32 norms, "qkv_bias" [F] float32 (q, k, v), and "embed": [V, D], or the packed head itself.
    """

    def gain(name: str, layer: int | None) -> jax.Array:
        return jnp.asarray(get(name, layer), jnp.float32) + block.norm_offset

    def layer(i: int) -> LayerWeights:
        return LayerWeights.of(
            *(get(name, i) for name in ("qkv", "o", "gate_up", "down")),
            attn_norm=gain("attn_norm", i),
            mlp_norm=gain("mlp_norm", i),
            bias=jnp.asarray(get("qkv_bias", i), jnp.float32) if block.qkv_bias else None,
            head_gains=(gain("q_norm", i), gain("k_norm", i)) if block.qk_norm else None,
            qkv_weight=shapes.qkv,
        )

    layers = tuple(layer(i) for i in range(block.layers))
    return BlockWeights(get("embed", None), get("unembed", None), gain("final_norm", None), layers)


def turns(block: StandardBlock, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin float32 [d/2, N] at positions [N]."""
    angles = jnp.asarray(block.frequencies, jnp.float32)[:, None] * positions.astype(jnp.float32)
    scale = jnp.float32(block.turn_scale)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rows_of(block: StandardBlock, positions: jax.Array, page_tables: jax.Array, page_size: int) -> Rows:
    """Where each row's token is. positions [N] int32, -1 for a row that is padding; page_tables [N, P] int32."""
    real, place = positions >= 0, jnp.maximum(positions, 0)
    page = jnp.take_along_axis(page_tables, (place // page_size)[:, None], axis=1)[:, 0]
    cos, sin = turns(block, place)
    return Rows(cos, sin, jnp.where(real, page, -1).astype(jnp.int32), (place % page_size).astype(jnp.int32))


def decode(
    block: StandardBlock,
    shapes: Shapes,
    steps: Steps,
    weights: BlockWeights,
    pools: tuple[jax.Array, ...],
    token_ids: jax.Array,
    positions: jax.Array,
    page_tables: jax.Array,
    attend: Attend,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """One token of each of N rows: the KV with it, and logits float32 [N, V].

    pools: keys and values [pages, K, page_size, d] of each layer in turn; donate them, and they are written in place.
    token_ids [N] int32.   positions [N] int32, -1 for a row that is padding: it is written nowhere.
    page_tables [N, P] int32.
    """
    rows = rows_of(block, positions, page_tables, pools[0].shape[2])
    ids = jnp.maximum(token_ids, 0)
    shared = weights.embed.shape != (block.vocab_size, block.hidden)
    embedded = embedding_rows(weights.embed, ids, shapes.unembed) if shared else weights.embed[ids]
    carried, written = begin(embedded, weights.layers[0].attn_norm, weights.layers[0].o.dtype), list(pools)
    for i, layer in enumerate(weights.layers):
        last = i + 1 == len(weights.layers)
        q, *pair = steps.qkv(block, shapes.qkv, layer, carried, rows, *written[2 * i : 2 * i + 2])
        written[2 * i : 2 * i + 2] = pair
        carried = steps.residual(shapes.o, layer.o, attend(q, *pair), carried.x, layer.mlp_norm)
        hidden = steps.gated(shapes.gate_up, layer.gate_up, carried, block.eps)
        gain = weights.final_norm if last else weights.layers[i + 1].attn_norm
        carried = steps.residual(shapes.down, layer.down, hidden, carried.x, gain)
    return tuple(written), steps.logits(shapes.unembed, weights.unembed, carried, block.eps)


def begin(embedded: jax.Array, gain: jax.Array, dtype: Any) -> Carried:
    """What the first norm needs of the embeddings [N, D]. Squares are added in a tree, so that N cannot show in it."""
    x = embedded.astype(jnp.float32)
    squares = (x * x).reshape(len(x), -1, TILE)
    while squares.shape[2] > 1:
        squares = squares[..., : squares.shape[2] // 2] + squares[..., squares.shape[2] // 2 :]
    return Carried(x.T, (x * gain).astype(dtype), squares[..., 0].T)
