"""The ops of a forward as jax programs, traced once for each shape of a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel.core.family import ScanStep
from mlxcel.core.kv import RecurrentKV, SlidingKV
from mlxcel.core.plan import EMBEDDING
from mlxcel_jax_cuda.attention import attend
from mlxcel_jax_cuda.experts import mixture
from mlxcel_jax_cuda.kernel_attention import KernelAttention, by_kernel
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.packed_forms import GATED
from mlxcel_jax_cuda.reading import Projection, reading
from mlxcel_jax_cuda.scan import scan_rows
from mlxcel_jax_cuda.storage import block, places, write
from mlxcel_jax_cuda.watch import look, nothing_seen

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class JaxContext:
    """ForwardContext of one launch: S rows of W tokens, flat. `kv` holds the leaves as the layers so far left them,
    `seen` int32 [T] the first layer of each token that was not finite, where that is watched.

    The residual stream is float32; norms give the compute type, and so do products, which add up in float32.
    """

    xp: Any = jnp

    def __init__(
        self,
        model: Model,
        fields: Fields,
        token_ids: jax.Array,
        weights: Any,
        kv: Any,
        wanted: jax.Array | None = None,
    ) -> None:
        """token_ids: int32 [T], every carry filled in. weights: as the model's index has them. `wanted`: bool, whether
        anybody reads the logits; else they are zeros."""
        self._model, self._fields, self._token_ids = model, fields, token_ids
        self._weights = reading(model.index, weights)
        self._places = places(model.kv)
        self._wanted = wanted
        self._turns: dict[bytes, tuple[jax.Array, jax.Array]] = {}
        self._facing: tuple[jax.Array, Projection, tuple[jax.Array, ...]] | None = None
        self._kernels = KernelAttention(fields, model.numerics.hopper)
        self.kv = list(kv)
        self.seen = nothing_seen(len(token_ids)) if model.numerics.watched else None

    @property
    def context(self) -> int:
        return self._model.layout.context

    def embed(self, weight: str = "embed") -> jax.Array:
        return self._weights.embedding(weight, jnp.maximum(self._token_ids, 0)).astype(jnp.float32)

    def for_layers(self, body: Callable[..., jax.Array], x: jax.Array, kinds: Sequence[Any] | None = None) -> jax.Array:
        self._look(EMBEDDING, x)
        for layer in range(self._model.index.layers):
            x = body(layer, x) if kinds is None else body(layer, x, kinds[layer])
            self._look(layer, x)
        return x

    def _look(self, layer: int, x: jax.Array) -> None:
        if self.seen is not None:
            self.seen = look(self.seen, layer, x)

    def weight(self, name: str, *, layer: int | None = None) -> jax.Array:
        return self._weights.weight(name, layer)

    def rms_norm(
        self, x: jax.Array, weight: str, *, layer: int | None = None, eps: float, offset: float = 0.0
    ) -> jax.Array:
        x = x.astype(jnp.float32)
        normed = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps))
        return (normed * self._weights.gain(weight, layer, offset)).astype(self._compute)

    def layer_norm(
        self, x: jax.Array, weight: str, bias: str | None, *, layer: int | None = None, eps: float
    ) -> jax.Array:
        x = x.astype(jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        normed = centred / jnp.sqrt(variance + jnp.float32(eps)) * self.weight(weight, layer=layer)
        if bias is not None:
            normed = normed + self.weight(bias, layer=layer)
        return normed.astype(self._compute)

    def project(self, x: jax.Array, group: str, *, layer: int | None = None) -> tuple[jax.Array, ...]:
        projection, x = self._weights.projection(group, layer), x.astype(self._compute)
        y = projection.product(x, self._compute, sms=self._model.numerics.hopper).astype(self._compute)
        parts = tuple(jnp.split(y, np.cumsum(projection.sizes)[:-1], axis=1))
        if group == GATED and projection.gates:
            self._facing = x, projection, parts
        return parts

    def rope(self, x: jax.Array, frequencies: np.ndarray, *, scale: float = 1.0) -> jax.Array:
        cos, sin = self._angles(frequencies)
        if scale != 1.0:
            cos, sin = cos * jnp.float32(scale), sin * jnp.float32(scale)
        half = len(frequencies)
        turned = x.astype(jnp.float32)
        first, second = turned[..., :half], turned[..., half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin, turned[..., 2 * half :]]
        return jnp.concatenate(parts, axis=-1).astype(x.dtype)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        layer: int,
        scale: float,
        softcap: float = 0.0,
        sinks: str | None = None,
    ) -> jax.Array:
        place, fields, sms = self._places[layer], self._fields, self._model.numerics.hopper
        if isinstance(place.kv, RecurrentKV):
            raise TypeError(f"layer {layer} keeps recurrent state: nothing can be attended to")
        rows, width = fields.positions.shape
        tables = place.tables(fields)
        kv_heads = k.shape[1]
        for leaf, values in zip((place.first, place.first + 1), (k, v), strict=True):
            self.kv[leaf] = write(self.kv[leaf], tables, fields.positions, values.reshape(rows, width, kv_heads, -1))
        keys, values = self.kv[place.first], self.kv[place.first + 1]
        window = place.kv.window if isinstance(place.kv, SlidingKV) else None
        if sms and sinks is None and by_kernel(place.kv, keys, q.shape[1]):
            mixed = self._kernels.attend(q, keys, values, place, scale=scale, softcap=softcap)
            return mixed.reshape(rows * width, -1)
        mixed = attend(
            q.reshape(rows, width, kv_heads, q.shape[1] // kv_heads, -1),
            fields.positions,
            fields.seq_lens,
            lambda row, number: (block(keys, tables[row], number), block(values, tables[row], number)),
            scale=scale,
            softcap=softcap,
            window=window,
            sinks=None if sinks is None else self.weight(sinks, layer=layer).reshape(kv_heads, -1),
            one_by_one=self._model.numerics.tiled,
        )
        return mixed.reshape(rows * width, -1).astype(self._compute)

    def state_scan(self, step: ScanStep, inputs: tuple[jax.Array, ...], *, layer: int) -> jax.Array:
        place, fields = self._places[layer], self._fields
        if not isinstance(place.kv, RecurrentKV):
            raise TypeError(f"layer {layer} keeps positions: it has no recurrent state")
        leaves = self.kv[place.first : place.first + place.count]
        leaves, outputs = scan_rows(step, inputs, leaves, fields)
        self.kv[place.first : place.first + place.count] = leaves
        return outputs

    def moe(
        self,
        x: jax.Array,
        router_logits: jax.Array,
        *,
        layer: int,
        top_k: int,
        activation: str,
        renormalise: bool,
        gate: str = "expert_gate",
        up: str = "expert_up",
        down: str = "expert_down",
    ) -> jax.Array:
        gates, ups, downs = (self.weight(name, layer=layer) for name in (gate, up, down))
        return mixture(
            x.astype(self._compute),
            router_logits.astype(jnp.float32),
            (gates, ups, downs),
            top_k=top_k,
            renormalise=renormalise,
            gated=lambda a, b: self.gated(a, b, activation).astype(self._compute),
            numerics=self._model.numerics,
        ).astype(self._compute)

    def gated(self, gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
        if self._facing is not None and activation == "silu":
            x, projection, parts = self._facing
            if gate is parts[0] and up is parts[1]:
                # One kernel for all three; the product that gave the parts has no other reader and is dropped.
                return projection.gated(x, sms=self._model.numerics.hopper)
        return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(self._compute)

    def activate(self, x: jax.Array, activation: str) -> jax.Array:
        return ACTIVATIONS[activation](x)

    def select_rows(self, x: jax.Array) -> jax.Array:
        return x[self._fields.logits_rows]

    def unembed(self, x: jax.Array, weight: str = "unembed") -> jax.Array:
        projection, x = self._weights.projection(weight, None), x.astype(self._compute)

        def product() -> jax.Array:
            return projection.product(x, jnp.float32, sms=self._model.numerics.hopper)

        if self._wanted is None:
            return product()
        nothing = jnp.zeros((x.shape[0], *projection.sizes), jnp.float32)
        logits: jax.Array = lax.cond(self._wanted, product, lambda: nothing)
        return logits

    @property
    def _compute(self) -> Any:
        return self._model.numerics.compute

    def _angles(self, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """cos and sin float32 [T, 1, n] of this launch's positions; kept, since each layer asks for the same."""
        key = frequencies.tobytes()
        if key not in self._turns:
            positions = self._fields.positions.reshape(-1).astype(jnp.float32)
            angles = (positions[:, None] * jnp.asarray(frequencies, jnp.float32))[:, None]
            self._turns[key] = jnp.cos(angles), jnp.sin(angles)
        return self._turns[key]
