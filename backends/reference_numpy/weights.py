"""Weights as float32 arrays, dequantised straight into place. Groups are fused here: one matrix for q, k and v."""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import WeightSchema, WeightSpec
from mlxcel.core.source import Progress
from mlxcel.tensor_check import check_tensors


@attrs.frozen(eq=False)
class Linear:
    """A fused group of one layer: matrix [sum of F, D], bias [sum of F] or None, and the F of each weight."""

    matrix: np.ndarray
    bias: np.ndarray | None
    sizes: tuple[int, ...]


@attrs.frozen(eq=False)
class Weights:
    """Everything a forward reads: fused groups and plain arrays, by (name, layer)."""

    layers: int
    linear: dict[tuple[str, int], Linear]
    plain: dict[tuple[str, int], np.ndarray]
    nbytes: int


def load_weights(schema: WeightSchema, checkpoint: Checkpoint, progress: Progress) -> Weights:
    """Read every weight once. CheckpointError names all tensors that are missing, and each that has another shape."""
    names = schema.tensor_names(checkpoint.naming)
    check_tensors(schema, checkpoint)
    arrays: dict[tuple[str, int], np.ndarray] = {}
    linear: dict[tuple[str, int], Linear] = {}
    for layer in range(schema.layers):
        for group in dict.fromkeys(w.group or w.name for w in schema.weights if w.role == "linear" and not w.tied_to):
            members = schema.group(group)
            if members[0].in_layer(layer) and (members[0].per_layer or layer == 0):
                linear[group, layer] = _fuse(schema, members, layer, arrays)
    for place in names.values():
        if (place.weight.name, place.layer) not in arrays:
            arrays[place.weight.name, place.layer] = np.empty(place.weight.shape, np.float32)
    progress.start("load", len(names), "tensors")
    for done, (name, place) in enumerate(names.items(), 1):
        out = arrays[place.weight.name, place.layer]
        if place.expert is not None:
            out = out[place.expert]
        checkpoint.read(name, out.reshape(checkpoint.tensors[name].shape))  # a view: it is contiguous
        transform = place.weight.transforms.get(checkpoint.naming)
        if transform is not None:
            out[...] = transform(out)
        progress.advance(done)
    progress.finish()
    nbytes = sum(array.nbytes for array in arrays.values())
    for weight in schema.weights:
        if weight.tied_to is not None:
            shared = arrays[weight.tied_to, 0]
            bias = next((arrays[other.name, 0] for other in schema.weights if other.bias_of == weight.name), None)
            linear[weight.name, 0] = Linear(shared, bias, (len(shared),))
    return Weights(schema.layers, linear, arrays, nbytes)


def _fuse(
    schema: WeightSchema, members: tuple[WeightSpec, ...], layer: int, arrays: dict[tuple[str, int], np.ndarray]
) -> Linear:
    """Room for a group, with a slice of it for each member in `arrays`."""
    sizes = tuple(weight.shape[0] for weight in members)
    matrix = np.empty((sum(sizes), *members[0].shape[1:]), np.float32)
    biases = {w.bias_of: w for w in schema.weights if w.role == "bias" and w.bias_of in {m.name for m in members}}
    bias = np.zeros(sum(sizes), np.float32) if biases else None
    start = 0
    for weight, size in zip(members, sizes, strict=True):
        arrays[weight.name, layer] = matrix[start : start + size]
        if bias is not None and weight.name in biases:
            arrays[biases[weight.name].name, layer] = bias[start : start + size]
        start += size
    return Linear(matrix, bias, sizes)
