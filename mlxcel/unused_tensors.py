"""Tensors of a checkpoint that its family does not ask for: named to people, never an error."""

from __future__ import annotations

from typing import Final

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import WeightSchema

NAMED: Final = 5


def unused_tensors(schema: WeightSchema, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Their names as `checkpoint.tensors` has them and in its order. A head beside tied embeddings is one of them."""
    wanted = schema.tensor_names(checkpoint.naming)
    return tuple(name for name in checkpoint.tensors if name not in wanted)


def unused_line(unused: tuple[str, ...]) -> str:
    """ "3 tensors are not used: a, b, c"; the first few stand for many."""
    shown = ", ".join(unused[:NAMED]) + (f" and {len(unused) - NAMED} more" if len(unused) > NAMED else "")
    return f"{len(unused)} {'tensor is' if len(unused) == 1 else 'tensors are'} not used: {shown}"
