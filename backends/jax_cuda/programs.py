"""The closed set of programs of a step: what is compiled before an engine is ready."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from mlxcel.core.sampling import Sampler
from mlxcel_jax_cuda.drawing import Asked, DrawShape
from mlxcel_jax_cuda.forward import at_once
from mlxcel_jax_cuda.launch import Launch, Shape
from mlxcel_jax_cuda.model import Model


@attrs.frozen(eq=False)
class Programs:
    """Of one shape of a launch, each in the company of rows of padding."""

    launch: Launch
    whole: tuple[Asked, ...]  # forward and draw as one program
    alone: bool  # whether the forward is one of its own too
    draws: tuple[Asked, ...]  # behind its logits, those that no shape before it had

    @property
    def count(self) -> int:
        return len(self.whole) + self.alone + len(self.draws)


def programs(model: Model, sampler: Sampler, shapes: Iterable[Shape]) -> list[Programs]:
    """Every program that a step of these shapes may need, each once."""
    found: list[Programs] = []
    known: set[DrawShape] = set()
    for shape in shapes:
        launch = Launch.of_padding(shape, model.layout.slots)
        everyone = np.full(shape.logits, model.layout.slots, np.int32)
        asked = [Asked.of(sampler, sampling, everyone) for sampling in sampler.stage_sets(shape.logits)]
        whole = tuple(each for each in asked if at_once(model, shape, each.shape))
        behind = [each for each in asked if not at_once(model, shape, each.shape)]
        draws = tuple(each for each in behind if each.shape not in known)
        known.update(each.shape for each in draws)
        found.append(Programs(launch, whole, bool(behind) or not whole, draws))
    return found
