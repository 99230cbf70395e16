"""Engines of the JAX backend over random weights of published shapes, and how a client drives one in a benchmark."""

from __future__ import annotations

import gc
import math
import platform
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from mlxcel.core.backend import BackendSettings
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.engine import Engine
from mlxcel.core.family import ModelFamily, WeightSchema
from mlxcel.core.kv import KVSpec
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Decode, PrefillPlan, SamplingArrays, Ticket
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Sampler
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.qwen import Qwen3
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.random_checkpoint import SHAPES, RandomCheckpoint, random_checkpoint
from mlxcel.text.detokeniser import Detokeniser
from mlxcel.tools.machine import driver, machine

FAMILIES: dict[str, type[ModelFamily]] = {"llama": Llama, "qwen3": Qwen3}
STORES: dict[str, Any] = {"dense": DenseKV, "paged": PagedKV}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
"""Put over a config to see whether a script runs."""


class GreedySampler(ChainSampler):
    """The chain for rows that are greedy and never scored, so that a warm-up compiles nothing else."""

    def stage_sets(self, rows: int) -> list[SamplingArrays]:
        return super().stage_sets(rows)[:1]

    def pack_scores(self, targets: np.ndarray, top: int) -> SamplingArrays:
        (only,) = self.stage_sets(len(targets))
        return only


@attrs.frozen
class Setup:
    """What an engine is opened with. `layers` cuts the model, `small` makes a toy of it. `page` is the positions of a
    page of paged storage, None for what the backend likes best. `pieces` are the widths of a prompt's pieces that there
    are programs for, None for all that the engine has."""

    shape: str
    slots: int
    context: int
    storage: str = "dense"
    deterministic: bool = False
    chunk: int = 2048
    layers: int | None = None
    small: bool = False
    page: int | None = None
    pieces: tuple[int, ...] | None = None

    @property
    def family(self) -> ModelFamily:
        return FAMILIES[SHAPES[self.shape]["model_type"]]()

    def checkpoint(self) -> RandomCheckpoint:
        config = {**SHAPES[self.shape], **(SMALL if self.small else {})}
        if self.layers is not None:
            config["num_hidden_layers"] = self.layers
        return random_checkpoint(self.family, config)


@attrs.frozen(eq=False)
class Bench:
    """An engine, its backend, and what its model reads for a token."""

    setup: Setup
    engine: Engine
    backend: Any
    schema: WeightSchema
    kv_spec: KVSpec
    vocab: int

    @property
    def itemsize(self) -> int:
        """Bytes of a value of the compute type."""
        return {"float32": 4, "bfloat16": 2}[self.engine.caps.dtype]

    @property
    def weight_bytes(self) -> int:
        """Of all weights that a step reads whole: not an embedding that is no head as well."""
        heads = {weight.tied_to for weight in self.schema.weights if weight.tied_to is not None}
        total = 0
        for weight in self.schema.weights:
            if weight.tied_to is None and (weight.role != "embedding" or weight.name in heads):
                wide = weight.role in ("linear", "embedding", "experts")
                values = math.prod(weight.shape) * len(self.schema.layers_of(weight))
                total += values * (self.itemsize if wide else 4)
        return total

    def step_bytes(self, rows: int, keys: float) -> float:
        """Weights and KV that a step of `rows` rows of `keys` positions reads."""
        return self.weight_bytes + rows * keys * self.kv_spec.bytes_per_position(self.itemsize)

    def spec(self, ids: Sequence[int] | np.ndarray, **params: Any) -> SequenceSpec:
        """Greedy, to the end of the context unless `params` say otherwise."""
        chosen = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": -1, **params})
        return SequenceSpec("bench", np.asarray(ids, np.int32), chosen)

    def ids(self, length: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.vocab, length).astype(np.int32)

    def plan(
        self, ids: Sequence[int] | np.ndarray, adopted: int = 0, *, chunk: int | None = None, draw: bool = True
    ) -> PrefillPlan:
        planner = ChunkedPlanner(chunk=chunk or self.setup.chunk, level=self.engine.level, caps=self.engine.caps)
        return planner.build(np.asarray(ids, np.int32), adopted, draw=draw)

    def begin(self, ids: Sequence[int] | np.ndarray, *, chunk: int | None = None, **params: Any) -> int:
        """Open a row and run its prompt: its first token is drawn."""
        row = self.engine.open(self.spec(ids, **params))
        outcome = self.engine.prefill(row, self.plan(ids, chunk=chunk))
        if outcome.error is not None:
            raise outcome.error
        return row

    def decode(self, rows: Sequence[int], steps: int) -> list[float]:
        """`steps` steps over these rows, one or a run of them ahead, as clients decode: the moment in seconds at which
        each was read. The first is by itself, so that what lies behind its moment is what the others took."""
        engine, parts = self.engine, [Decode(row) for row in rows]
        in_flight: deque[tuple[Ticket, ...]] = deque()
        moments: list[float] = []
        started = 0
        while len(moments) < steps:
            while started < steps and len(in_flight) < 2:
                longest = engine.run_length(parts) if started else 1
                count = longest if longest <= steps - started else 1
                engine.reserve(parts, count)
                in_flight.append(engine.submit_run(parts, count) if count > 1 else (engine.submit(parts),))
                started += count
            for ticket in in_flight.popleft():
                for outcome in engine.collect(ticket):
                    if outcome.error is not None:
                        raise outcome.error
                moments.append(time.perf_counter())
        return moments

    def close_rows(self) -> None:
        for row in self.engine.open_sequences:
            self.engine.close(row)

    def close(self) -> None:
        self.engine.shutdown()


def prepare_jax(device: str, cache_folder: Path | None = None) -> Any:
    """The class of the backend, with JAX imported as it has to be for the device."""
    from mlxcel_jax_cuda.plugin import mlxcel_backends

    (spec,) = mlxcel_backends()
    spec.prepare(BackendSettings(device=device, memory_share=None, cache_folder=cache_folder))
    return spec.load()


def open_engine(
    setup: Setup,
    backend: Any,
    *,
    sampler: type[ChainSampler] = ChainSampler,
    checkpoint: Checkpoint | None = None,
    like: Bench | None = None,
) -> Bench:
    """`backend` has no model yet; the engine owns it from now on. With `like`, an engine of the same model on JAX, it
    takes its weights: reading them lasts longer than most rounds."""
    family, checkpoint = setup.family, setup.checkpoint() if checkpoint is None else checkpoint
    config = family.parse_config(checkpoint)
    if like is None:
        backend.load(family, config, checkpoint, NoProgress())
    else:
        backend.take_weights(like.backend)
    kv_spec = family.kv_spec(config)
    kv = STORES[setup.storage](
        kv_spec=kv_spec,
        slots=setup.slots,
        context=setup.context,
        page_size=setup.page or backend.caps.page_sizes[0],
    )
    made: Sampler = sampler(vocab=config.vocab_size)
    engine = Engine(
        backend=backend,
        kv_spec=kv_spec,
        kv=kv,
        sampler=made,
        finish=StandardFinish(stream=lambda spec: Detokeniser(ByteTokenizer()), steps={}),
        settings=EngineSettings(config.vocab_size, setup.context, setup.slots, setup.chunk),
    )
    return Bench(setup, engine, backend, family.schema(config), kv_spec, config.vocab_size)


class Engines:
    """Engines of one shape at a time over the same weights, each opened when it is first asked for, its greedy programs
    compiled. They score nothing."""

    def __init__(self, backend_class: Any, device: str) -> None:
        self._make, self._device = backend_class, device
        self._open: dict[Setup, Bench] = {}

    def __call__(self, setup: Setup) -> Bench:
        if any((other.shape, other.small) != (setup.shape, setup.small) for other in self._open):
            self.close()
        if setup not in self._open:
            from narrow_backend import narrow

            made = narrow(self._make, tokens=setup.pieces)
            backend = made(device=self._device, dtype="auto", deterministic=setup.deterministic)
            like = next(iter(self._open.values()), None)
            self._open[setup] = open_engine(setup, backend, sampler=GreedySampler, like=like)
            backend.warm_up(NoProgress())
        return self._open[setup]

    def close(self) -> None:
        for bench in self._open.values():
            bench.close()
        self._open.clear()
        gc.collect()


def device_facts(commit: str) -> dict[str, str]:
    """What a record says of where it was made."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "driver": driver() or "",
        "machine": machine(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "numpy": version("numpy"),
        "commit": commit,
    }
