"""A run: decode steps of the same rows as one program, so that the host calls and reads once for all of them.

Each step is what `forward_and_draw` is alone, fed by the carry of the one before it; it has a part of its own of the
host buffer, and of what is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel.core.plan import StepPlan
from mlxcel_jax_cuda.block_arrays import BlockWeights
from mlxcel_jax_cuda.drawing import Asked, DrawShape, LastDrawn
from mlxcel_jax_cuda.forward import OPTIONS, Read, whole_step
from mlxcel_jax_cuda.launch import Launch, Shape, aligned
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.steps_at_once import run_at_once, step_of_run
from mlxcel_jax_cuda.storage import Leaves


@attrs.frozen(eq=False)
class Run:
    """Steps of one launch, which differ in tokens, positions, and what of their draws moves."""

    launch: Launch  # of the first of them
    drawing: DrawShape
    buffer: np.ndarray  # int32 [steps, words]: of each step what `forward_and_draw` reads, up to what is aligned

    @classmethod
    def of(cls, launch: Launch, asked: Asked, steps: int) -> Run:
        """So many times the same step."""
        size = launch.shape.size
        buffer = np.zeros((steps, aligned(size + len(asked.buffer))), np.int32)
        buffer[:, :size] = launch.buffer
        buffer[:, size : size + len(asked.buffer)] = asked.buffer
        return cls(launch, asked.shape, buffer)

    @classmethod
    def of_plans(cls, launch: Launch, asked: Asked, plans: Sequence[StepPlan]) -> Run:
        """`launch` and `asked` are of the first plan, all of whose rows draw."""
        run = cls.of(launch, asked, len(plans))
        shape, first = launch.shape, plans[0]
        count = first.num_rows
        origin = np.zeros(shape.rows, np.intp)  # as for the first plan: padding repeats a row
        origin[:count] = range(count)
        for words, plan in zip(run.buffer[1:], plans[1:], strict=True):
            fields = shape.cut(words)
            fields.token_ids[:count, 0] = plan.token_ids
            fields.positions[:count, 0] = plan.positions
            fields.seq_lens[:count] = plan.seq_lens
            fields.state_reads[:count] = plan.state_copies
            fields.state_writes[:count] = 1 - plan.state_copies
            known, params = first.sampling.params, plan.sampling.params
            # A sampler hands out what stays as long as its rows do as the same array.
            moved = {name: params[name][origin] for name in params if params[name] is not known[name]}
            asked.shape.write(words[shape.size :], moved)
        return run

    @property
    def steps(self) -> int:
        return len(self.buffer)

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.steps} times {self.launch.shape.words}, {self.drawing.words}"


_step = jax.jit(whole_step, static_argnums=(0, 1, 2))
"""Traced and lowered once, however many steps a run has."""


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5, 6), compiler_options=OPTIONS)
def forward_and_draw_run(
    model: Model,
    shape: Shape,
    drawing: DrawShape,
    steps: int,
    weights: Read,
    kv: Leaves,
    last: LastDrawn,
    buffer: jax.Array,
) -> tuple[Leaves, LastDrawn, jax.Array]:
    """The bits of so many calls of `forward_and_draw`, and int32 [steps, 2, R], the words that each found. buffer int32
    [steps * words], as a Run has it."""
    step = step_of_run(model, shape, drawing)
    if step is not None and isinstance(weights, BlockWeights):
        return run_at_once(model, step, shape, drawing, steps, weights, (kv[0], kv[1]), last, buffer)
    # Cut by kernels of XLA's own: a cut in front of a Mosaic kernel becomes a fusion with it, which graphs leave out.
    parts = lax.optimization_barrier(jnp.split(buffer, steps))  # type: ignore[no-untyped-call]
    words = []
    for part in parts:
        kv, last, found = _step(model, shape, drawing, weights, kv, last, part)
        last = lax.optimization_barrier(last)  # type: ignore[no-untyped-call]
        words.append(found.words)
    return kv, last, jnp.stack(words)
