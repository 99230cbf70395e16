"""A model family, written once: its weights by name, its KV, and its mathematics over semantic ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from mlxcel.core.named import Named

if TYPE_CHECKING:  # plugins import this module to register: no numpy
    import numpy as np

    from mlxcel.core.checkpoint import Checkpoint
    from mlxcel.core.kv import KVSpec

Role = Literal["linear", "bias", "norm", "embedding", "experts", "array"]
Array = Any
"""An array of the backend's own kind, described by its axis letters in each docstring."""
ScanStep = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[tuple[Any, ...], Any]]
"""(state, values of one token) -> (state, y): the step of `ForwardContext.state_scan`."""


@attrs.frozen
class WeightSpec:
    """One weight of a family, once for each layer when `per_layer`.

    `names` maps a checkpoint naming ("hf", "gguf") to the tensor's name there, with "{i}" for the layer and "{e}" for
    the expert where each has a tensor of its own. `axes` gives the letters of `shape`, a linear weight being [out, in],
    weights of experts [E, out, in]. Linear weights that share a `group` are projected together by
    `ForwardContext.project`, in the order of the schema; a bias is added to the output of the linear weight that it
    names in `bias_of`. A weight that is `tied_to` another is that one and is not read. `layers` are those that have
    the weight, where not all have. `transforms` maps a naming to a function on the float32 values of one tensor that
    undoes what that format did to the layout.
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
    layers: tuple[int, ...] | None = None
    transforms: Mapping[str, Callable[[np.ndarray], np.ndarray]] = attrs.field(factory=dict)

    def in_layer(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


@attrs.frozen
class TensorPlace:
    """What a tensor of a checkpoint is to a schema: a weight, of a layer (0 outside layers), of an expert or of all."""

    weight: WeightSpec
    layer: int
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """What the tensor must be, but for axes of length 1, which formats add and drop."""
        return self.weight.shape if self.expert is None else self.weight.shape[1:]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape can be it."""
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]


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

    def layers_of(self, weight: WeightSpec) -> tuple[int, ...]:
        """The layers that have it; (0,) for a weight outside layers."""
        if not weight.per_layer:
            return (0,)
        return tuple(range(self.layers)) if weight.layers is None else weight.layers

    def tensor_names(self, naming: str) -> dict[str, TensorPlace]:
        """Checkpoint name -> what it is, for everything that must be read. KeyError for a naming that the family does
        not know."""
        found: dict[str, TensorPlace] = {}
        for weight in self.weights:
            if weight.tied_to is not None:
                continue
            pattern = weight.names[naming]
            experts = range(weight.shape[0]) if "{e}" in pattern else (None,)
            for layer in self.layers_of(weight):
                for expert in experts:
                    name = pattern.replace("{i}", str(layer)).replace("{e}", str(expert))
                    found[name] = TensorPlace(weight, layer, expert)
        return found


class ForwardContext(Protocol):
    """The ops a family is written in. T tokens of one step, flat; each op works on every token alone but `attend`
    and `state_scan`, which look at earlier tokens of the same row.

    `layer` is the index that `for_layers` passes to its body (traced on some backends: use it for nothing else).
    Activations are [T, …]; weights are named, and how they are stored cannot be told from here.
    """

    @property
    def xp(self) -> Any:
        """The array API namespace, for glue."""
        ...

    @property
    def context(self) -> int:
        """N, the engine's bound of positions a row: a setting, the same for every row and step."""
        ...

    def embed(self, weight: str = "embed") -> Array:
        """Rows of the embedding for the step's tokens: [T, D]."""
        ...

    def for_layers(self, body: Callable[..., Array], x: Array, kinds: Sequence[Any] | None = None) -> Array:
        """x after body(0, x), body(1, x) … for every layer of the schema.

        With `kinds`, one hashable value a layer that says how it differs from others, body(0, x, kinds[0]) …
        """
        ...

    def weight(self, name: str, *, layer: Any = None) -> Array:
        """The values of a weight of role "array", float32, for glue: a small one that no op of its own takes."""
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

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        layer: Any,
        scale: float,
        softcap: float = 0.0,
        sinks: str | None = None,
    ) -> Array:
        """Write k [T, K, dk] and v [T, K, dv] into the KV of this layer, then causal attention of q [T, H, dk] over
        each row's own positions, those inside the layer's window where its KV spec has one: [T, H * dv]. Query head h
        reads KV head h // (H // K). With `softcap` c a score s (float32, scaled) becomes c * tanh(s / c).
        `sinks` names a weight [H] of the layer, role "array": with z of its head, the softmax is over the scores and z,
        whose share goes to no position: exp(s) / (sum of exp(s) + exp(z)).
        https://arxiv.org/abs/1706.03762, https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2309.17453"""
        ...

    def state_scan(self, step: ScanStep, inputs: tuple[Array, ...], *, layer: Any) -> Array:
        """A recurrence along each row: [T, …] of the y that `step` gives for each token, in the order of positions.

        `step(state, values) -> (state, y)` is pure and sees one token: `state` holds arrays of the shapes of the
        layer's RecurrentKV, `values` the token's own slice of each of `inputs` [T, …]. What it returns as state is what
        the row's next token gets, in this step or a later one. https://arxiv.org/abs/2405.21060
        """
        ...

    def moe(
        self,
        x: Array,
        router_logits: Array,
        *,
        layer: Any,
        top_k: int,
        activation: str,
        renormalise: bool,
        gate: str = "expert_gate",
        up: str = "expert_up",
        down: str = "expert_down",
    ) -> Array:
        """A mixture of gated MLPs, [T, D]: the sum of p * down(activation(gate x) * up x) over a token's experts.

        `router_logits` [T, E]; p is their softmax in float32, the experts are its `top_k` largest, ties going to the
        lowest index, and with `renormalise` their p are divided by their sum. The names are those of the weights
        [E, F, D], [E, F, D] and [E, D, F]. https://arxiv.org/abs/2101.03961
        """
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


@attrs.frozen
class StandardBlock:
    """A model of layers h += o(attention(norm(h))); h += down(activation(gate norm(h)) * up norm(h)), as data.

    A backend may run it by kernels of its own instead of `forward`, with the same numbers up to rounding. Norms are
    `rms_norm` with `eps` and `norm_offset`; attention sees every position, its scores are multiplied by `scale`; in
    every layer q and k are turned by `frequencies`, cos and sin times `turn_scale`. Nothing else is scaled, capped or
    normed, and only q, k and v may have a bias. The weights are the embedding "embed", the groups "qkv" (q, k, v), "o",
    "gate_up" (gate, up), "down" and "unembed", the norms "attn_norm", "mlp_norm", "final_norm" and with `qk_norm`
    "q_norm" and "k_norm" over each head.
    """

    layers: int  # L
    vocab_size: int  # V
    hidden: int  # D
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # d
    ffn: int  # F
    eps: float
    norm_offset: float
    qk_norm: bool
    qkv_bias: bool
    activation: str
    scale: float
    frequencies: tuple[float, ...]  # n <= d / 2, radians a position: the values are float32
    turn_scale: float = 1.0


class ModelFamily(Protocol):
    """Mathematics only: no array is held, no file is read.

    A family may have a method `standard_block(config, context) -> StandardBlock | None` too: what its forward computes
    when the engine's bound of positions is `context`, if that is a standard block.
    """

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
