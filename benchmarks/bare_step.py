"""The jitted step of the JAX backend without an engine: the same calls, on arrays of their own, again and again."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from random_engines import Bench

from mlxcel_jax_cuda.decode_run import forward_and_draw_run
from mlxcel_jax_cuda.drawing import draw
from mlxcel_jax_cuda.executables import Executables
from mlxcel_jax_cuda.forward import forward, forward_and_draw

NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Launches inside captured graphs do not stand in the program's text."""
DONATED = {forward: {3}, draw: {2}, forward_and_draw: {4, 5}, forward_and_draw_run: {5, 6}}
"""Programs of a step, and the places of what they take."""
NOT_LAUNCHED = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
WATCHED: Final = 12
"""Steps of the engine, among which is a run where it has any."""


class BareStep:
    """A decode step over rows of an engine as the backend calls it: a run of steps as one program, or forward and draw
    in one program or in two, and the copy to the host; read one call behind. Every call has the positions of the one
    that was watched."""

    def __init__(self, bench: Bench, rows: Sequence[int]) -> None:
        self._executables, calls = watched(bench, rows)
        whole = next((each for each in (forward_and_draw_run, forward_and_draw) if each in calls), None)
        self._calls = calls if whole is None else {whole: calls[whole]}
        self._whole = whole
        model, shape, *_ = next(iter(self._calls.values()))
        self._model, self._shape = model, shape
        kv, last = (calls[forward][3], calls[draw][2]) if whole is None else self._state(calls[whole], whole)
        self._kv, self._last = jax.tree.map(_zeros, (kv, last))
        self._steps = calls[whole][3] if whole is forward_and_draw_run else 1

    @staticmethod
    def _state(arguments: tuple[Any, ...], whole: Any) -> list[Any]:
        return [arguments[place] for place in sorted(DONATED[whole])]

    def seconds(self, steps: int) -> float:
        """Of one step, in the mean of about so many."""
        moments: list[float] = []
        before: Any = None
        for _ in range(-(-steps // self._steps) + 1):
            found = self._call()
            for array in found:
                array.copy_to_host_async()
            if before is not None:
                np.asarray(before)
                moments.append(time.perf_counter())
            before = found[0]
        np.asarray(before)
        moments.append(time.perf_counter())
        return (moments[-1] - moments[0]) / (len(moments) - 1) / self._steps

    def _call(self) -> list[jax.Array]:
        """What the host reads, the words first."""
        call = self._executables.call
        if self._whole is None:
            statics, (weights, buffer) = self._calls[forward][:2], self._calls[forward][2::3]
            self._kv, logits, _ = call(forward, (*statics, weights, self._kv, self._last.tokens, buffer))
            drawing, draw_buffer = self._calls[draw][0], self._calls[draw][3]
            self._last, found = call(draw, (drawing, logits, self._last, draw_buffer))
            return [array for array in found if array is not None]
        *others, weights, _, _, buffer = self._calls[self._whole]
        self._kv, self._last, found = call(self._whole, (*others, weights, self._kv, self._last, buffer))
        return [found] if self._steps > 1 else [array for array in found if array is not None]

    def launches(self) -> dict[str, int]:
        """Device operations of the forward by kind, about one kernel each; a loop counts once."""
        arguments = next(iter(self._calls.values()))
        weights = next(each for each in arguments[2:] if isinstance(each, tuple))
        own = arguments[-1][: self._shape.size]
        lowered = forward.lower(self._model, self._shape, weights, self._kv, self._last.tokens, own)
        options = NO_GRAPHS if self._model.numerics.platform == "cuda" else None
        return count_launches(lowered.compile(compiler_options=options).as_text())


def watched(bench: Bench, rows: Sequence[int]) -> tuple[Executables, dict[Any, tuple[Any, ...]]]:
    """What calls the programs of an engine, and the arguments of the newest call of each program of its decode steps;
    donated ones as shapes."""
    calls: dict[Any, tuple[Any, ...]] = {}
    seen: list[Executables] = []
    kept = Executables.call

    def watch(executables: Executables, function: Any, arguments: tuple[Any, ...]) -> Any:
        donated = DONATED.get(function, set())
        calls[function] = tuple(
            jax.tree.map(_shape, each) if place in donated else each for place, each in enumerate(arguments)
        )
        seen.append(executables)
        return kept(executables, function, arguments)

    Executables.call = watch  # type: ignore[assignment, method-assign]
    try:
        bench.decode(rows, WATCHED)
    finally:
        Executables.call = kept  # type: ignore[method-assign]
    return seen[-1], calls


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
