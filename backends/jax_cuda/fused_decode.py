"""A launch of a standard block by fused steps, a few launches a layer; `persistent_decode` has it as one kernel.

Whichever it is, a token comes to the same bits: products add in an order that the weight alone fixes, attention in one
that the row's own length fixes, and between them stand the same expressions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mlxcel.core.family import ModelFamily, StandardBlock
from mlxcel_jax_cuda.attention import attend as attend_blocks
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes, refusal
from mlxcel_jax_cuda.kernel_attention import KernelAttention, by_kernel
from mlxcel_jax_cuda.kernels import row_products_stream
from mlxcel_jax_cuda.launch import NOWHERE, Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.standard_block import Attend, Wanted, decode
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.standard_steps import PlainSteps, Pools, Steps
from mlxcel_jax_cuda.standard_tiled import MULTIPLE, TiledSteps
from mlxcel_jax_cuda.storage import Leaves, block, places

FEW = row_products_stream.COLUMNS
"""Rows of a decode that one launch streams a weight for."""


def fused_block(family: ModelFamily, config: Any, numerics: Numerics, context: int) -> StandardBlock | None:
    """What the model is to the fused steps, and its arrays in few; None where the device or the model is not for
    them."""
    describe = getattr(family, "standard_block", None)
    if describe is None or not numerics.packed:
        return None
    found: StandardBlock | None = describe(config, context)
    return found if found is not None and refusal(found) is None else None


def runs_fused(model: Model, shape: Shape) -> bool:
    """Whether a launch is a decode of few rows by fused steps."""
    return by_block(model) and shape.width == 1 and shape.rows in FEW


def by_block(model: Model) -> bool:
    """Fused steps do not show what each layer gives."""
    return model.block is not None and not model.numerics.watched


def forward_block(
    model: Model, fields: Fields, token_ids: jax.Array, weights: BlockWeights, kv: Leaves
) -> tuple[Leaves, jax.Array]:
    """The KV with the tokens of a launch by fused steps, and logits float32 [R, V]. token_ids int32 [T]."""
    described, sms = model.block, model.numerics.hopper
    if described is None:
        raise RuntimeError("this model is no standard block")
    keys, values = kv
    rows, width = fields.positions.shape
    few = width == 1 and rows in FEW
    if sms and not few:
        fields, token_ids = _padded(fields, token_ids)
    steps: Steps = PlainSteps() if not sms else HopperSteps(sms) if few else TiledSteps(sms)
    attend = _by_kernels(model, described, fields, kv) if sms else _by_blocks(model, described, fields)
    pools, logits = decode(
        described,
        Shapes.of(described),
        steps,
        weights,
        (keys, values),
        token_ids,
        fields.positions.reshape(-1),
        jnp.repeat(fields.page_tables, fields.positions.shape[1], axis=0),
        attend,
        None if few else _wanted(model, described, fields, kv),
    )
    return pools, logits


def _padded(fields: Fields, token_ids: jax.Array) -> tuple[Fields, jax.Array]:
    """With rows or with tokens of padding, so that the kernels for many tokens take them."""
    rows, width = fields.positions.shape
    more = -rows * width % MULTIPLE
    if not more:
        return fields, token_ids
    token_ids = jnp.pad(token_ids, (0, more))
    if width > 1:
        positions = jnp.pad(fields.positions, ((0, 0), (0, more)), constant_values=NOWHERE)
        return fields._replace(positions=positions), token_ids
    return fields._replace(
        positions=jnp.pad(fields.positions, ((0, more), (0, 0)), constant_values=NOWHERE),
        seq_lens=jnp.pad(fields.seq_lens, (0, more)),
        page_tables=jnp.pad(fields.page_tables, ((0, more), (0, 0)), constant_values=-1),
    ), token_ids


def _wanted(model: Model, described: StandardBlock, fields: Fields, kv: Leaves) -> Wanted:
    """Of a piece of which few tokens give logits, those are rows of a decode once their keys are written."""
    (rows, width), tokens, sms = fields.positions.shape, fields.logits_rows, model.numerics.hopper
    if rows > 1 or len(tokens) not in FEW or len(tokens) >= width:
        return Wanted(tokens)
    padding = (jnp.arange(len(tokens)) > 0) & (tokens == 0)
    positions = jnp.where(padding, NOWHERE, fields.positions[0, tokens])
    own = fields._replace(
        positions=positions[:, None],
        seq_lens=positions + 1,
        slots=jnp.broadcast_to(fields.slots, tokens.shape),
        page_tables=jnp.broadcast_to(fields.page_tables, (len(tokens), fields.page_tables.shape[1])),
    )
    if sms:
        return Wanted(tokens, HopperSteps(sms), _by_kernels(model, described, own, kv))
    return Wanted(tokens, PlainSteps(), _by_blocks(model, described, own))


def _by_kernels(model: Model, described: StandardBlock, fields: Fields, kv: Leaves) -> Attend:
    if not by_kernel(model.layout.spec.layers[0], kv[0], described.heads):
        raise RuntimeError("the attention of this model is not for the kernels")
    attention, group = KernelAttention(fields, model.numerics.hopper), described.heads // described.kv_heads

    def attend(columns: jax.Array, pools: Pools, layer: int) -> jax.Array:
        return attention.attend_columns(
            columns, *pools, layer=layer, layers=described.layers, group=group, scale=described.scale
        )

    return attend


def _by_blocks(model: Model, described: StandardBlock, fields: Fields) -> Attend:
    """As XLA programs, of which no kernel is asked."""
    group = described.heads // described.kv_heads

    def attend(columns: jax.Array, pools: Pools, layer: int) -> jax.Array:
        (keys, values), tables = pools, places(model.kv)[layer].tables(fields)

        def fetch(row: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            return block(keys, tables[row], number), block(values, tables[row], number)

        mixed = attend_blocks(
            columns[:, :, :group].reshape(*fields.positions.shape, -1, group, columns.shape[3]),
            fields.positions,
            fields.seq_lens,
            fetch,
            scale=described.scale,
            softcap=0.0,
            window=None,
            one_by_one=True,
        )
        return mixed.reshape(len(columns), -1).astype(columns.dtype)

    return attend
