"""The JAX backend: launches of a step in order, the KV and the carry between them, and nothing read back but what is
asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.backend import BackendCaps, DeviceMemory, Level
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily
from mlxcel.core.kv import KVLayout, ceil_block
from mlxcel.core.plan import StepPlan, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Sampler
from mlxcel.core.source import Progress
from mlxcel.errors import BackendFault
from mlxcel_jax_cuda import storage
from mlxcel_jax_cuda.compilations import compilations
from mlxcel_jax_cuda.compile_cache import mended
from mlxcel_jax_cuda.device import choose_device, compute_dtype, device_facts, device_memory, enough_memory
from mlxcel_jax_cuda.forward import Arrays, DrawShape, Found, LastDrawn, draw, forward_of, pack_draw
from mlxcel_jax_cuda.fused_decode import fused_block, fused_weights
from mlxcel_jax_cuda.launch import Launch, Shape, Widths, launches
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.packed_forms import packed_forms
from mlxcel_jax_cuda.weights import Weights, load_weights

ROWS = (8, 32, 128, 256)
TOKENS = (64, 512, 2048)
R1_TOKENS = 512
COPIES = 8


@attrs.frozen(eq=False)
class _Loaded:
    family: ModelFamily
    config: Any
    weights: Weights


@attrs.define(eq=False)
class _Running:
    model: Model
    sampler: Sampler
    arrays: Arrays
    widths: Widths
    pages: int  # P
    kv: storage.Leaves
    last: LastDrawn

    @property
    def layout(self) -> KVLayout:
        return self.model.layout


@attrs.frozen(eq=False)
class _Drawn:
    """A launch whose draw is under way."""

    launch: Launch
    found: Found


@attrs.frozen(eq=False)
class _Submitted:
    plan: StepPlan
    drawn: tuple[_Drawn, ...]
    routes: dict[str, int]
    logits: jax.Array | None  # what there is to wait for where nothing is drawn: the KV is the next step's


class JaxBackend:
    """One model on one device."""

    def __init__(
        self,
        *,
        device: str = "auto",
        dtype: str = "auto",
        deterministic: bool = False,
        level: Level | None = None,
    ) -> None:
        """`deterministic` asks for R1 at least, which XLA:CPU in float32 is above anyway. `level` takes another one."""
        self._device = choose_device(device)
        self._numerics = _numerics(self._device, dtype, deterministic, level)
        at_r1 = self._numerics.level == "R1"
        self._caps = BackendCaps(
            level=self._numerics.level,
            platform=self._numerics.platform,
            device=device_facts(self._device).name,
            dtype=self._numerics.dtype,
            page_sizes=(64, 128) if self._numerics.platform == "cuda" else (64, 128, 32, 16),
            run_ahead=True,
            mixed_steps=not at_r1,
            prefill_widths=TOKENS if self._numerics.level == "R0" else (),
            r1_tokens=R1_TOKENS,
            compiled=True,
        )
        self._loaded: _Loaded | None = None
        self._running: _Running | None = None
        self._ready = compilations().count

    @property
    def caps(self) -> BackendCaps:
        return self._caps

    @property
    def weight_bytes(self) -> int:
        return self._model().weights.nbytes

    def memory(self) -> DeviceMemory | None:
        return device_memory(self._device)

    def load(self, family: ModelFamily, config: Any, checkpoint: Checkpoint, progress: Progress) -> None:
        schema, numerics = family.schema(config), self._numerics
        forms = packed_forms(schema, fused_block(family, config, numerics, config.context), numerics)
        with enough_memory(self._device, "the weights"):
            weights = load_weights(schema, checkpoint, numerics, self._device, progress, forms)
        self._loaded = _Loaded(family, config, weights)

    def start(self, layout: KVLayout, sampler: Sampler) -> None:
        loaded = self._model()
        block = fused_block(loaded.family, loaded.config, self._numerics, layout.context)
        model = Model(loaded.family, loaded.config, loaded.weights.index, layout, self._numerics, block)
        widths = Widths.of(
            slots=layout.slots, chunk=min(layout.chunk, ceil_block(layout.context)), rows=ROWS, tokens=TOKENS
        )
        if self._numerics.level == "R1":
            widths = Widths(widths.rows[-1:], (R1_TOKENS,))
        arrays = Arrays(loaded.weights.leaves, None if block is None else fused_weights(block, loaded.weights))
        pages = -(-ceil_block(layout.context) // layout.page_size)
        with enough_memory(self._device, f"the KV of {layout.pages} pages"):
            kv, last = jax.block_until_ready(self._zeros(layout))  # type: ignore[no-untyped-call]
        self._running = _Running(model, sampler, arrays, widths, pages, kv, last)

    @mended()
    def warm_up(self, progress: Progress) -> None:
        """Run every executable of the closed set once, over rows of padding, as a step runs them: behind this no
        request waits for a compilation, but one that scores, or brings a logits processor of its own."""
        running = self._started()
        forwards = [*running.widths.decodes(running.pages), *running.widths.pieces(running.pages)]
        draws = sorted({shape.logits for shape in forwards})
        sets = {rows: running.sampler.stage_sets(rows) for rows in draws}
        progress.start("compile", len(forwards) + sum(map(len, sets.values())) + 1, "programs")
        done = 0
        with enough_memory(self._device, "the arrays of a step"):
            for shape in forwards:
                logits = self._forward(shape, shape.padding(running.layout.slots))
                progress.advance(done := done + 1)
                for sampling in sets.pop(shape.logits, ()):
                    key = DrawShape.of(running.sampler, sampling, shape.logits)
                    slots = np.full(shape.logits, running.layout.slots, np.int32)
                    running.last, _ = draw(key, logits, running.last, pack_draw(key, slots, sampling))
                    progress.advance(done := done + 1)
            self._copy_pages(np.full((1, 3), running.layout.pages, np.int32))
            jax.block_until_ready((running.kv, running.last))
        progress.advance(done + 1)
        progress.finish()
        self._ready = compilations().count

    @property
    def compilations_after_ready(self) -> int:
        """Programs that were compiled since `warm_up`, in the whole process."""
        return compilations().count - self._ready

    def open(self, slot: int, spec: SequenceSpec) -> None:
        """A slot's ring is masked by its row's length, and its state begins as zeros at position 0."""

    def release(self, slot: int) -> None:
        """Nothing to free; pages are masked by their rows' lengths."""

    def submit(self, plan: StepPlan) -> _Submitted:
        running = self._started()
        layout = running.layout
        drawn, ran, logits = [], 0, None
        try:
            self._copy_pages(plan.page_copies)
            for launch in launches(plan, running.widths, slots=layout.slots, pages=running.pages):
                logits = self._forward(launch.shape, launch.buffer)
                ran += 1
                if len(launch.draws):
                    drawn.append(_Drawn(launch, self._draw(plan, launch, logits)))
        except Exception as error:
            raise self._fault(error) from error
        routes = {
            name: n * ran for name, n in Counter(storage.routes(layout, kernel=bool(self._numerics.hopper))).items()
        }
        return _Submitted(plan, tuple(drawn), routes, None if drawn else logits)

    def _forward(self, shape: Shape, buffer: np.ndarray) -> jax.Array:
        """Logits float32 [R, V]; the KV is what the launch leaves of it."""
        running = self._started()
        forward = forward_of(running.model, shape)
        running.kv, logits = forward(running.model, shape, running.arrays, running.kv, running.last.tokens, buffer)
        return logits

    def _draw(self, plan: StepPlan, launch: Launch, logits: jax.Array) -> Found:
        running, rows = self._started(), launch.shape.logits
        # A row of padding repeats the parameters of a real one: what it comes to is dropped.
        origin = np.full(rows, launch.draws[0])
        origin[launch.logits] = launch.draws
        slots = np.full(rows, running.layout.slots, np.int32)
        slots[launch.logits] = launch.slots
        params = {name: array[origin] for name, array in plan.sampling.params.items()}
        own = attrs.evolve(plan.sampling, params=params)
        shape = DrawShape.of(running.sampler, own, rows)
        running.last, found = draw(shape, logits, running.last, pack_draw(shape, slots, own))
        for array in found:
            if array is not None:
                array.copy_to_host_async()
        return found

    def _copy_pages(self, copies: np.ndarray) -> None:
        running = self._started()
        for first in range(0, len(copies), COPIES):
            padded = storage.as_copies(copies[first : first + COPIES], running.layout.pages, COPIES)
            running.kv = storage.copy_pages(running.layout, running.kv, padded)

    def read(self, handle: _Submitted) -> StepResult:
        try:
            if handle.logits is not None:
                handle.logits.block_until_ready()
            return _result(handle)
        except Exception as error:
            raise self._fault(error, ran=True) from error

    def export_state(self, slot: int) -> tuple[list[jax.Array], int]:
        running = self._started()
        rings = storage.take(tuple(storage.ring_leaves(running.layout)), running.kv, np.array([slot], np.int32))
        return list(rings), sum(ring.nbytes for ring in rings)

    def import_state(self, slot: int, state: Sequence[Any]) -> None:
        running = self._started()
        rings = tuple(jnp.asarray(ring) for ring in state)
        running.kv = storage.put(
            tuple(storage.ring_leaves(running.layout)), running.kv, np.array([slot], np.int32), rings
        )

    def export_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
        running = self._started()
        taken = storage.take(tuple(storage.full_leaves(running.layout)), running.kv, np.array(pages, np.int32))
        return storage.host_arrays(taken)

    def import_pages(self, pages: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        running = self._started()
        values = tuple(jnp.asarray(array) for array in arrays)
        running.kv = storage.put(
            tuple(storage.full_leaves(running.layout)), running.kv, np.array(pages, np.int32), values
        )

    def close(self) -> None:
        self._loaded = self._running = None

    def _fault(self, error: Exception, *, ran: bool = False) -> BackendFault:
        """What a step ends with. What was donated to a launch that failed is gone, and is made anew."""
        running = self._started()
        lost = ran or any(array.is_deleted() for array in (*running.kv, *running.last))
        if lost:
            running.kv, running.last = self._zeros(running.layout)
        return BackendFault(f"{type(error).__name__}: {error}", kv_intact=not lost)

    def _zeros(self, layout: KVLayout) -> tuple[storage.Leaves, LastDrawn]:
        """KV and carry before anything ran, committed to the device as what launches give is: an array of another
        kind would be another executable."""
        with jax.default_device(self._device):
            made = storage.make_storage(layout, self._numerics), _nothing_drawn(layout)
        return jax.device_put(made, self._device)

    def _model(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("load() comes before this")
        return self._loaded

    def _started(self) -> _Running:
        if self._running is None:
            raise RuntimeError("start() comes before this")
        return self._running


def _numerics(device: jax.Device, dtype: str, deterministic: bool, level: Level | None) -> Numerics:
    facts = device_facts(device)
    kind = compute_dtype(dtype, facts.platform)
    chosen: Level = "R2" if facts.platform == "cpu" else "R1" if deterministic else "R0"
    hopper = facts.sms if facts.capability == "9.0" and kind == "bfloat16" else 0
    return Numerics(facts.platform, kind, level or chosen, hopper)


def _nothing_drawn(layout: KVLayout) -> LastDrawn:
    return LastDrawn(jnp.zeros(layout.slots + 1, jnp.int32), jnp.zeros(layout.slots + 1, jnp.float32))


def _result(handle: _Submitted) -> StepResult:
    """Rows in the order of the plan, whatever launches they came from."""
    R = len(handle.plan.logits_rows)
    words = np.zeros((2, R), np.int32)
    columns: dict[str, np.ndarray] = {}
    for drawn in handle.drawn:
        to, own = drawn.launch.draws, drawn.launch.logits
        words[:, to] = np.asarray(drawn.found.words)[:, own]
        for name, array in _columns(drawn.found):
            if name not in columns:
                columns[name] = np.zeros((R, *array.shape[1:]), array.dtype)
            columns[name][to] = array[own]
    return StepResult(words[0], words[1], **columns, routes=handle.routes)


def _columns(found: Found) -> Iterator[tuple[str, np.ndarray]]:
    for name in ("logprobs", "top_ids", "top_logprobs", "observed"):
        array = getattr(found, name)
        if array is not None:
            yield name, np.asarray(array)
