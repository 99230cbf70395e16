"""A decode launch of a standard block by fused steps: the place where a whole step as one kernel goes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mlxcel.core.family import ModelFamily, StandardBlock
from mlxcel_jax_cuda.attention import attend as attend_blocks
from mlxcel_jax_cuda.kernel_attention import KernelAttention, by_kernel
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.standard_block import Attend, BlockWeights, Shapes, block_weights, decode, refusal
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.standard_steps import PlainSteps, Steps
from mlxcel_jax_cuda.storage import Leaves, block
from mlxcel_jax_cuda.weights import Weights

ROWS = (8, 16, 32)
"""Rows of a launch that the kernels take."""


def fused_block(family: ModelFamily, config: Any, numerics: Numerics, context: int) -> StandardBlock | None:
    """What the model is to the fused steps; None where the device or the model is not for them, or where each layer is
    looked at, which they do not show."""
    describe = getattr(family, "standard_block", None)
    if describe is None or not numerics.packed or numerics.watched:
        return None
    found: StandardBlock | None = describe(config, context)
    return found if found is not None and refusal(found) is None else None


def fused_weights(block: StandardBlock, weights: Weights) -> BlockWeights:
    """The arrays of a loaded model in the order of the kernels. Big ones are shared."""
    linear, plain = dict(weights.index.linear), dict(weights.index.plain)

    def get(name: str, layer: int | None) -> jax.Array:
        if name == "qkv_bias":
            bias = linear["qkv", layer or 0].bias
            if bias is None:
                raise RuntimeError("a block with biases has none")
            return weights.leaves[bias]
        if (name, layer or 0) in linear:
            return weights.leaves[linear[name, layer or 0].matrix]
        return weights.leaves[plain[name, layer or 0]]

    return block_weights(block, Shapes.of(block), get)


def runs_fused(model: Model, shape: Shape) -> bool:
    return model.block is not None and shape.width == 1 and shape.rows in ROWS


def decode_fused(
    model: Model, fields: Fields, token_ids: jax.Array, weights: BlockWeights, kv: Leaves
) -> tuple[Leaves, jax.Array]:
    """The KV with one more token of each row, and logits float32 [S, V]."""
    described, sms = model.block, model.numerics.hopper
    if described is None:
        raise RuntimeError("this model is no standard block")
    steps: Steps = HopperSteps(sms) if sms else PlainSteps()
    attend = _by_kernels(model, described, fields, kv) if sms else _by_blocks(described, fields)
    positions = fields.positions[:, 0]
    return decode(described, Shapes.of(described), steps, weights, kv, token_ids, positions, fields.page_tables, attend)


def _by_kernels(model: Model, described: StandardBlock, fields: Fields, kv: Leaves) -> Attend:
    if not by_kernel(model.layout.spec.layers[0], kv[0], described.heads):
        raise RuntimeError("the attention of this model is not for the kernels")
    attention, group = KernelAttention(fields, model.numerics.hopper), described.heads // described.kv_heads

    def attend(columns: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        mixed = attention.attend_columns(columns, keys, values, group=group, scale=described.scale)
        return mixed.reshape(len(columns), -1)

    return attend


def _by_blocks(described: StandardBlock, fields: Fields) -> Attend:
    """As XLA programs, of which no kernel is asked."""
    tables, group = fields.page_tables, described.heads // described.kv_heads

    def attend(columns: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
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
