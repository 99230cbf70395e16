"""Weights on the device: a module tree, split once into flat leaves, and where each weight is among them; or the arrays
of a standard block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import StandardBlock, WeightSchema, WeightSpec
from mlxcel.core.source import Progress
from mlxcel.tensor_check import check_tensors
from mlxcel_jax_cuda.block_arrays import BlockIndex, BlockWeights
from mlxcel_jax_cuda.block_loading import BlockLoading
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, pack
from mlxcel_jax_cuda.numerics import Numerics

if TYPE_CHECKING:
    from mlxcel_jax_cuda.weight_tree import Tree


@attrs.frozen
class Linear:
    """A fused group of one layer: places of the matrix [sum of F, D] and the bias [sum of F], and the F of each weight.
    A packed matrix lies in the tiles of the Hopper kernels."""

    matrix: int
    bias: int | None
    sizes: tuple[int, ...]
    packed: Weight | None = None


@attrs.frozen(cache_hash=True)
class WeightIndex:
    """Places among the leaves, by (name, layer); 0 for what is outside layers. Static, and equal for equal models."""

    layers: int
    linear: tuple[tuple[tuple[str, int], Linear], ...]
    plain: tuple[tuple[tuple[str, int], int], ...]
    embedding: Weight | None = None  # the tiles of an embedding that is the head too


@attrs.frozen(eq=False)
class Weights:
    """What a forward reads: leaves by their places, or the arrays of a standard block."""

    index: WeightIndex | BlockIndex
    arrays: tuple[jax.Array, ...] | BlockWeights

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays if array is not None)


@attrs.frozen
class _Group:
    """What becomes one leaf: a fused group of linear weights, or one weight. Biases of a group are joined in `_split`,
    since some of its members may have none."""

    name: str
    layer: int | None
    members: tuple[WeightSpec, ...]


def load_weights(
    schema: WeightSchema,
    checkpoint: Checkpoint,
    numerics: Numerics,
    device: jax.Device,
    progress: Progress,
    forms: Mapping[str, Weight],
) -> Weights:
    """Groups of `forms` are packed on the device. CheckpointError names all tensors that are missing, and each that has
    another shape."""
    from mlxcel_jax_cuda.weight_tree import Tree

    tree, sizes = Tree(schema.layers), {}
    placed: jax.Array | None = None
    for group, parts in _read_groups(schema, checkpoint, progress):
        member = group.members[0]
        if placed is not None:
            # The next group was read meanwhile. Its float32 takes the place of the last one's, and not one behind it.
            placed.block_until_ready()
        placed = _placed(_joined_rows(parts), _dtype(member, numerics), device)
        if group.name in forms:
            placed = pack(placed, forms[group.name])
        tree.put(group.name, group.layer, placed, member.axes)
        sizes[group.name, group.layer or 0] = tuple(len(part) for part in parts)
    return _split(schema, tree, sizes, forms)


def load_block(
    schema: WeightSchema,
    block: StandardBlock,
    checkpoint: Checkpoint,
    numerics: Numerics,
    device: jax.Device,
    progress: Progress,
) -> Weights:
    """A standard block, in its few arrays. CheckpointError as `load_weights`."""
    loading = BlockLoading(block, tied=schema["unembed"].tied_to is not None, dtype=numerics.compute, device=device)
    biases: dict[str, np.ndarray] = {}
    for group, parts in _read_groups(schema, checkpoint, progress):
        layer, of = group.layer or 0, group.members[0].bias_of
        if of is None:
            loading.put(group.name, layer, _joined_rows(parts))
            continue
        biases[of] = parts[0]
        if len(biases) == len(schema.group("qkv")):  # those of a layer come together
            loading.put("qkv_bias", layer, np.concatenate([biases.pop(member.name) for member in schema.group("qkv")]))
    return Weights(BlockIndex.of(block), loading.done())


def _joined_rows(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read_groups(
    schema: WeightSchema, checkpoint: Checkpoint, progress: Progress
) -> Iterator[tuple[_Group, list[np.ndarray]]]:
    """Every weight once, a group at a time, so that the host holds one group in float32."""
    check_tensors(schema, checkpoint)
    tensors: dict[tuple[str, int], list[tuple[str, int | None]]] = {}
    for tensor, place in schema.tensor_names(checkpoint.naming).items():
        tensors.setdefault((place.weight.name, place.layer), []).append((tensor, place.expert))
    done = 0
    progress.start("load", sum(map(len, tensors.values())), "tensors")
    for group in _groups(schema):
        parts = []
        for weight in group.members:
            parts.append(_read(weight, tensors[weight.name, group.layer or 0], checkpoint))
            done += len(tensors[weight.name, group.layer or 0])
            progress.advance(done)
        yield group, parts
    progress.finish()


def _groups(schema: WeightSchema) -> Iterator[_Group]:
    for layer in (None, *range(schema.layers)):
        seen: set[str] = set()
        for weight in schema.weights:
            here = not weight.per_layer if layer is None else weight.per_layer and weight.in_layer(layer)
            if not here or weight.tied_to is not None:
                continue
            name = weight.name
            members: tuple[WeightSpec, ...] = (weight,)
            if weight.role == "linear":
                name = weight.group or weight.name
                members = tuple(w for w in schema.group(name) if layer is None or w.in_layer(layer))
            if name not in seen:
                seen.add(name)
                yield _Group(name, layer, members)


def _read(weight: WeightSpec, tensors: list[tuple[str, int | None]], checkpoint: Checkpoint) -> np.ndarray:
    out = np.empty(weight.shape, np.float32)
    transform = weight.transforms.get(checkpoint.naming)
    for name, expert in tensors:
        part = out if expert is None else out[expert]
        checkpoint.read(name, part.reshape(checkpoint.tensors[name].shape))
        if transform is not None:
            part[...] = transform(part)
    return out


def _dtype(weight: WeightSpec, numerics: Numerics) -> Any:
    """Products take the compute type; what scales, shifts or serves as glue stays as it is."""
    return numerics.compute if weight.role in ("linear", "embedding", "experts") else jnp.float32


def _placed(values: np.ndarray, dtype: Any, device: jax.Device) -> jax.Array:
    placed: jax.Array = jax.device_put(values, device).astype(dtype)
    return placed


def _split(
    schema: WeightSchema,
    tree: Tree,
    sizes: dict[tuple[str, int], tuple[int, ...]],
    forms: Mapping[str, Weight],
) -> Weights:
    """The tree's leaves in its own order, biases of a group joined into one leaf."""
    leaves: list[jax.Array] = []
    at: dict[tuple[str, int], int] = {}
    for name, layer, values in tree.leaves():
        at[name, layer] = len(leaves)
        leaves.append(values)
    linear: dict[tuple[str, int], Linear] = {}
    biased = {weight.bias_of: weight for weight in schema.weights if weight.role == "bias" and weight.bias_of}
    for (name, layer), place in list(at.items()):
        members = schema.group(name) if any((w.group or w.name) == name for w in schema.weights) else ()
        if members and members[0].role == "linear":
            bias = _joined([biased.get(w.name) for w in members], sizes[name, layer], layer, at, leaves)
            linear[name, layer] = Linear(place, bias, sizes[name, layer], forms.get(name))
    for weight in schema.weights:
        if weight.tied_to is not None:
            shared = at[weight.tied_to, 0]
            bias = _joined([biased.get(weight.name)], (weight.shape[0],), 0, at, leaves)
            linear[weight.name, 0] = Linear(shared, bias, (weight.shape[0],), forms.get(weight.tied_to))
    by_name = tuple(sorted(linear.items(), key=lambda item: item[0]))
    index = WeightIndex(schema.layers, by_name, tuple(sorted(at.items())), forms.get("embed"))
    return Weights(index, tuple(leaves))


def _joined(
    biases: list[WeightSpec | None],
    sizes: tuple[int, ...],
    layer: int,
    at: dict[tuple[str, int], int],
    leaves: list[jax.Array],
) -> int | None:
    """The place of one bias for a group, zeros for members without; None where no member has one."""
    if not any(biases):
        return None
    parts = [
        jnp.zeros(size, jnp.float32) if bias is None else leaves[at[bias.name, layer]]
        for bias, size in zip(biases, sizes, strict=True)
    ]
    if len(parts) == 1:
        return at[biases[0].name, layer] if biases[0] is not None else None
    leaves.append(jnp.concatenate(parts))
    return len(leaves) - 1
