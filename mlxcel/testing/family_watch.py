"""What a family does to its checkpoint and its context, watched by wrappers that say what breaks the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxcel.core.checkpoint import Checkpoint, TensorInfo
from mlxcel.core.family import Array, ForwardContext, ModelFamily, ScanStep, WeightSchema
from mlxcel.core.kv import KVSpec, RecurrentKV
from mlxcel.testing.laws import broken

SHUT_OUT = -1e30
"""A router's logit of an expert that is not to be heard: its share is exp of it, which is exactly 0 in float32."""

SMALL = 4096
"""Most values of a tensor outside the schema that `parse_config` may read: a parameter, such as one divisor a pair."""


class WatchedCheckpoint:
    """A checkpoint whose reads are watched, and one of whose tensors, if named, holds other values than the file's."""

    def __init__(self, checkpoint: Checkpoint, changed: str | None = None) -> None:
        self._checkpoint = checkpoint
        self._changed = changed
        self.reads: list[str] = []

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def format(self) -> str:
        return self._checkpoint.format

    @property
    def naming(self) -> str:
        return self._checkpoint.naming

    @property
    def architecture(self) -> str:
        return self._checkpoint.architecture

    @property
    def config(self) -> Mapping[str, Any]:
        return self._checkpoint.config

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._checkpoint.tensors

    @property
    def assets(self) -> Mapping[str, Any]:
        return self._checkpoint.assets

    @property
    def quantisation(self) -> str:
        return self._checkpoint.quantisation

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        self.reads.append(name)
        values = self._checkpoint.read(name, out)
        if name == self._changed:
            # Noise of the tensor's own size, seeded: no structure that a family might cancel.
            noise = np.random.default_rng(0).standard_normal(values.shape, np.float32)
            values += noise * (np.float32(0.5 * values.std()) or np.float32(0.5))
        return values

    def close(self) -> None:
        """The caller's own checkpoint stays open."""


class WatchedFamily:
    """A family whose every forward runs over a watched context.

    `heard` is a layer and one of its experts: `moe` sends every token of that layer through this expert alone.
    """

    def __init__(
        self,
        family: ModelFamily,
        schema: WeightSchema,
        checkpoint: WatchedCheckpoint,
        heard: tuple[int, int] | None = None,
    ) -> None:
        self._family = family
        self._schema = schema
        self._checkpoint = checkpoint
        self._heard = heard

    @property
    def name(self) -> str:
        return self._family.name

    def parse_config(self, checkpoint: Checkpoint) -> Any:
        return self._family.parse_config(checkpoint)

    def schema(self, config: Any) -> WeightSchema:
        return self._family.schema(config)

    def kv_spec(self, config: Any) -> KVSpec:
        return self._family.kv_spec(config)

    def eos_ids(self, config: Any) -> frozenset[int]:
        return self._family.eos_ids(config)

    def forward(self, ctx: ForwardContext, config: Any) -> Array:
        watched = WatchedContext(ctx, self._schema, self._family.kv_spec(config), self._heard)
        before = len(self._checkpoint.reads)
        logits = self._family.forward(watched, config)
        if late := self._checkpoint.reads[before:]:
            raise broken("weights", f"forward reads tensor {late[0]} of the checkpoint by itself")
        watched.finish(logits)
        return logits


class WatchedContext:
    """A ForwardContext that checks names, layers and KV shapes of every op before it hands it on."""

    def __init__(
        self, ctx: ForwardContext, schema: WeightSchema, kv: KVSpec, heard: tuple[int, int] | None = None
    ) -> None:
        self._ctx = ctx
        self._schema = schema
        self._kv = kv
        self._heard = heard
        self._layer: Any = None
        self._touched: Counter[Any] = Counter()
        self._selected: int | None = None

    @property
    def xp(self) -> Any:
        return self._ctx.xp

    @property
    def context(self) -> int:
        return self._ctx.context

    def embed(self, weight: str = "embed") -> Array:
        self._ask("embed", weight, "embedding", None)
        return self._ctx.embed(weight)

    def for_layers(self, body: Callable[..., Array], x: Array, kinds: Sequence[Any] | None = None) -> Array:
        def watched(layer: Any, x: Array, *kind: Any) -> Array:
            self._layer = layer
            return body(layer, x, *kind)

        if kinds is not None and len(kinds) != self._schema.layers:
            raise broken("layers", f"for_layers gets {len(kinds)} kinds, the schema has {self._schema.layers} layers")
        x = self._ctx.for_layers(watched, x, kinds)
        self._layer = None
        return x

    def weight(self, name: str, *, layer: Any = None) -> Array:
        self._ask("weight", name, "array", layer)
        return self._ctx.weight(name, layer=layer)

    def rms_norm(self, x: Array, weight: str, *, layer: Any = None, eps: float, offset: float = 0.0) -> Array:
        self._ask("rms_norm", weight, "norm", layer)
        return self._ctx.rms_norm(x, weight, layer=layer, eps=eps, offset=offset)

    def layer_norm(self, x: Array, weight: str, bias: str | None, *, layer: Any = None, eps: float) -> Array:
        self._ask("layer_norm", weight, "norm", layer)
        if bias is not None:
            self._ask("layer_norm", bias, "bias", layer)
        return self._ctx.layer_norm(x, weight, bias, layer=layer, eps=eps)

    def project(self, x: Array, group: str, *, layer: Any = None) -> tuple[Array, ...]:
        members = self._schema.group(group)
        if not members:
            raise broken("weights", f"project asks for the group {group!r}, which the schema does not have")
        for member in members:
            self._ask("project", member.name, "linear", layer)
        return self._ctx.project(x, group, layer=layer)

    def rope(self, x: Array, frequencies: np.ndarray, *, scale: float = 1.0) -> Array:
        if 2 * len(frequencies) > x.shape[-1] or frequencies.dtype != np.float32:
            raise broken(
                "rope",
                f"{len(frequencies)} {frequencies.dtype} frequencies for heads of {x.shape[-1]}: float32, and at most "
                f"{x.shape[-1] // 2} of them",
            )
        return self._ctx.rope(x, frequencies, scale=scale)

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
        self._layer_is("attend", layer)
        kv = self._kv.layers[layer]
        if isinstance(kv, RecurrentKV):
            raise broken("KV", f"layer {layer} calls attend, its KV spec says {kv}")
        if k.shape[1:] != (kv.kv_heads, kv.k_dim) or v.shape[1:] != (kv.kv_heads, kv.v_dim):
            raise broken(
                "KV",
                f"layer {layer} writes k [T, {k.shape[1:]}] and v [T, {v.shape[1:]}], its KV spec says {kv}",
            )
        if q.shape[1] % kv.kv_heads or q.shape[2] != kv.k_dim:
            raise broken("KV", f"layer {layer} asks with q [T, {q.shape[1:]}] of KV that is {kv}")
        if sinks is not None:
            self._ask("attend", sinks, "array", layer)
            shape = self._ctx.weight(sinks, layer=layer).shape
            if shape != (q.shape[1],):
                raise broken("weights", f"attend asks for the sinks {sinks!r}, {list(shape)}, of {q.shape[1]} heads")
        self._touched[layer] += 1
        return self._ctx.attend(q, k, v, layer=layer, scale=scale, softcap=softcap, sinks=sinks)

    def state_scan(self, step: ScanStep, inputs: tuple[Array, ...], *, layer: Any) -> Array:
        self._layer_is("state_scan", layer)
        kv = self._kv.layers[layer]
        if not isinstance(kv, RecurrentKV):
            raise broken("KV", f"layer {layer} calls state_scan, its KV spec says {kv}")

        def watched(state: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
            before = [np.array(array) for array in (*state, *values)]
            after, y = step(state, values)
            if any(a.tobytes() != b.tobytes() for a, b in zip((*state, *values), before, strict=True)):
                raise broken("KV", f"layer {layer} changes the arrays that its step is given: it must make new ones")
            if tuple(array.shape for array in after) != kv.shapes:
                raise broken("KV", f"layer {layer} keeps state of {[a.shape for a in after]}, its KV spec says {kv}")
            if {array.dtype for array in (*after, y)} != {np.dtype(np.float32)}:
                raise broken("KV", f"layer {layer} makes {[str(a.dtype) for a in (*after, y)]} of float32")
            return after, y

        self._touched[layer] += 1
        return self._ctx.state_scan(watched, inputs, layer=layer)

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
        for name in (gate, up, down):
            self._ask("moe", name, "experts", layer)
        experts = self._schema[gate].shape[0]
        if router_logits.shape != (len(x), experts) or not 1 <= top_k <= experts:
            raise broken(
                "experts",
                f"layer {layer} chooses {top_k} experts by logits {list(router_logits.shape)}, "
                f"wanted {[len(x), experts]} and 1 to {experts}",
            )
        if self._heard is not None and layer == self._heard[0]:
            router_logits = np.full_like(router_logits, SHUT_OUT)
            router_logits[:, self._heard[1]] = 0
        return self._ctx.moe(
            x,
            router_logits,
            layer=layer,
            top_k=top_k,
            activation=activation,
            renormalise=renormalise,
            gate=gate,
            up=up,
            down=down,
        )

    def gated(self, gate: Array, up: Array, activation: str) -> Array:
        return self._ctx.gated(gate, up, activation)

    def activate(self, x: Array, activation: str) -> Array:
        return self._ctx.activate(x, activation)

    def select_rows(self, x: Array) -> Array:
        if self._selected is not None:
            raise broken("rows", "select_rows is called more than once")
        selected = self._ctx.select_rows(x)
        self._selected = len(selected)
        return selected

    def unembed(self, x: Array, weight: str = "unembed") -> Array:
        self._ask("unembed", weight, "linear", None)
        if self._selected != len(x):
            raise broken("rows", f"unembed gets {len(x)} rows, select_rows kept {self._selected}")
        return self._ctx.unembed(x, weight)

    def finish(self, logits: Array) -> None:
        """After a forward: its logits, and one use of the KV for each layer."""
        if logits.shape[:1] != (self._selected,) or logits.ndim != 2 or logits.dtype != np.float32:
            raise broken(
                "rows", f"forward returns {logits.dtype} {list(logits.shape)}, wanted float32 [{self._selected}, V]"
            )
        for layer in range(self._schema.layers):
            op = "state_scan" if isinstance(self._kv.layers[layer], RecurrentKV) else "attend"
            if self._touched[layer] != 1:
                raise broken("KV", f"layer {layer} calls {op} {self._touched[layer]} times, wanted once")

    def _ask(self, op: str, name: str, role: str, layer: Any) -> None:
        weight = next((weight for weight in self._schema.weights if weight.name == name), None)
        if weight is None:
            raise broken("weights", f"{op} asks for the weight {name!r}, which the schema does not have")
        if weight.role != role:
            raise broken("weights", f"{op} asks for {name!r}, whose role is {weight.role!r} and must be {role!r}")
        if weight.per_layer:
            self._layer_is(f"{op} of {name!r}", layer)
            if not weight.in_layer(layer):
                raise broken(
                    "weights", f"{op} asks for {name!r} in layer {layer}, the schema has it in {weight.layers}"
                )
        elif layer is not None:
            raise broken("weights", f"{op} of {name!r} gets layer={layer}, but the weight is outside the layers")

    def _layer_is(self, op: str, layer: Any) -> None:
        if layer is None or layer != self._layer:
            raise broken("weights", f"{op} gets layer={layer} inside layer {self._layer} of for_layers")
