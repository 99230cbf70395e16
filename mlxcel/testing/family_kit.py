"""Conformance of a model family: `check_family(MyFamily(), checkpoint)` in a test of its own distribution.

Everything runs on reference-numpy and reads each tensor dozens of times: use a checkpoint of a few kilobytes with
random weights in every tensor, biases included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily, WeightSchema, WeightSpec
from mlxcel.testing.family_run import Feed, logits_of, logits_of_rows
from mlxcel.testing.family_watch import SMALL, WatchedCheckpoint, WatchedFamily, broken

__all__ = ["TOLERANCE", "check_family", "check_schema", "logits_of"]

Reference = Callable[[np.ndarray], np.ndarray]
"""token ids int32 [T] -> logits [T, V], by a forward that shares no code with the family."""

TOLERANCE = 1e-4
"""Of the largest logit: float32 sums of a small model in another order stay well below it, a wrong formula does not."""

LENGTH = 12
"""Tokens of the prompt that is fed whole, in pieces and token by token."""


def check_family(
    family: ModelFamily, checkpoint: Checkpoint, *, reference: Reference | None = None, tolerance: float = TOLERANCE
) -> None:
    """All laws of a family, on one checkpoint. AssertionError says which law broke, and where.

    - schema, config, KV: what the family declares fits itself and the checkpoint (`check_schema`).
    - pieces, company: logits are the same bits however the prompt is cut and whatever runs beside it.
    - weights: each tensor of the schema changes the logits, and nothing else is read.
    - reference: logits agree with `reference` within `tolerance` of the largest one.
    """
    watched = WatchedCheckpoint(checkpoint)
    config = family.parse_config(watched)
    schema = check_schema(family, checkpoint, config)
    _check_early_reads(watched, schema)
    subject = WatchedFamily(family, schema, watched)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, min(LENGTH, config.context)).astype(np.int32)
    whole = logits_of(subject, watched, ids)
    if whole.shape != (len(ids), config.vocab_size):
        raise broken("rows", f"forward returns {list(whole.shape)}, wanted {[len(ids), config.vocab_size]}")
    if not np.isfinite(whole).all():
        position, token = np.argwhere(~np.isfinite(whole))[0]
        raise broken("numbers", f"logit {token} at position {position} is {whole[position, token]}")
    if reference is not None:
        _check_reference(whole, np.asarray(reference(ids)), tolerance)
    _check_pieces(subject, watched, ids, whole)
    _check_company(subject, watched, ids, whole, config.vocab_size)
    _check_every_weight_counts(family, checkpoint, schema, ids, whole)


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
    kv = family.kv_spec(config)
    if len(kv.layers) != schema.layers:
        raise broken("KV", f"the KV spec has {len(kv.layers)} layers, the schema {schema.layers}")
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
    if weight.bias_of is not None:
        target = by_name.get(weight.bias_of)
        if target is None or target.role != "linear" or weight.role != "bias":
            raise broken("schema", f"{name} is a bias of {weight.bias_of!r}, which is no linear weight of the schema")
        if weight.shape != target.shape[:1] or weight.per_layer != target.per_layer:
            raise broken("schema", f"{name} {list(weight.shape)} cannot be the bias of a {list(target.shape)} weight")


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
        if info.shape != place.shape:
            raise broken(
                "schema", f"{weight.name} is {list(place.shape)}, the checkpoint's tensor {name} is {list(info.shape)}"
            )
        transform = weight.transforms.get(checkpoint.naming)
        if transform is not None and (made := transform(checkpoint.read(name)).shape) != place.shape:
            raise broken("schema", f"the transform of {weight.name} makes {list(made)} of {list(place.shape)}")


def _check_early_reads(watched: WatchedCheckpoint, schema: WeightSchema) -> None:
    known = schema.tensor_names(watched.naming)
    for name in watched.reads:
        if name not in known and watched.tensors[name].size > SMALL:
            raise broken(
                "weights",
                f"parse_config reads {name}, {watched.tensors[name].size} values that the schema does not name "
                f"(a small parameter of up to {SMALL} may be read there)",
            )


def _check_reference(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    if want.shape != got.shape:
        raise broken("reference", f"it returns {list(want.shape)}, the family {list(got.shape)}")
    error, largest = np.abs(got - want), float(np.abs(want).max())
    if not error.max() <= tolerance * largest:  # a NaN of the reference is no agreement
        wrong = ~(error <= tolerance * largest)
        position, token = np.argwhere(wrong)[0]
        raise broken(
            "reference",
            f"first beyond {tolerance:g} of the largest logit {largest:g}: position {position}, logit {token} is "
            f"{got[position, token]}, the reference has {want[position, token]}; {wrong.sum()} of {wrong.size} are",
        )


def _check_pieces(family: ModelFamily, checkpoint: Checkpoint, ids: np.ndarray, whole: np.ndarray) -> None:
    total = len(ids)
    for what, cuts in (
        ("in two pieces", [total // 2]),
        ("in uneven pieces", [1, total // 3 + 1]),
        ("token by token", list(range(1, total))),
    ):
        inside = sorted({cut for cut in cuts if 0 < cut < total})
        _same_bits("pieces", f"{what}, cut at {inside}", logits_of(family, checkpoint, ids, inside), whole)
    last = logits_of_rows(family, checkpoint, [ids], [[Feed(0, 0, total)]], last_only=True)[0]
    _same_bits("rows", "when the last token's logits alone are asked for", last, whole[-1:], total - 1)


def _check_company(family: ModelFamily, checkpoint: Checkpoint, ids: np.ndarray, whole: np.ndarray, vocab: int) -> None:
    total, half = len(ids), len(ids) // 2
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, vocab, half + 1), ids, rng.integers(0, vocab, total)]
    long, short = Feed(2, 0, total), Feed(0, 0, half + 1)
    together: list[tuple[str, Sequence[Sequence[Feed]]]] = [
        ("between two rows", [[short, Feed(1, 0, total), long]]),
        ("behind a longer row", [[long, Feed(1, 0, total)], [short]]),
    ]
    if half:
        late = [[Feed(2, 0, half), Feed(1, 0, half)], [Feed(1, half, total), Feed(2, half, total), short]]
        together.append(("in two pieces, in changing places beside other rows", late))
    for what, steps in together:
        _same_bits("company", what, logits_of_rows(family, checkpoint, rows, steps)[1], whole)


def _check_every_weight_counts(
    family: ModelFamily, checkpoint: Checkpoint, schema: WeightSchema, ids: np.ndarray, whole: np.ndarray
) -> None:
    for name, place in schema.tensor_names(checkpoint.naming).items():
        changed = WatchedCheckpoint(checkpoint, changed=name)
        if np.array_equal(logits_of(family, changed, ids), whole):
            where = f" of layer {place.layer}" if place.weight.per_layer else ""
            raise broken("weights", f"{place.weight.name}{where} is not used: other values in {name} change no logit")


def _same_bits(law: str, what: str, got: np.ndarray, want: np.ndarray, start: int = 0) -> None:
    """Logits [T, V] of the positions from `start` on."""
    if got.shape == want.shape and got.tobytes() == want.tobytes():
        return
    position, token = np.argwhere(got.view(np.uint32) != want.view(np.uint32))[0]
    raise broken(
        law,
        f"{what}, the logits at position {start + position} differ from those of the prompt fed whole and alone; "
        f"first at logit {token}: {got[position, token]:.9g} and {want[position, token]:.9g}",
    )
