"""The jitted step of the JAX backend without an engine: the same two calls, on arrays of their own, again and again."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from random_engines import Bench

from mlxcel_jax_cuda import backend as jax_backend
from mlxcel_jax_cuda.drawing import Found, draw
from mlxcel_jax_cuda.forward import forward, forward_and_draw

NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Launches inside captured graphs do not stand in the program's text."""
DONATED = {"forward": {3}, "draw": {2}, "forward_and_draw": {4, 5}}
"""Programs of a step, and the places of what they take."""
NOT_LAUNCHED = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}


class BareStep:
    """A decode step over rows of an engine as the backend calls it: forward and draw, in one program or in two, and the
    copy to the host; read one step behind. Every call has the positions of the step that was watched."""

    def __init__(self, bench: Bench, rows: Sequence[int]) -> None:
        calls = watched(bench, rows)
        self._draw_buffer: np.ndarray | None = None
        if "forward_and_draw" in calls:
            self._model, self._shape, self._drawing, self._weights, kv, last, self._buffer = calls["forward_and_draw"]
        else:
            self._model, self._shape, self._weights, kv, _, self._buffer = calls["forward"]
            self._drawing, _, last, self._draw_buffer = calls["draw"]
        self._kv, self._last = jax.tree.map(_zeros, (kv, last))

    def decode(self, steps: int) -> list[float]:
        """As `Bench.decode`: the moments at which each step was read."""
        moments: list[float] = []
        before: Any = None
        for _ in range(steps):
            found = self._step()
            for array in found:
                if array is not None:
                    array.copy_to_host_async()
            if before is not None:
                np.asarray(before)
                moments.append(time.perf_counter())
            before = found.words
        np.asarray(before)
        return [*moments, time.perf_counter()]

    def _step(self) -> Found:
        found: Found
        model, shape, weights, buffer = self._model, self._shape, self._weights, self._buffer
        if self._draw_buffer is None:
            self._kv, self._last, found = forward_and_draw(
                model, shape, self._drawing, weights, self._kv, self._last, buffer
            )
            return found
        self._kv, logits, _ = forward(model, shape, weights, self._kv, self._last.tokens, buffer)
        self._last, found = draw(self._drawing, logits, self._last, self._draw_buffer)
        return found

    def launches(self) -> dict[str, int]:
        """Device operations of the forward by kind, about one kernel each; a loop counts once."""
        own = self._buffer[: self._shape.size]
        lowered = forward.lower(self._model, self._shape, self._weights, self._kv, self._last.tokens, own)
        options = NO_GRAPHS if self._model.numerics.platform == "cuda" else None
        return count_launches(lowered.compile(compiler_options=options).as_text())


def watched(bench: Bench, rows: Sequence[int]) -> dict[str, tuple[Any, ...]]:
    """The arguments of the programs of one decode step of the engine, by name; donated ones as shapes."""
    calls: dict[str, tuple[Any, ...]] = {}
    module: Any = jax_backend

    def watching(name: str, call: Any, donated: set[int]) -> Any:
        def watch(*args: Any) -> Any:
            calls[name] = tuple(
                jax.tree.map(_shape, arg) if place in donated else arg for place, arg in enumerate(args)
            )
            return call(*args)

        return watch

    kept = {name: getattr(module, name) for name in DONATED}
    try:
        for name, donated in DONATED.items():
            setattr(module, name, watching(name, kept[name], donated))
        bench.decode(rows, 1)
    finally:
        for name, call in kept.items():
            setattr(module, name, call)
    return calls


def count_launches(text: str) -> dict[str, int]:
    """Operations of the entry computation of a compiled program's text, by kind."""
    kinds: Counter[str] = Counter()
    for line in text[text.index("\nENTRY ") :].splitlines()[2:]:
        operation = re.search(r"[\])}] ([a-z][a-z0-9-]*)\(", line)
        if operation is None or operation[1] in NOT_LAUNCHED:
            continue
        detail = re.search(r'kind=k(\w+)|custom_call_target="([^"]+)"', line)
        kinds[f"{operation[1]} {detail[1] or detail[2]}" if detail else operation[1]] += 1
    return dict(kinds.most_common())


def _shape(array: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)  # type: ignore[no-untyped-call]


def _zeros(shape: Any) -> Any:
    return jax.device_put(jnp.zeros(shape.shape, shape.dtype), shape.sharding)
