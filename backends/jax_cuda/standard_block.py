"""The forward of a standard block by fused row products, over N tokens of as many rows, or of one.

A layer is four launches beside its attention. qkv: the norm's 1 / rms on the sums, bias, norm by head, rotary
embedding, k and v onto their pages. o and down: the residual is added, and x times the next norm's gain and the sums of
its squares are left for the next launch. gate_up: silu(gate) * up. What each launch computes is a function of `Steps`,
of which there are three sets: kernels for Hopper, for few tokens and for many, and the same by jnp for any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.standard_steps import Carried, Pools, Rows, Steps

Attend = Callable[[jax.Array, Pools, int], jax.Array]
"""(q [N, K, C, d], keys and values, layer) -> [N, H * d], in q's dtype.

The H/K heads of a KV head are the first of its C columns, C a multiple of 8; what is in the others is not defined."""


class Wanted(NamedTuple):
    """The tokens that give logits, int32 [R], and by what they alone go through what is behind the last layer's keys
    and values. Without steps of their own, that is for all tokens."""

    tokens: jax.Array
    steps: Steps | None = None
    attend: Attend | None = None


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
    pools: Pools,
    token_ids: jax.Array,
    positions: jax.Array,
    page_tables: jax.Array,
    attend: Attend,
    wanted: Wanted | None = None,
) -> tuple[Pools, jax.Array]:
    """N tokens: the KV with them, and logits float32 [N, V], or [R, V] of those that are `wanted`.

    pools: keys and values; donate them, and they are written in place.   token_ids [N] int32.
    positions [N] int32, -1 for a token that is padding: it is written nowhere.   page_tables [N, P] int32, of the row
    of each token.
    """
    rows = rows_of(block, positions, page_tables, pools[0].shape[2])
    carried = steps.begin(shapes, weights, token_ids)
    for layer in range(block.layers):
        q, pools = steps.qkv(block, shapes, weights, layer, carried, rows, pools)
        if layer == block.layers - 1 and wanted is not None and wanted.steps is not None and wanted.attend is not None:
            q, carried = q[wanted.tokens], _chosen(carried, wanted.tokens)
            steps, attend, wanted = wanted.steps, wanted.attend, None
        carried = steps.residual("o", shapes, weights, layer, attend(q, pools, layer), carried.x)
        hidden = steps.gated(shapes, weights, layer, carried, block.eps)
        carried = steps.residual("down", shapes, weights, layer, hidden, carried.x)
    if wanted is not None:
        carried = _chosen(carried, wanted.tokens)
    return pools, steps.logits(shapes, weights, carried, block.eps)


def _chosen(carried: Carried, tokens: jax.Array) -> Carried:
    """Of these tokens, int32 [R]."""
    return Carried(carried.x[:, tokens], carried.scaled[tokens], carried.squares[:, tokens])
