"""A decode launch of a standard block: the whole step as one kernel, or by fused steps, a few launches a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mlxcel.core.family import ModelFamily, StandardBlock
from mlxcel_jax_cuda.attention import attend as attend_blocks
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes, refusal
from mlxcel_jax_cuda.kernel_attention import KernelAttention, by_kernel
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.persistent_decode import decode_at_once, persistent_step
from mlxcel_jax_cuda.standard_block import Attend, decode
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.standard_steps import PlainSteps, Pools, Steps
from mlxcel_jax_cuda.storage import Leaves, block, places

ROWS = (8, 16, 32)
"""Rows of a launch that the kernels take."""


def fused_block(family: ModelFamily, config: Any, numerics: Numerics, context: int) -> StandardBlock | None:
    """What the model is to the fused steps, and its arrays in few; None where the device or the model is not for
    them."""
    describe = getattr(family, "standard_block", None)
    if describe is None or not numerics.packed:
        return None
    found: StandardBlock | None = describe(config, context)
    return found if found is not None and refusal(found) is None else None


def runs_fused(model: Model, shape: Shape) -> bool:
    """Fused steps do not show what each layer gives."""
    return model.block is not None and not model.numerics.watched and shape.width == 1 and shape.rows in ROWS


def decode_fused(
    model: Model, fields: Fields, token_ids: jax.Array, weights: BlockWeights, kv: Leaves
) -> tuple[Leaves, jax.Array]:
    """The KV with one more token of each row, and logits float32 [S, V]."""
    described, sms = model.block, model.numerics.hopper
    if described is None:
        raise RuntimeError("this model is no standard block")
    keys, values = kv
    whole = persistent_step(model, len(token_ids))
    if whole is not None:
        return decode_at_once(whole, described, fields, token_ids, weights, (keys, values))
    steps: Steps = HopperSteps(sms) if sms else PlainSteps()
    attend = _by_kernels(model, described, fields, kv) if sms else _by_blocks(model, described, fields)
    positions = fields.positions[:, 0]
    return decode(
        described,
        Shapes.of(described),
        steps,
        weights,
        (keys, values),
        token_ids,
        positions,
        fields.page_tables,
        attend,
    )


def _by_kernels(model: Model, described: StandardBlock, fields: Fields, kv: Leaves) -> Attend:
    if not by_kernel(model.layout.spec.layers[0], kv[0], described.heads):
        raise RuntimeError("the attention of this model is not for the kernels")
    attention, group = KernelAttention(fields, model.numerics.hopper), described.heads // described.kv_heads

    def attend(columns: jax.Array, pools: Pools, layer: int) -> jax.Array:
        mixed = attention.attend_columns(
            columns, *pools, layer=layer, layers=described.layers, group=group, scale=described.scale
        )
        return mixed.reshape(len(columns), -1)

    return attend


def _by_blocks(model: Model, described: StandardBlock, fields: Fields) -> Attend:
    """As XLA programs, of which no kernel is asked."""
    group = described.heads // described.kv_heads

    def attend(columns: jax.Array, pools: Pools, layer: int) -> jax.Array:
        (keys, values), tables = pools, places(model.kv)[layer].tables(fields)

        def fetch(row: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            return block(keys, tables[row], number), block(values, tables[row], number)

        mixed = attend_blocks(
            jnp.expand_dims(columns[:, :, :group], 1),
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
