"""The closed set of programs of a step: what is compiled before an engine is ready."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.sampling import Sampler
from mlxcel_jax_cuda.decode_run import Run
from mlxcel_jax_cuda.drawing import Asked, DrawShape
from mlxcel_jax_cuda.forward import at_once
from mlxcel_jax_cuda.launch import Launch, Launching, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.runs_together import Runs

_LISTS = (0, 1, -1)
"""Of best ids beside a score: none, some, all V."""


@attrs.frozen(eq=False)
class Programs:
    """Of one shape of a launch, each in the company of rows of padding."""

    launch: Launch
    whole: tuple[Asked, ...]  # forward and draw as one program
    runs: tuple[Run, ...]  # several steps of forward and draw as one
    alone: bool  # whether the forward is one of its own too
    draws: tuple[Asked, ...]  # behind its logits, those that no shape before it had


def programs(model: Model, sampler: Sampler, launching: Launching, runs: Runs) -> list[Programs]:
    """Every program that a step of these shapes may need, or a run of them, each once."""
    found: list[Programs] = []
    known: set[DrawShape] = set()
    for shape, stage_sets in _asked(sampler, launching):
        launch = Launch.of_padding(shape, model.layout.slots)
        everyone = np.full(shape.logits, model.layout.slots, np.int32)
        asked = [Asked.of(sampler, sampling, everyone) for sampling in stage_sets]
        whole = tuple(each for each in asked if at_once(model, shape, each.shape))
        together = runs.get(shape)
        running = (
            []
            if together is None
            else [Run.of(launch, each, together.steps) for each in asked if together.takes(each.shape)]
        )
        behind = {each.shape: each for each in asked if not at_once(model, shape, each.shape)}
        draws = tuple(each for drawing, each in behind.items() if drawing not in known)
        known.update(behind)
        found.append(Programs(launch, whole, tuple(running), bool(behind) or not whole, draws))
    return found


def _asked(sampler: Sampler, launching: Launching) -> Iterator[tuple[Shape, list[SamplingArrays]]]:
    for shape in launching.shapes:
        yield shape, sampler.stage_sets(shape.logits)
    shape = launching.scores
    yield shape, [sampler.pack_scores(np.zeros(shape.logits, np.int32), top) for top in _LISTS]
