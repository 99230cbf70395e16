"""What a family declares, against itself and against the headers of a checkpoint: no forward runs here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily, TensorPlace, WeightSchema, WeightSpec
from mlxcel.core.kv import FullKV, RecurrentKV, SlidingKV
from mlxcel.testing.family_watch import SMALL, WatchedCheckpoint
from mlxcel.testing.laws import broken


def check_schema(family: ModelFamily, checkpoint: Checkpoint, config: Any) -> WeightSchema:
    """Config, schema, KV spec and ends against each other and against the checkpoint's headers; no forward runs."""
    for field in ("vocab_size", "context"):
        size = getattr(config, field, None)
        if not isinstance(size, int) or size < 1:
            raise broken("config", f"{field} is {size!r}, it must be an integer of 1 or more")
    try:
        schema = family.schema(config)
    except ValueError as error:
        raise broken("schema", str(error)) from error
    by_name = {weight.name: weight for weight in schema.weights}
    for weight in schema.weights:
        _check_weight(weight, by_name, checkpoint, config)
    _check_groups(schema)
    _check_tensors(schema, checkpoint)
    _check_kv(family, config, schema)
    outside = [end for end in family.eos_ids(config) if not 0 <= end < config.vocab_size]
    if outside:
        raise broken("config", f"eos_ids has {outside[0]}, ids are 0 to {config.vocab_size - 1}")
    return schema


def _check_weight(weight: WeightSpec, by_name: dict[str, WeightSpec], checkpoint: Checkpoint, config: Any) -> None:
    name = weight.name
    if len(weight.axes) != len(weight.shape):
        raise broken("schema", f"{name}: axes {weight.axes!r} and shape {list(weight.shape)} differ in length")
    if weight.role == "linear" and len(weight.shape) != 2:
        raise broken("schema", f"{name} is {list(weight.shape)}, a linear weight is [out, in]")
    if weight.role == "experts" and len(weight.shape) != 3:
        raise broken("schema", f"{name} is {list(weight.shape)}, weights of experts are [E, out, in]")
    if weight.layers is not None and (not weight.per_layer or list(weight.layers) != sorted(set(weight.layers))):
        raise broken("schema", f"{name} is of layers {list(weight.layers)}: they rise, and the weight is per layer")
    if weight.role == "embedding" and weight.shape[0] != config.vocab_size:
        raise broken("schema", f"{name} has {weight.shape[0]} rows, the config's vocab_size is {config.vocab_size}")
    if weight.tied_to is not None:
        other = by_name.get(weight.tied_to)
        if other is None or other.tied_to is not None or other.per_layer or other.shape != weight.shape:
            raise broken(
                "schema", f"{name} is tied to {weight.tied_to!r}: it must be a weight of its shape, itself read"
            )
    elif checkpoint.naming not in weight.names:
        raise broken("schema", f"{name} has no name under the checkpoint's naming {checkpoint.naming!r}")
    elif weight.per_layer != ("{i}" in weight.names[checkpoint.naming]):
        raise broken("schema", f"{name}: {{i}} stands in a tensor's name exactly if the weight is per layer")
    if weight.role != "experts" and any("{e}" in pattern for pattern in weight.names.values()):
        raise broken("schema", f"{name} has {{e}} in a tensor's name, which is for weights of role 'experts'")
    if weight.bias_of is not None:
        target = by_name.get(weight.bias_of)
        if target is None or target.role != "linear" or weight.role != "bias":
            raise broken("schema", f"{name} is a bias of {weight.bias_of!r}, which is no linear weight of the schema")
        if weight.shape != target.shape[:1] or weight.per_layer != target.per_layer or weight.layers != target.layers:
            raise broken(
                "schema",
                f"{name} {list(weight.shape)} of layers {_layers(weight)} cannot be the bias of a "
                f"{list(target.shape)} weight of layers {_layers(target)}",
            )


def _layers(weight: WeightSpec) -> str:
    if not weight.per_layer:
        return "none"
    return "all" if weight.layers is None else str(list(weight.layers))


def _check_kv(family: ModelFamily, config: Any, schema: WeightSchema) -> None:
    kv = family.kv_spec(config)
    if len(kv.layers) != schema.layers:
        raise broken("KV", f"the KV spec has {len(kv.layers)} layers, the schema {schema.layers}")
    for layer, entry in enumerate(kv.layers):
        match entry:
            case FullKV(kv_heads=heads, k_dim=keys, v_dim=values):
                sizes: tuple[int, ...] = (heads, keys, values)
            case SlidingKV(kv_heads=heads, k_dim=keys, v_dim=values, window=window):
                sizes = (heads, keys, values, window)
            case RecurrentKV(shapes=shapes):
                sizes = (len(shapes), *(size for shape in shapes for size in shape))
        if min(sizes) < 1:
            raise broken("KV", f"layer {layer} keeps {entry}: each number must be 1 or more")


def _check_groups(schema: WeightSchema) -> None:
    for weight in schema.weights:
        for member in schema.group(weight.group or weight.name) if weight.role == "linear" else ():
            if member.shape[1] != weight.shape[1] or schema.layers_of(member) != schema.layers_of(weight):
                raise broken(
                    "schema",
                    f"{weight.name} {list(weight.shape)} and {member.name} {list(member.shape)} share group "
                    f"{weight.group!r}: their inputs must be of one size, in the same layers or all outside",
                )


def _check_tensors(schema: WeightSchema, checkpoint: Checkpoint) -> None:
    """Tensors are there, in the shapes that the schema says, each for one weight; transforms keep shapes."""
    tensors = schema.tensor_names(checkpoint.naming)
    wanted = sum(
        len(schema.layers_of(weight)) * (weight.shape[0] if "{e}" in weight.names[checkpoint.naming] else 1)
        for weight in schema.weights
        if weight.tied_to is None
    )
    if len(tensors) != wanted:
        raise broken("schema", f"{wanted} weights, counted layer by layer, share {len(tensors)} tensor names")
    for name, place in tensors.items():
        weight, info = place.weight, checkpoint.tensors.get(name)
        if info is None:
            raise broken("schema", f"{weight.name} wants the tensor {name}, which the checkpoint does not have")
        if not place.fits(info.shape):
            raise broken(
                "schema", f"{weight.name} is {list(place.shape)}, the checkpoint's tensor {name} is {list(info.shape)}"
            )
        transform = weight.transforms.get(checkpoint.naming)
        if transform is not None and (made := _undone(transform, checkpoint, name, place)) != place.shape:
            raise broken("schema", f"the transform of {weight.name} makes {list(made)} of {list(place.shape)}")


def _undone(
    transform: Callable[[np.ndarray], np.ndarray], checkpoint: Checkpoint, name: str, place: TensorPlace
) -> tuple[int, ...]:
    """The shape that a transform makes of a tensor."""
    return transform(checkpoint.read(name).reshape(place.shape)).shape


def check_early_reads(watched: WatchedCheckpoint, schema: WeightSchema) -> None:
    """What `parse_config` has read through `watched` is of the schema, or small."""
    known = schema.tensor_names(watched.naming)
    for name in watched.reads:
        if name not in known and watched.tensors[name].size > SMALL:
            raise broken(
                "weights",
                f"parse_config reads {name}, {watched.tensors[name].size} values that the schema does not name "
                f"(a small parameter of up to {SMALL} may be read there)",
            )
