"""The ops of a forward, eager and in float32. Every reduction stays within one row (docs/design.md 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlxcel.core.family import ScanStep
from mlxcel.core.plan import EMBEDDING, FINITE, StepPlan
from mlxcel_reference_numpy.attention import attend_token, attend_window
from mlxcel_reference_numpy.experts import choose_experts
from mlxcel_reference_numpy.products import row_products
from mlxcel_reference_numpy.storage import LayerStorage, Pages, Rings, States
from mlxcel_reference_numpy.weights import Weights


def _erf(x: np.ndarray) -> np.ndarray:
    """NumPy has none; an oracle may take its time."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.float32)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: np.float32(0.5) * x * (1 + _erf(x * np.float32(math.sqrt(0.5)))),
    "gelu_tanh": lambda x: (
        np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)))
    ),
    "relu": lambda x: np.maximum(x, np.float32(0)),
}


class NumpyContext:
    """ForwardContext of one step: its plan, the weights, and the KV that `attend` and `state_scan` write and read.

    What a family hands in may lie in any memory order. An op that reduces takes contiguous rows first: NumPy adds along
    memory, and a transposed array of one token is contiguous where one of two is not.
    """

    def __init__(
        self,
        plan: StepPlan,
        token_ids: np.ndarray,
        weights: Weights,
        storage: Sequence[LayerStorage],
        context: int,
        *,
        watched: bool = False,
    ) -> None:
        """token_ids: int32 [T], every carry filled in. storage: one entry a layer. context: N. `watched`: `seen` says
        of each token the first layer whose output was not finite, int32 [T]."""
        self._plan = plan
        self._token_ids = token_ids
        self._weights = weights
        self._storage = storage
        self._context = context
        self._row_of = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
        self.seen = np.full(len(token_ids), FINITE, np.int32) if watched else None
        self._turn: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    xp: Any = np

    @property
    def context(self) -> int:
        return self._context

    def embed(self, weight: str = "embed") -> np.ndarray:
        rows: np.ndarray = self._weights.plain[weight, 0][self._token_ids]
        return rows

    def for_layers(
        self, body: Callable[..., np.ndarray], x: np.ndarray, kinds: Sequence[Any] | None = None
    ) -> np.ndarray:
        self._look(EMBEDDING, x)
        for layer in range(self._weights.layers):
            x = body(layer, x) if kinds is None else body(layer, x, kinds[layer])
            self._look(layer, x)
        return x

    def _look(self, layer: int, x: np.ndarray) -> None:
        if self.seen is not None:
            self.seen[(self.seen == FINITE) & ~np.isfinite(x).all(axis=-1)] = layer

    def weight(self, name: str, *, layer: int | None = None) -> np.ndarray:
        return self._weights.plain[name, layer or 0]

    def rms_norm(
        self, x: np.ndarray, weight: str, *, layer: int | None = None, eps: float, offset: float = 0.0
    ) -> np.ndarray:
        x = np.ascontiguousarray(x)
        scale = self._weights.plain[weight, layer or 0]
        mean = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
        normed = x / np.sqrt(mean + np.float32(eps))
        if offset:
            scale = scale + np.float32(offset)
        result: np.ndarray = normed * scale
        return result

    def layer_norm(
        self, x: np.ndarray, weight: str, bias: str | None, *, layer: int | None = None, eps: float
    ) -> np.ndarray:
        x = np.ascontiguousarray(x)
        size = np.float32(x.shape[-1])
        centred = x - np.add.reduce(x, axis=-1, keepdims=True) / size
        variance = np.add.reduce(centred * centred, axis=-1, keepdims=True) / size
        normed = centred / np.sqrt(variance + np.float32(eps)) * self._weights.plain[weight, layer or 0]
        if bias is not None:
            normed = normed + self._weights.plain[bias, layer or 0]
        result: np.ndarray = normed
        return result

    def project(self, x: np.ndarray, group: str, *, layer: int | None = None) -> tuple[np.ndarray, ...]:
        linear = self._weights.linear[group, layer or 0]
        y = row_products(linear.matrix, np.ascontiguousarray(x))
        if linear.bias is not None:
            y += linear.bias
        if len(linear.sizes) == 1:
            return (y,)
        return tuple(np.ascontiguousarray(part) for part in np.split(y, np.cumsum(linear.sizes)[:-1], axis=1))

    def rope(self, x: np.ndarray, frequencies: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
        cos, sin = self._angles(frequencies)
        if scale != 1.0:
            cos, sin = cos * np.float32(scale), sin * np.float32(scale)
        half = len(frequencies)
        first, second = x[..., :half], x[..., half : 2 * half]
        turned = np.empty_like(x)
        turned[..., :half] = first * cos - second * sin
        turned[..., half : 2 * half] = second * cos + first * sin
        turned[..., 2 * half :] = x[..., 2 * half :]
        return turned

    def attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        *,
        layer: int,
        scale: float,
        softcap: float = 0.0,
        sinks: str | None = None,
    ) -> np.ndarray:
        storage, plan = self._storage[layer], self._plan
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        grouped = np.ascontiguousarray(q).reshape(tokens, kv_heads, heads // kv_heads, dim)
        beside = None if sinks is None else self.weight(sinks, layer=layer).reshape(kv_heads, -1)
        mixed = np.empty((tokens, kv_heads, heads // kv_heads, v.shape[2]), np.float32)
        each = enumerate(zip(self._row_of.tolist(), plan.positions.tolist(), strict=True))
        if isinstance(storage, Rings):
            slots, place = plan.slots[self._row_of], plan.positions % storage.keys.shape[2]
            storage.keys[slots, :, place], storage.values[slots, :, place] = k, v
            for token, (row, position) in each:
                keys, values = storage.keys[plan.slots[row]], storage.values[plan.slots[row]]
                mixed[token] = attend_window(
                    grouped[token], keys, values, storage.window, position, scale, softcap, beside
                )
        elif isinstance(storage, Pages):
            page_size = storage.keys.shape[2]
            pages, place = plan.page_tables[self._row_of, plan.positions // page_size], plan.positions % page_size
            storage.keys[pages, :, place], storage.values[pages, :, place] = k, v
            for token, (row, position) in each:
                table = plan.page_tables[row]
                mixed[token] = attend_token(
                    grouped[token], storage.keys, storage.values, table, position, scale, softcap, beside
                )
        else:
            raise TypeError(f"layer {layer} keeps recurrent state: nothing can be attended to")
        return mixed.reshape(tokens, -1)

    def state_scan(self, step: ScanStep, inputs: tuple[np.ndarray, ...], *, layer: int) -> np.ndarray:
        storage, plan = self._storage[layer], self._plan
        if not isinstance(storage, States):
            raise TypeError(f"layer {layer} keeps positions: it has no recurrent state")
        inputs = tuple(np.ascontiguousarray(values) for values in inputs)
        outputs: list[np.ndarray] = []
        for row, (slot, copy) in enumerate(zip(plan.slots, plan.state_copies, strict=True)):
            first, end = plan.query_start[row], plan.query_start[row + 1]
            begins = plan.positions[first] == 0
            state = tuple(np.zeros_like(a[copy, slot]) if begins else a[copy, slot] for a in storage.arrays)
            for token in range(first, end):
                state, y = step(state, tuple(values[token] for values in inputs))
                outputs.append(y)
            for array, value in zip(storage.arrays, state, strict=True):
                array[1 - copy, slot] = value
        return np.stack(outputs)

    def moe(
        self,
        x: np.ndarray,
        router_logits: np.ndarray,
        *,
        layer: int,
        top_k: int,
        activation: str,
        renormalise: bool,
        gate: str = "expert_gate",
        up: str = "expert_up",
        down: str = "expert_down",
    ) -> np.ndarray:
        x = np.ascontiguousarray(x)
        chosen, shares = choose_experts(np.ascontiguousarray(router_logits), top_k, renormalise)
        gates, ups, downs = (self._weights.plain[name, layer] for name in (gate, up, down))
        y = np.zeros_like(x)
        # Experts in their order: each is read once, and a token's sum does not depend on the others'.
        for expert in np.unique(chosen):
            tokens, rank = np.nonzero(chosen == expert)
            part = x[tokens]
            hidden = self.gated(row_products(gates[expert], part), row_products(ups[expert], part), activation)
            y[tokens] += shares[tokens, rank][:, None] * row_products(downs[expert], hidden)
        return y

    def gated(self, gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
        result: np.ndarray = ACTIVATIONS[activation](gate) * up
        return result

    def activate(self, x: np.ndarray, activation: str) -> np.ndarray:
        return ACTIVATIONS[activation](x)

    def select_rows(self, x: np.ndarray) -> np.ndarray:
        rows: np.ndarray = x[self._plan.logits_rows]
        return rows

    def unembed(self, x: np.ndarray, weight: str = "unembed") -> np.ndarray:
        return self.project(x, weight)[0]

    def _angles(self, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin float32 [T, 1, n] of this step's positions; kept, since each layer asks for the same."""
        if self._turn is None or self._turn[0] is not frequencies:
            angles = (self._plan.positions.astype(np.float32)[:, None] * frequencies)[:, None]
            self._turn = (frequencies, np.cos(angles), np.sin(angles))
        return self._turn[1], self._turn[2]
