"""A run of steps that are one kernel each: one launch stands between two of them where draws are greedy.

What goes before a step is left to that launch, and what depends on positions alone is worked out once for all steps.
"""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.drawing import ENDS, DrawShape, LastDrawn, drawn, unpack_draw
from mlxcel_jax_cuda.kernels.persistent_shape import Step
from mlxcel_jax_cuda.kernels.persistent_step import Removed, Stacked, Tokens, decode_step
from mlxcel_jax_cuda.kernels.sizes import FEW_IDS, TILE
from mlxcel_jax_cuda.kernels.step_begin import Pages
from mlxcel_jax_cuda.kernels.step_between import Begins, Largest, between
from mlxcel_jax_cuda.launch import Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.persistent_decode import persistent_step, places_of
from mlxcel_jax_cuda.standard_block import turns
from mlxcel_jax_cuda.standard_hopper import embedding, packed
from mlxcel_jax_cuda.standard_steps import Pools

_drawn = jax.jit(drawn, static_argnums=0)
"""Traced once for all steps of a run."""


def step_of_run(model: Model, shape: Shape, drawing: DrawShape) -> Step | None:
    """Of a run of such launches, None where it is none. It tells the largest logits where they are the draw.

    Nor where a head fills a tile: there the step itself takes up to 3 % longer in such a run than the launches that are
    left out (docs/performance.md)."""
    step = persistent_step(model, shape)
    if step is None or step.rows != shape.rows or shape.logits != shape.rows or step.together == 1:
        return None
    greedy = drawing.largest_of if step.head.rows >= TILE * TILE else None
    return attrs.evolve(step, named=greedy or 0)


def run_at_once(
    model: Model,
    step: Step,
    shape: Shape,
    drawing: DrawShape,
    steps: int,
    weights: BlockWeights,
    pools: Pools,
    last: LastDrawn,
    buffer: jax.Array,
) -> tuple[Pools, LastDrawn, jax.Array]:
    """As `forward_and_draw_run`."""
    if model.block is None:
        raise RuntimeError("this model is no standard block")
    shapes, at, stride = Shapes.of(model.block), places_of(shape, 0, shape.rows), len(buffer) // steps
    parts = buffer.reshape(steps, stride)
    positions = jnp.maximum(parts[:, at.positions : at.positions + shape.rows], 0)
    of_steps = [
        jnp.tile(jnp.moveaxis(table.reshape(-1, steps, shape.rows), 1, 0), (1, step.together, 1))
        for table in turns(model.block, positions.reshape(-1))
    ]
    cos, sin = lax.optimization_barrier(of_steps)  # type: ignore[no-untyped-call]

    def meanwhile(
        number: int, last_tokens: jax.Array, largest: Largest | None
    ) -> tuple[Begins | None, jax.Array, jax.Array | None]:
        found: tuple[Begins | None, jax.Array, jax.Array | None] = between(
            number,
            buffer,
            (cos, sin) if number < steps else None,
            last_tokens,
            largest,
            embedding(weights),
            weights.gains,
            stride=stride,
            packed=packed(shapes, weights),
            at=at,
            draws_at=shape.size,
            pages=Pages(step.pages, step.page_size, step.kv_heads),
            sms=step.sms,
        )
        return found

    removed = _removed(drawing, parts[0, shape.size :]) if step.named else None
    stacked = Stacked(weights.tiles, weights.head, weights.gains, weights.bias, weights.head_gains)
    words: list[jax.Array | None] = []
    largest: Largest | None = None
    for number in range(steps):
        begins, tokens, found = meanwhile(number, last.tokens, largest)
        last = last._replace(tokens=tokens)
        words.append(found)
        if begins is None:
            raise RuntimeError(f"step {number} of {steps} does not begin")
        begun, planned = begins.begun, begins.planned
        rows = Tokens(
            begun.x, begun.scaled, begun.squares, *begins.turns, planned.page, planned.place, begins.come,
            removed,
        )  # fmt: skip
        made = decode_step(step, stacked, rows, *pools, planned.schedule, at.tables)
        pools = made.keys, made.values
        if step.named:
            largest = Largest(*made.largest)
            continue
        logits = lax.optimization_barrier(made.logits)  # type: ignore[no-untyped-call]
        last, told = _drawn(drawing, logits, last, parts[number, shape.size :])
        last = lax.optimization_barrier(last)  # type: ignore[no-untyped-call]
        words.append(told.words)
    if largest is not None:
        _, tokens, found = meanwhile(steps, last.tokens, largest)
        last = last._replace(tokens=tokens)
        words.append(found)
    return pools, last, jnp.stack([found for found in words if found is not None])


def _removed(drawing: DrawShape, buffer: jax.Array) -> Removed:
    """The ends that rows ignore, which are the same in all steps of a run. buffer: of the first one's draw."""
    _, params = unpack_draw(drawing, buffer)
    none = jnp.full((drawing.rows, FEW_IDS), -1, jnp.int32)
    ids = (params[ENDS] if ENDS in drawing.stages else none).T
    tiles = ids // TILE
    first = jnp.min(jnp.where(ids < 0, np.iinfo(np.int32).max, tiles))
    span = jnp.stack([first, jnp.max(tiles)])
    found: tuple[jax.Array, jax.Array] = lax.optimization_barrier((ids, span))  # type: ignore[no-untyped-call]
    return Removed(*found)
