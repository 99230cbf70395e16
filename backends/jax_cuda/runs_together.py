"""Which launches of a decode run together, and how many of them: each run is a program of the closed set.

The host, whose work for a step costs as much as the step of a small model, does a good part of it once a run; who joins
waits for two runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from mlxcel.core.sampling import Sampler
from mlxcel_jax_cuda.drawing import DrawShape
from mlxcel_jax_cuda.fused_decode import by_block
from mlxcel_jax_cuda.launch import Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.persistent_decode import persistent_step

STEPS: Final = 4
"""Of one kernel. At 0.7 ms a step of 8 rows what the host does for each call and each read then costs a fourth; twice
as many would gain another eighth, and who joins would wait for 11 ms instead of 6."""

LAUNCHED: Final = 2
"""Steps by two kernels, or by launches for each layer, of two to three milliseconds: the fewest that are a run."""

MOST_ROWS: Final = 128
"""A step of more takes some 5 ms: who joins would wait for 20."""

CHEAPEST: Final = 2
"""Draws behind steps by launches. Each is a program whose kernels take two seconds to lower, so these are those that
nearly all rows use: greedy ones, and those that ask for nothing unusual."""

FAST_BYTES: Final = 6 * 10**9
"""Weights that an H200 reads in less than 2 ms. A longer step hides what the host does for it."""


@attrs.frozen
class Together:
    """Launches of one shape that can run together: so many, with a narrow draw, or with one of `draws` alone."""

    steps: int
    draws: frozenset[DrawShape] | None = None

    def takes(self, drawing: DrawShape) -> bool:
        return drawing.narrow if self.draws is None else drawing in self.draws


Runs = Mapping[Shape, Together]
"""By the shape of their launches."""


def runs_of(model: Model, sampler: Sampler, shapes: Iterable[Shape], steps: Callable[[Shape], int]) -> Runs:
    """Of those of the shapes whose `steps`, as `steps_of` gives them, are more than one."""
    found = {}
    for shape in shapes:
        if (count := steps(shape)) > 1:
            found[shape] = Together(count, _cheapest(sampler, shape) if persistent_step(model, shape) is None else None)
    return found


def _cheapest(sampler: Sampler, shape: Shape) -> frozenset[DrawShape]:
    draws = [DrawShape.of(sampler, sampling, shape.logits) for sampling in sampler.stage_sets(shape.logits)]
    return frozenset([drawing for drawing in draws if drawing.narrow][:CHEAPEST])


def steps_of(model: Model, shape: Shape, weight_bytes: int) -> int:
    """Of a run of launches of a shape; 1: they do not run together. A ring can undo one step too many, and so can a
    recurrent state (spec V9, V11)."""
    spec = model.layout.spec
    if spec.windowed or spec.recurrent or weight_bytes > FAST_BYTES or not can_run(model, shape):
        return 1
    step = persistent_step(model, shape)
    return STEPS if step is not None and step.rows == shape.rows else LAUNCHED


def can_run(model: Model, shape: Shape) -> bool:
    """Whether a run of such launches is one program that is worth it."""
    return by_block(model) and shape.width == 1 and shape.rows <= MOST_ROWS
