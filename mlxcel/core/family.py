"""A model family, written once: its weights by name, its KV, and its mathematics over semantic ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from mlxcel.core.named import Named

if TYPE_CHECKING:  # plugins import this module to register: no numpy
    import numpy as np

    from mlxcel.core.checkpoint import Checkpoint
    from mlxcel.core.kv import KVSpec

Role = Literal["linear", "bias", "norm", "embedding"]
Array = Any
"""An array of the backend's own kind, described by its axis letters in each docstring."""


@attrs.frozen
class WeightSpec:
    """One weight of a family, once for each layer when `per_layer`.

    `names` maps a checkpoint naming ("hf", "gguf") to the tensor's name there, with "{i}" for the layer.
    `axes` gives the letters of `shape`, a linear weight being [out, in]. Linear weights that share a `group` are
    projected together by `ForwardContext.project`, in the order of the schema; a bias is added to the output of the
    linear weight that it names in `bias_of`. A weight that is `tied_to` another is that one and is not read.
    `transforms` maps a naming to a function on the float32 values that undoes what that format did to the layout.
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    names: Mapping[str, str] = attrs.field(factory=dict)
    role: Role = "linear"
    per_layer: bool = True
    group: str | None = None
    bias_of: str | None = None
    tied_to: str | None = None
    transforms: Mapping[str, Callable[[np.ndarray], np.ndarray]] = attrs.field(factory=dict)

    def checkpoint_name(self, naming: str, layer: int) -> str:
        """The tensor's name in a checkpoint of that naming. KeyError when the family has none for it."""
        return self.names[naming].replace("{i}", str(layer))


@attrs.frozen
class WeightSchema:
    """All weights of a model, in a fixed order. Names are unique."""

    layers: int
    weights: tuple[WeightSpec, ...]

    def __attrs_post_init__(self) -> None:
        names = [weight.name for weight in self.weights]
        if len(set(names)) != len(names):
            raise ValueError(f"weight names must be unique: {sorted(n for n in names if names.count(n) > 1)}")

    def __getitem__(self, name: str) -> WeightSpec:
        for weight in self.weights:
            if weight.name == name:
                return weight
        raise KeyError(name)

    def group(self, name: str) -> tuple[WeightSpec, ...]:
        """Linear weights of a group; a weight without one is a group of its own name."""
        return tuple(w for w in self.weights if w.role == "linear" and (w.group or w.name) == name)

    def tensor_names(self, naming: str) -> dict[str, tuple[WeightSpec, int]]:
        """Checkpoint name -> (weight, layer), for everything that must be read. Layer 0 for weights outside layers."""
        found: dict[str, tuple[WeightSpec, int]] = {}
        for weight in self.weights:
            if weight.tied_to is None:
                for layer in range(self.layers if weight.per_layer else 1):
                    found[weight.checkpoint_name(naming, layer)] = (weight, layer)
        return found


class ForwardContext(Protocol):
    """The ops a family is written in. T tokens of one step, flat; each op works on every token alone but `attend`.

    `layer` is the index that `for_layers` passes to its body (traced on some backends: use it for nothing else).
    Activations are [T, …]; weights are named, and how they are stored cannot be told from here.
    """

    @property
    def xp(self) -> Any:
        """The array API namespace, for glue."""
        ...

    def embed(self, weight: str = "embed") -> Array:
        """Rows of the embedding for the step's tokens: [T, D]."""
        ...

    def for_layers(self, body: Callable[[Any, Array], Array], x: Array) -> Array:
        """x after body(0, x), body(1, x) … for every layer of the schema."""
        ...

    def rms_norm(self, x: Array, weight: str, *, layer: Any = None, eps: float, offset: float = 0.0) -> Array:
        """x / sqrt(mean(x**2) + eps) * (weight + offset) over the last axis; the mean is float32. Shape of x.

        x may be [T, D] with weight [D] or [T, H, d] with weight [d]. https://arxiv.org/abs/1910.07467
        """
        ...

    def layer_norm(self, x: Array, weight: str, bias: str | None, *, layer: Any = None, eps: float) -> Array:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last axis. https://arxiv.org/abs/1607.06450"""
        ...

    def project(self, x: Array, group: str, *, layer: Any = None) -> tuple[Array, ...]:
        """x [T, in] through every linear weight of a group, biases added: a tuple of [T, out], in schema order."""
        ...

    def rope(self, x: Array, frequencies: np.ndarray, *, scale: float = 1.0) -> Array:
        """Rotary embedding of x [T, H, d] at the step's positions, pairs (i, i + n) of the first 2n dims, n =
        len(frequencies) (float32 [n], radians a position). cos and sin are multiplied by `scale`.
        https://arxiv.org/abs/2104.09864"""
        ...

    def attend(self, q: Array, k: Array, v: Array, *, layer: Any, scale: float) -> Array:
        """Write k [T, K, dk] and v [T, K, dv] into the KV of this layer, then causal attention of q [T, H, dk] over
        each row's own positions: [T, H * dv]. Query head h reads KV head h // (H // K)."""
        ...

    def gated(self, gate: Array, up: Array, activation: str) -> Array:
        """activation(gate) * up, both [T, F]. "silu", "gelu" (exact), "gelu_tanh", "relu"."""
        ...

    def activate(self, x: Array, activation: str) -> Array:
        """The activation alone, elementwise."""
        ...

    def select_rows(self, x: Array) -> Array:
        """The tokens whose logits are wanted: [T, D] -> [R, D]."""
        ...

    def unembed(self, x: Array, weight: str = "unembed") -> Array:
        """Logits float32 [R, V]."""
        ...


class ModelFamily(Protocol):
    """Mathematics only: no array is held, no file is read."""

    @property
    def name(self) -> str: ...

    def parse_config(self, checkpoint: Checkpoint) -> Any:
        """The family's own frozen config, from the checkpoint's config, its tensor names and, where a format keeps a
        parameter in one, a small tensor.

        It must have `vocab_size` (V, rows of the embedding) and `context` (positions the model was made for).
        CheckpointError names the key that is missing, wrong or not supported, and what is known.
        """
        ...

    def schema(self, config: Any) -> WeightSchema: ...

    def kv_spec(self, config: Any) -> KVSpec: ...

    def eos_ids(self, config: Any) -> frozenset[int]:
        """Ends the family knows by itself; usually none."""
        ...

    def forward(self, ctx: ForwardContext, config: Any) -> Array:
        """Logits float32 [R, V] of the tokens that `select_rows` keeps."""
        ...


@attrs.frozen
class FamilySpec(Named):
    """A family by name: `load()` gives its class, called without arguments.

    It is chosen by the checkpoint's `model_type` ("hf" naming) or architecture ("gguf" naming).
    """

    model_types: tuple[str, ...] = attrs.field(kw_only=True, default=())
    gguf_archs: tuple[str, ...] = attrs.field(kw_only=True, default=())

    def claims(self, naming: str, architecture: str) -> bool:
        return architecture in (self.model_types if naming == "hf" else self.gguf_archs)
