"""A decode step of up to 32 rows as one kernel: which models have it, and what goes before it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.family import StandardBlock
from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import CARRY
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.persistent_shape import ROWS, Step
from mlxcel_jax_cuda.kernels.persistent_step import Stacked, Tokens, decode_step
from mlxcel_jax_cuda.kernels.step_begin import Buffer, Pages, begin_step
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.standard_block import turns
from mlxcel_jax_cuda.standard_hopper import embedding, packed
from mlxcel_jax_cuda.standard_steps import Pools


def step_of(block: StandardBlock, layout: KVLayout, rows: int, sms: int) -> Step:
    """Of a launch of so many rows, those that are padding among them. ValueError, with the reason, where the kernel
    cannot do it. Its blocks wait for one another and so have to be on the device together: as many as it has
    multiprocessors, each with more than half of the shared memory of one."""
    shapes = Shapes.of(block)
    return Step.of(block, shapes, pages=layout.pages, page_size=layout.page_size, rows=rows, sms=sms)


def form(model: Model) -> str:
    """How decodes run, for people."""
    if model.block is None or model.numerics.watched:
        return "op by op"
    if not model.numerics.hopper:
        return "by the formulas of the kernels"
    most, reason = 0, ""
    for rows in ROWS:
        try:
            step_of(model.block, model.layout, rows, model.numerics.hopper)
        except ValueError as error:
            reason = f" ({error})"
        else:
            most = rows
    if not most:
        return f"by launches for each layer{reason}"
    where = f"on {model.numerics.hopper} multiprocessors"
    return f"up to {most} rows by one kernel {where}, more by launches for each layer{reason}"


def persistent_step(model: Model, shape: Shape) -> Step | None:
    """The step of a launch, None where it is none."""
    fits = shape.width == 1 and shape.rows in ROWS and not model.numerics.watched
    if model.block is None or not fits or not model.numerics.hopper:
        return None
    try:
        return step_of(model.block, model.layout, shape.rows, model.numerics.hopper)
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
    """The KV with one more token of each of N rows, and logits float32 [N, V]. last_tokens and buffer as a launch has
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
        sms=step.sms,
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
    return Buffer(rows=shape.rows, **at, pages=shape.pages, carry=CARRY)
