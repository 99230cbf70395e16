"""A decode step of up to 8 rows as one kernel: which models have it, and what goes before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.family import StandardBlock
from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import CARRY
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.persistent_shape import COLUMNS, Step
from mlxcel_jax_cuda.kernels.persistent_step import Stacked, Tokens, decode_step
from mlxcel_jax_cuda.kernels.step_begin import Buffer, Pages, begin_step
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.standard_block import turns
from mlxcel_jax_cuda.standard_hopper import embedding, packed
from mlxcel_jax_cuda.standard_steps import Pools

ROWS = COLUMNS
"""Rows of a launch, those that are padding among them."""


def step_of(block: StandardBlock, layout: KVLayout, sms: int) -> Step:
    """ValueError, with the reason, where the kernel cannot do it. Its blocks wait for one another and so have to be on
    the device together: as many as it has multiprocessors, each with more than half of the shared memory of one."""
    shapes = Shapes.of(block)
    return Step.of(block, shapes, pages=layout.pages, page_size=layout.page_size, sms=sms)


def form(model: Model) -> str:
    """How decodes run, for people."""
    if model.block is None or model.numerics.watched:
        return "op by op"
    if not model.numerics.hopper:
        return "by the formulas of the kernels"
    try:
        step_of(model.block, model.layout, model.numerics.hopper)
    except ValueError as error:
        return f"by launches a layer ({error})"
    return (
        f"up to {ROWS} rows by one kernel on {model.numerics.hopper} multiprocessors, more by launches for each layer"
    )


def persistent_step(model: Model, shape: Shape) -> Step | None:
    """The step of a launch, None where it is none."""
    fits = shape.width == 1 and shape.rows == ROWS and not model.numerics.watched
    if model.block is None or not fits or not model.numerics.hopper:
        return None
    try:
        return step_of(model.block, model.layout, model.numerics.hopper)
    except ValueError:
        return None


def decode_at_once(
    step: Step,
    block: StandardBlock,
    shape: Shape,
    weights: BlockWeights,
    pools: Pools,
    last_tokens: jax.Array,
    buffer: jax.Array,
) -> tuple[Pools, jax.Array]:
    """The KV with one more token of each of 8 rows, and logits float32 [8, V]. last_tokens and buffer as a launch has
    them."""
    shapes = Shapes.of(block)
    at = places_of(shape)
    begun, planned = begin_step(
        buffer,
        last_tokens,
        embedding(weights),
        weights.gains,
        packed=packed(shapes, weights),
        at=at,
        pages=Pages(step.pages, step.page_size, step.kv_heads),
    )
    cos, sin = turns(block, jnp.maximum(shape.cut(buffer).positions[:, 0], 0))
    stacked = Stacked(weights.tiles, weights.head, weights.gains, weights.bias, weights.head_gains)
    tokens = Tokens(begun.x, begun.scaled, begun.squares, cos, sin, planned.page, planned.place)
    made = decode_step(step, stacked, tokens, *pools, planned.schedule, at.tables)
    return (made.keys, made.values), made.logits


def places_of(shape: Shape) -> Buffer:
    """Where the parts of a launch's buffer begin."""
    first = Fields(*(int(part.flat[0]) for part in shape.cut(np.arange(shape.size))))
    at = {name: getattr(first, name) for name in ("token_ids", "positions", "seq_lens", "slots", "page_tables")}
    return Buffer(**at, pages=shape.pages, carry=CARRY)
