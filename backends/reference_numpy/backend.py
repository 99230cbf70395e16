"""The NumPy backend: float32, readable, row-invariant by construction (level R2)."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.backend import BackendCaps
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily
from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import CARRY, StepPlan, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry, Sampler
from mlxcel.core.source import Progress
from mlxcel.errors import DeviceError, UsageError
from mlxcel_reference_numpy.context import NumpyContext
from mlxcel_reference_numpy.storage import LayerStorage, copy_pages, make_storage, page_arrays, ring_arrays, routes
from mlxcel_reference_numpy.weights import Weights, load_weights


@attrs.frozen(eq=False)
class _Model:
    family: ModelFamily
    config: Any
    weights: Weights


@attrs.frozen(eq=False)
class _Running:
    sampler: Sampler
    layout: KVLayout
    storage: list[LayerStorage]
    last_tokens: np.ndarray  # int32 [slots]
    last_observed: np.ndarray  # float32 [slots]


class NumpyBackend:
    """Runs a step where it is submitted; `read` has nothing to wait for."""

    def __init__(self, *, device: str = "auto", dtype: str = "auto", deterministic: bool = False) -> None:
        """`deterministic` asks for R1 at least: this backend is at R2 always."""
        if device not in ("auto", "cpu"):
            raise DeviceError(
                f"backend reference-numpy runs on the CPU, not on {device}",
                hint="leave --device out, or choose a backend for that device: mlxcel plugins lists them",
            )
        if dtype not in ("auto", "float32"):
            raise UsageError(f"backend reference-numpy computes in float32, not in {dtype}", hint="leave --dtype out")
        self._caps = BackendCaps(
            level="R2",
            platform="cpu",
            device=platform.processor() or platform.machine(),
            dtype="float32",
            page_sizes=(16, 32, 64, 128),
            run_ahead=True,
            mixed_steps=True,
        )
        self._model: _Model | None = None
        self._running: _Running | None = None
        self._watched = False

    @property
    def caps(self) -> BackendCaps:
        return self._caps

    @property
    def weight_bytes(self) -> int:
        return self._loaded().weights.nbytes

    def memory(self) -> None:
        """NumPy's arrays lie in the host's memory."""

    def watch_numerics(self) -> None:
        self._watched = True

    def load(self, family: ModelFamily, config: Any, checkpoint: Checkpoint, progress: Progress) -> None:
        self._model = _Model(family, config, load_weights(family.schema(config), checkpoint, progress))

    def take_weights(self, other: NumpyBackend) -> None:
        self._model = other._loaded()

    def start(self, layout: KVLayout, sampler: Sampler) -> None:
        tokens, observed = np.zeros(layout.slots, np.int32), np.zeros(layout.slots, np.float32)
        self._running = _Running(sampler, layout, make_storage(layout), tokens, observed)

    def open(self, slot: int, spec: SequenceSpec) -> None:
        """A slot's ring is masked by its row's length, and its state begins as zeros at position 0."""

    def release(self, slot: int) -> None:
        """Nothing to free; pages are masked by their rows' lengths."""

    def submit(self, plan: StepPlan) -> StepResult:
        model, running = self._loaded(), self._started()
        copy_pages(running.storage, plan.page_copies)
        own = np.repeat(running.last_tokens[plan.slots], np.diff(plan.query_start))
        token_ids = np.where(plan.token_ids == CARRY, own, plan.token_ids)
        context = NumpyContext(
            plan, token_ids, model.weights, running.storage, running.layout.context, watched=self._watched
        )
        # Overflow and NaN of one row are found by its status word; they must not become warnings of the step.
        with np.errstate(all="ignore"):
            logits = model.family.forward(context, model.config)
            launches = {name: n * plan.num_rows for name, n in Counter(routes(running.layout)).items()}
            if not len(plan.draw_rows):
                nothing = np.zeros(0, np.int32)
                return StepResult(nothing, nothing, routes=launches)
            slots = plan.slots[plan.draw_rows]
            carry = Carry(running.last_tokens[slots], running.last_observed[slots])
            drawn = running.sampler.draw(np, logits, plan.sampling, carry)
        running.last_tokens[slots] = drawn.tokens
        if drawn.observed is not None:
            running.last_observed[slots] = drawn.observed
        spoilt = None
        if context.seen is not None:
            spoilt = np.minimum.reduceat(context.seen, plan.query_start[:-1])[plan.draw_rows]
        return StepResult(*drawn, launches, spoilt)

    def export_state(self, slot: int) -> tuple[list[np.ndarray], int]:
        rings = [array[slot].copy() for array in ring_arrays(self._started().storage)]
        return rings, sum(ring.nbytes for ring in rings)

    def import_state(self, slot: int, state: Sequence[np.ndarray]) -> None:
        for array, ring in zip(ring_arrays(self._started().storage), state, strict=True):
            array[slot] = ring

    def export_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
        return [array[list(pages)] for array in page_arrays(self._started().storage)]

    def import_pages(self, pages: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        for array, values in zip(page_arrays(self._started().storage), arrays, strict=True):
            array[list(pages)] = values

    def read(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        self._model = self._running = None

    def _loaded(self) -> _Model:
        if self._model is None:
            raise RuntimeError("load() comes before this")
        return self._model

    def _started(self) -> _Running:
        if self._running is None:
            raise RuntimeError("start() comes before this")
        return self._running
