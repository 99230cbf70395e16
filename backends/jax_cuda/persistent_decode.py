"""A decode step of up to 32 rows as one kernel, or of 64 as two: which models have it, and what goes before it."""

from __future__ import annotations

import math
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.family import StandardBlock
from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import CARRY
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.persistent_shape import ROWS, Step
from mlxcel_jax_cuda.kernels.persistent_step import Stacked, Tokens, decode_step
from mlxcel_jax_cuda.kernels.sizes import TILE
from mlxcel_jax_cuda.kernels.step_begin import Buffer, Pages, begin_step
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.standard_block import turns
from mlxcel_jax_cuda.standard_hopper import embedding, packed
from mlxcel_jax_cuda.standard_steps import Pools

TWICE: Final = 64
"""Rows of a launch that is the kernel of half as many, twice: of a small model it takes less than launches of 128."""

TWICE_BYTES: Final = 6 * 10**9
"""Of weights that a step reads, which are not all (an embedding apart from the head is not): what may be read twice. Of
larger ones that alone takes what launches for each layer take."""


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
    two = f", up to {TWICE} by it twice" if halves(model) else ""
    where = f"on {model.numerics.hopper} multiprocessors"
    return f"up to {most} rows by one kernel {where}{two}, more by launches for each layer{reason}"


def halves(model: Model) -> bool:
    """Whether a launch of `TWICE` rows is one for this model."""
    shape = Shape(rows=TWICE, width=1, logits=TWICE, pages=1)
    return persistent_step(model, shape) is not None


def persistent_step(model: Model, shape: Shape) -> Step | None:
    """The step of a launch, or of each half of one of `TWICE` rows; None where it is none."""
    rows = shape.rows // 2 if shape.rows == TWICE else shape.rows
    fits = shape.width == 1 and rows in ROWS and not model.numerics.watched
    if model.block is None or not fits or not model.numerics.hopper:
        return None
    if shape.rows == TWICE and _weight_bytes(model.block) > TWICE_BYTES:
        return None
    try:
        return step_of(model.block, model.layout, rows, model.numerics.hopper)
    except ValueError:
        return None


def _weight_bytes(block: StandardBlock) -> int:
    shapes = Shapes.of(block)
    return 2 * (block.layers * shapes.layer_rows * TILE + math.prod(shapes.unembed.packed_shape))


def decode_at_once(
    step: Step,
    block: StandardBlock,
    shape: Shape,
    weights: BlockWeights,
    pools: Pools,
    last_tokens: jax.Array,
    buffer: jax.Array,
) -> tuple[Pools, jax.Array]:
    """The KV with one more token of each of N rows, and logits float32 [N, V]: by one step, or by as many as it takes,
    one behind the other. last_tokens and buffer as a launch has them."""
    shapes, logits = Shapes.of(block), []
    cos, sin = turns(block, jnp.maximum(shape.cut(buffer).positions[:, 0], 0))
    stacked = Stacked(weights.tiles, weights.head, weights.gains, weights.bias, weights.head_gains)
    for first in range(0, shape.rows, step.rows):
        at = places_of(shape, first, step.rows)
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
        own = slice(first, first + step.rows)
        turned = cos[:, own], sin[:, own]
        tokens = Tokens(begun.x, begun.scaled, begun.squares, *turned, planned.page, planned.place)
        made = decode_step(step, stacked, tokens, *pools, planned.schedule, at.tables)
        pools = made.keys, made.values
        logits.append(made.logits)
    return pools, logits[0] if len(logits) == 1 else jnp.concatenate(logits)


def places_of(shape: Shape, first: int, rows: int) -> Buffer:
    """Where the parts of a launch's buffer begin, of so many of its rows from the `first` on."""
    begins = Fields(*(int(part[first].flat[0]) for part in shape.cut(np.arange(shape.size))))
    at = {name: getattr(begins, name) for name in ("token_ids", "positions", "seq_lens", "slots", "page_tables")}
    return Buffer(rows=rows, **at, pages=shape.pages, carry=CARRY)
