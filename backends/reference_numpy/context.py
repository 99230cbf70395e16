"""The ops of a forward, eager and in float32. Every reduction stays within one row (docs/design.md 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mlxcel.core.plan import StepPlan
from mlxcel_reference_numpy.attention import attend_token
from mlxcel_reference_numpy.products import row_products
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
    """ForwardContext of one step: its plan, the weights, and the KV pages that `attend` writes and reads.

    What a family hands in may lie in any memory order. An op that reduces takes contiguous rows first: NumPy adds along
    memory, and a transposed array of one token is contiguous where one of two is not.
    """

    def __init__(
        self, plan: StepPlan, token_ids: np.ndarray, weights: Weights, keys: list[np.ndarray], values: list[np.ndarray]
    ) -> None:
        """token_ids: int32 [T], every carry filled in. keys, values: float32 [pages, K, page_size, d] a layer."""
        self._plan = plan
        self._token_ids = token_ids
        self._weights = weights
        self._keys = keys
        self._values = values
        self._row_of = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
        self._turn: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    xp: Any = np

    def embed(self, weight: str = "embed") -> np.ndarray:
        rows: np.ndarray = self._weights.plain[weight, 0][self._token_ids]
        return rows

    def for_layers(self, body: Callable[[Any, np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
        for layer in range(self._weights.layers):
            x = body(layer, x)
        return x

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

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, layer: int, scale: float) -> np.ndarray:
        keys, values, plan = self._keys[layer], self._values[layer], self._plan
        page_size = keys.shape[2]
        pages = plan.page_tables[self._row_of, plan.positions // page_size]
        keys[pages, :, plan.positions % page_size] = k
        values[pages, :, plan.positions % page_size] = v
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        grouped = np.ascontiguousarray(q).reshape(tokens, kv_heads, heads // kv_heads, dim)
        mixed = np.empty((tokens, kv_heads, heads // kv_heads, v.shape[2]), np.float32)
        for token, (row, position) in enumerate(zip(self._row_of, plan.positions.tolist(), strict=True)):
            mixed[token] = attend_token(grouped[token], keys, values, plan.page_tables[row], position, scale)
        return mixed.reshape(tokens, -1)

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
