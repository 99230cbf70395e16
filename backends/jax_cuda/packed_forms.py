"""Which weights lie in the tiles of the Hopper kernels. The others are plain matrices, for XLA."""

from __future__ import annotations

from collections.abc import Mapping

from mlxcel.core.family import WeightSchema
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, fits
from mlxcel_jax_cuda.numerics import Numerics

GATED = "gate_up"
"""The group whose two members meet in `gated`: kernels pair their rows."""


def packed_forms(schema: WeightSchema, numerics: Numerics) -> Mapping[str, Weight]:
    """By the name of a fused group, or of the embedding where the head is tied to it; of models that are no standard
    block, whose arrays are not these."""
    if not numerics.packed:
        return {}
    forms = {}
    for weight in schema.weights:
        if weight.role != "linear" or len(weight.shape) != 2:
            continue
        name = weight.group or weight.name
        members = schema.group(name)
        rows, depth = sum(member.shape[0] for member in members), weight.shape[1]
        paired = name == GATED and len(members) == 2 and members[0].shape == members[1].shape
        facing = rows // 2 if paired and fits(rows, depth, facing=rows // 2) else 0
        if fits(rows, depth, facing=facing):
            forms[weight.tied_to or name] = Weight.of(rows, depth, facing=facing)
    return forms
