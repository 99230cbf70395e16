"""The static side of a loaded model: everything that chooses an executable but the shape of a launch."""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.family import ModelFamily, StandardBlock
from mlxcel.core.kv import KVLayout
from mlxcel_jax_cuda.block_arrays import BlockIndex
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.storage import KVArrays
from mlxcel_jax_cuda.weights import WeightIndex


def _kind(family: ModelFamily) -> Any:
    """Families without state of their own are equal when they are of one class."""
    return id(family) if getattr(family, "__dict__", None) else type(family)


@attrs.frozen(cache_hash=True)
class Model:
    """Equal models share their executables: engines of one process compile a shape once."""

    family: ModelFamily = attrs.field(eq=_kind)
    config: Any
    index: WeightIndex | BlockIndex
    layout: KVLayout
    numerics: Numerics
    block: StandardBlock | None = None  # what the model is to fused steps, where its arrays are a block's

    @property
    def kv(self) -> KVArrays:
        return KVArrays(self.layout, isinstance(self.index, BlockIndex))
