"""n choices of one request: rows that differ in their index and their seed alone."""

from __future__ import annotations

import attrs

from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.sampling.noise import choice_seed


def choices(spec: SequenceSpec) -> tuple[SequenceSpec, ...]:
    """As many as `spec.params.n` asks for. Choice 0 keeps the seed, the others' are derived and can be sent back to get
    the same reply alone (spec 4.9)."""
    return tuple(
        attrs.evolve(spec, choice=index, params=spec.params.clone(seed=choice_seed(spec.params.seed, index)))
        for index in range(spec.params.n)
    )
