"""Whether a checkpoint has the tensors that a family asks for, by its headers alone."""

from __future__ import annotations

import difflib

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import WeightSchema
from mlxcel.errors import CheckpointError

NAMED = 5


def check_tensors(schema: WeightSchema, checkpoint: Checkpoint) -> None:
    """CheckpointError names the tensors that are missing, else the first that has another shape."""
    places = schema.tensor_names(checkpoint.naming)
    missing = [name for name in places if name not in checkpoint.tensors]
    if missing:
        shown = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
        near = difflib.get_close_matches(missing[0], checkpoint.tensors, 1)
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} of {len(places)} tensors are missing: {shown}",
            hint=f"the nearest name there is {near[0]}" if near else "the download may be incomplete",
        )
    for name, place in places.items():
        shape = checkpoint.tensors[name].shape
        if not place.fits(shape):
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} is {list(shape)}, the config makes it {list(place.shape)}"
            )
