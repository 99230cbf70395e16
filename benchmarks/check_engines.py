"""The engines of the checks: several of one model's weights, each with the programs alone that its check runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from narrow_backend import narrow
from random_engines import Bench, Setup, open_engine
from witness import Witness, WitnessSampler

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.source import NoProgress

COMPILING = {
    "/jax/core/compile/jaxpr_trace_duration": "traced_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered_s",
    "/jax/core/compile/backend_compile_duration": "compiled_s",
}
"""Events of JAX, and what a start calls the sum of them. Programs are compiled side by side, so this sum is more than
what passes on the clock."""


@attrs.frozen
class Sizes:
    """What is checked. A shape comes with the layers that are left of it."""

    shapes: tuple[tuple[str, int], ...] = (
        ("llama-3.2-1b", 2),
        ("qwen3-1.7b", 2),
        ("qwen3-0.6b", 4),
        ("llama-3.1-8b", 1),
    )
    """Of `reference`; `bits` of them where bits are compared, and the weights of all in `products`."""
    bits: int = 2
    prompts: tuple[int, ...] = (3, 33, 130)
    steps: int = 16
    crowd: int = 32
    crowds: tuple[int, ...] = (8, 32, 40)  # of `r2`: a launch of each width
    slots: int = 128  # of `r2` and `widths`
    rows: tuple[int, ...] = (8, 32, 128, 256)
    tokens: tuple[int, ...] = (64, 512, 2048)
    companies: int = 300  # of `products` and `widths`: real tokens, from 1 on
    long: int = 2200  # tokens of a prompt that is cut at both chunks
    chunks: tuple[int, int] = (512, 2048)
    schedules: int = 64
    schedule_tokens: int = 200
    stores: tuple[tuple[str, int | None, int], ...] = (("paged", 64, 24), ("paged", 128, 8), ("dense", None, 8))
    """Of `schedules`: storage, page and slots of its engines."""
    many_steps: int = 10_000
    tables: tuple[tuple[int, int], ...] = ((512, 64), (384, 128))  # of `steps`: context and page, 8 pages a row and 3
    context: int = 32_768
    context_steps: int = 100
    small: bool = False

    def rows_for(self, slots: int) -> tuple[int, ...]:
        """Widths up to the first that holds so many rows."""
        return tuple(width for width, below in zip(self.rows, (0, *self.rows), strict=False) if below < slots)

    @property
    def compared(self) -> list[Setup]:
        """The models whose bits are compared."""
        return [Setup(shape, 1, 512, layers=layers, small=self.small) for shape, layers in self.shapes[: self.bits]]


SMALL = Sizes(
    shapes=(("llama-3.2-1b", 1), ("qwen3-0.6b", 2)), bits=1, prompts=(3, 33), steps=4, crowd=10, crowds=(8, 10),
    slots=16, rows=(8,), tokens=(64,), companies=40, long=300, chunks=(128, 256), schedules=8, schedule_tokens=12,
    stores=(("paged", 64, 10), ("dense", None, 4)), many_steps=200, tables=((256, 32), (384, 128)), context=1024,
    context_steps=6, small=True,
)  # fmt: skip


class CheckEngines:
    """Each engine is opened once, and kept; those of one model have the same weights. `starts` says what each took."""

    def __init__(self, backend_class: Any, device: str, dtype: str) -> None:
        self._make, self._device, self._dtype = backend_class, device, dtype
        self._open: dict[Any, Bench] = {}
        self.starts: list[dict[str, Any]] = []
        self._spent = dict.fromkeys(COMPILING.values(), 0.0)
        self._listens = False

    def __call__(
        self,
        setup: Setup,
        rows: tuple[int, ...],
        tokens: tuple[int, ...],
        *,
        sampler: type = WitnessSampler,
        dtype: str | None = None,
        checkpoint: Checkpoint | None = None,
        watched: bool = False,
        runs: bool = False,
    ) -> Bench:
        """With launches of these widths alone, which are compiled, and `runs` of several steps if asked for. One with a
        `checkpoint` has weights of its own, and whoever asks for it closes it."""
        key = setup, rows, tokens, sampler, dtype, watched, runs
        if checkpoint is None and key in self._open:
            return self._open[key]
        self._listen()
        backend = narrow(self._make, rows, tokens)(
            device=self._device,
            dtype=dtype or self._dtype,
            deterministic=setup.deterministic,
            decode_run=None if runs else 1,
        )
        if watched:
            backend.watch_numerics()
        model = (setup.shape, setup.layers, setup.small, dtype, watched)
        like = self._with_weights(model) if checkpoint is None else None
        before, began = self._spent.copy(), time.perf_counter()
        bench = open_engine(setup, Witness(backend), sampler=sampler, checkpoint=checkpoint, like=like)
        loaded = time.perf_counter()
        backend.warm_up(NoProgress())
        ready, spent = time.perf_counter(), {name: self._spent[name] - before[name] for name in before}
        start = {"rows": list(rows), "tokens": list(tokens), "open_s": loaded - began, "warm_up_s": ready - loaded}
        start = {"shape": setup.shape, "storage": setup.storage, "slots": setup.slots, **start}
        self.starts.append({**start, **spent})
        print("  start", *(f"{name} {_short(value)}" for name, value in self.starts[-1].items()), flush=True)
        if checkpoint is None:
            self._open[key] = bench
        return bench

    @property
    def sms(self) -> int:
        """Of a GPU that runs the kernels, 0 where none does."""
        from mlxcel_jax_cuda.device import choose_device, device_facts

        facts = device_facts(choose_device(self._device))
        return facts.sms if facts.capability == "9.0" else 0

    def _with_weights(self, model: tuple[Any, ...]) -> Bench | None:
        """An engine that has the weights of this model already."""
        for (setup, _, _, _, dtype, watched, _), bench in self._open.items():
            if (setup.shape, setup.layers, setup.small, dtype, watched) == model:
                return bench
        return None

    def close(self) -> None:
        for bench in self._open.values():
            bench.close()
        self._open.clear()

    def _listen(self) -> None:
        if not self._listens:
            from jax import monitoring

            monitoring.register_event_duration_secs_listener(self._heard)
            self._listens = True

    def _heard(self, event: str, duration_secs: float, **more: Any) -> None:
        if event in COMPILING:
            self._spent[COMPILING[event]] += duration_secs


@attrs.frozen
class Checks:
    """What a section is given."""

    sizes: Sizes
    engines: CheckEngines
    gguf: Path | None = None
    seed: int = 0
    only: tuple[int, ...] = ()  # schedules, by their numbers


Rows = Iterator[dict[str, Any]]


def not_invariant(bench: Bench) -> Rows:
    """A row that says that something is wrong, where an engine does not even promise that rows do not see their
    company."""
    if bench.engine.level != "R2":
        yield {"shape": bench.setup.shape, "level": bench.engine.level, "wrong": True}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
