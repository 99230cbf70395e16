"""A decode step of up to 8 rows as one kernel: which models have it, and what goes before it."""

from __future__ import annotations

import jax

from mlxcel.core.family import StandardBlock
from mlxcel.core.kv import KVLayout
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.attention_schedule import make_schedule
from mlxcel_jax_cuda.kernels.persistent_shape import COLUMNS, Step
from mlxcel_jax_cuda.kernels.persistent_step import Stacked, Tokens, decode_step
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.standard_block import begin_rows
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


def persistent_step(model: Model, rows: int) -> Step | None:
    """The step of a launch of so many rows, None where it is none."""
    if model.block is None or rows != ROWS or not model.numerics.hopper:
        return None
    try:
        return step_of(model.block, model.layout, model.numerics.hopper)
    except ValueError:
        return None


def decode_at_once(
    step: Step,
    block: StandardBlock,
    fields: Fields,
    token_ids: jax.Array,
    weights: BlockWeights,
    pools: Pools,
) -> tuple[Pools, jax.Array]:
    """As `standard_block.decode`, of 8 rows."""
    carried, rows = begin_rows(
        block, Shapes.of(block), weights, token_ids, fields.positions[:, 0], fields.page_tables, step.page_size
    )
    schedule = make_schedule(
        fields.page_tables,
        fields.seq_lens,
        num_pages=step.pages,
        page_size=step.page_size,
        kv_heads=step.kv_heads,
    )
    stacked = Stacked(weights.tiles, weights.head, weights.gains, weights.bias, weights.head_gains)
    made = decode_step(step, stacked, Tokens(*carried, *rows), *pools, schedule)
    return (made.keys, made.values), made.logits
