"""A decode launch of a standard block by the fused Hopper kernels: the place where a whole step as one kernel goes."""

from __future__ import annotations

from typing import Any

import jax

from mlxcel.core.family import ModelFamily, StandardBlock
from mlxcel_jax_cuda.kernel_attention import KernelAttention, by_kernel
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.standard_block import BlockWeights, Shapes, block_weights, decode, refusal
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.storage import Leaves
from mlxcel_jax_cuda.weights import Weights

ROWS = (8, 16, 32)
"""Rows of a launch that the kernels take."""


def fused_block(family: ModelFamily, config: Any, numerics: Numerics, context: int) -> StandardBlock | None:
    """What the model is to the fused kernels; None where the device or the model is not for them."""
    describe = getattr(family, "standard_block", None)
    block: StandardBlock | None = describe(config, context) if describe is not None and numerics.hopper else None
    return block if block is not None and refusal(block) is None else None


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
    block, sms = model.block, model.numerics.hopper
    attention = KernelAttention(fields, sms)
    if block is None or not by_kernel(model.layout.spec.layers[0], kv[0], block.heads):
        raise RuntimeError("this launch is not for the fused kernels")

    def attend(columns: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        group = block.heads // block.kv_heads
        mixed = attention.attend_columns(columns, keys, values, group=group, scale=block.scale)
        return mixed.reshape(len(columns), -1)

    positions = fields.positions[:, 0]
    return decode(
        block, Shapes.of(block), HopperSteps(sms), weights, kv, token_ids, positions, fields.page_tables, attend
    )
