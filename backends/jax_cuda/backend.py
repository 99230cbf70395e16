"""The JAX backend: launches of a step in order, the KV and the carry between them, and nothing read back but what is
asked for."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.backend import BackendCaps, Compilations, DeviceMemory, Level
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import ModelFamily, StandardBlock
from mlxcel.core.held_interrupts import held_interrupts
from mlxcel.core.kv import KVLayout, ceil_block
from mlxcel.core.plan import SamplingArrays, StepPlan, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Sampler
from mlxcel.core.source import Progress
from mlxcel.errors import BackendFault
from mlxcel_jax_cuda import storage
from mlxcel_jax_cuda.compilations import compilations
from mlxcel_jax_cuda.compile_ahead import Program
from mlxcel_jax_cuda.compile_cache import mended
from mlxcel_jax_cuda.decode_run import Run, forward_and_draw_run
from mlxcel_jax_cuda.device import (
    choose_device,
    compute_dtype,
    device_facts,
    device_memory,
    enough_memory,
    first_line,
)
from mlxcel_jax_cuda.drawing import Asked, Found, LastDrawn, draw
from mlxcel_jax_cuda.executables import Executables
from mlxcel_jax_cuda.first_run import await_end
from mlxcel_jax_cuda.forward import at_once, forward, forward_and_draw
from mlxcel_jax_cuda.fused_decode import fused_block
from mlxcel_jax_cuda.launch import Launch, Launching, Shape, Widths
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import TILE, Numerics
from mlxcel_jax_cuda.packed_forms import packed_forms
from mlxcel_jax_cuda.persistent_decode import TWICE, form, halves
from mlxcel_jax_cuda.program_store import ProgramStore
from mlxcel_jax_cuda.programs import Programs, programs
from mlxcel_jax_cuda.results import Drawn, Submitted
from mlxcel_jax_cuda.running import COPIES, UNKNOWN, Running
from mlxcel_jax_cuda.runs_together import can_run, runs_of, steps_of
from mlxcel_jax_cuda.weights import Weights, load_block, load_weights
from mlxcel_jax_cuda.without_kernels import remark

log = logging.getLogger("mlxcel.jax")

ROWS = (8, 32, 128, 256)
TOKENS = (64, 512, 2048)
R1_ROWS = 32
R1_TOKENS = 512


@attrs.frozen(eq=False)
class _Loaded:
    family: ModelFamily
    config: Any
    weights: Weights


class JaxBackend:
    """One model on one device."""

    def __init__(
        self,
        *,
        device: str = "auto",
        dtype: str = "auto",
        deterministic: bool = False,
        level: Level | None = None,
        formulas: bool = False,
        decode_run: int | None = None,
    ) -> None:
        """`deterministic` asks for R1 at least, which XLA:CPU in float32 is above anyway. For tests, `level` takes any
        one, `formulas` runs what there are kernels for by their formulas, on any device, and `decode_run` takes runs of
        so many steps wherever there can be one."""
        self._device = choose_device(device)
        numerics = _numerics(self._device, dtype, deterministic, level)
        self._numerics = attrs.evolve(numerics, formulas=formulas)
        self._given_level = level
        self._given_run = decode_run
        self._caps = _caps(self._numerics, self._device)
        self._loaded: _Loaded | None = None
        self._running: Running | None = None
        self._ready = compilations().count

    @property
    def caps(self) -> BackendCaps:
        """The level may rise with `load`, which knows the model."""
        return self._caps

    @property
    def weight_bytes(self) -> int:
        return self._model().weights.nbytes

    def memory(self) -> DeviceMemory | None:
        return device_memory(self._device)

    def watch_numerics(self) -> None:
        """No launch is fused then: layers are looked at between their ops."""
        self._numerics = attrs.evolve(self._numerics, watched=True)

    def load(self, family: ModelFamily, config: Any, checkpoint: Checkpoint, progress: Progress) -> None:
        schema, numerics = family.schema(config), self._numerics
        block = fused_block(family, config, numerics, config.context)
        self._rise(block)
        with enough_memory(self._device, "the weights"):
            if block is not None:
                weights = load_block(schema, block, checkpoint, numerics, self._device, progress)
            else:
                forms = packed_forms(schema, numerics)
                weights = load_weights(schema, checkpoint, numerics, self._device, progress, forms)
        self._loaded = _Loaded(family, config, weights)

    def take_weights(self, other: JaxBackend) -> None:
        """In the place of `load`: the model that `other`, of the same device and type, has loaded. It keeps it too."""
        self._loaded = loaded = other._model()
        block = fused_block(loaded.family, loaded.config, self._numerics, loaded.config.context)
        self._rise(block)

    def _rise(self, block: StandardBlock | None) -> None:
        """To level R2, where every launch of the model is one of kernels whose rows do not know their company."""
        numerics = self._numerics
        if self._given_level is None and numerics.hopper and block is not None and not numerics.watched:
            self._numerics = attrs.evolve(numerics, level="R2")
            self._caps = _caps(self._numerics, self._device)

    def start(self, layout: KVLayout, sampler: Sampler) -> None:
        loaded = self._model()
        block = fused_block(loaded.family, loaded.config, self._numerics, layout.context)
        model = Model(loaded.family, loaded.config, loaded.weights.index, layout, self._numerics, block)
        log.info("decode %s", form(model))
        widths = Widths.of(
            slots=layout.slots,
            chunk=min(layout.chunk, ceil_block(layout.context)),
            rows=sorted({*ROWS, TWICE}) if halves(model) else ROWS,
            tokens=TOKENS,
        )
        if self._numerics.level == "R1":
            widths = Widths((R1_ROWS,), (R1_TOKENS,))
        pages = -(-ceil_block(layout.context) // layout.page_size)
        launching = Launching(widths, slots=layout.slots, pages=pages)
        with enough_memory(self._device, f"the KV of {layout.pages} pages"):
            kv, last = jax.block_until_ready(self._zeros(model))  # type: ignore[no-untyped-call]
        executables = Executables(ProgramStore.of(self._device))
        runs = runs_of(model, sampler, launching.decodes, functools.partial(self._run_steps, model))
        self._caps = attrs.evolve(self._caps, decode_runs=tuple((shape.rows, runs[shape].steps) for shape in runs))
        self._running = Running(model, sampler, loaded.weights.arrays, launching, kv, last, executables, runs)

    def _run_steps(self, model: Model, shape: Shape) -> int:
        if self._given_run is None:
            return steps_of(model, shape, self._model().weights.nbytes)
        return self._given_run if can_run(model, shape) else 1

    @mended()
    def warm_up(self, progress: Progress) -> None:
        """Make every program of the closed set, and run each once over rows of padding, as a step runs it: behind this
        no request waits for a compilation, but one that brings a logits processor of its own."""
        running = self._started()
        closed = programs(running.model, running.sampler, running.launching, running.runs)
        listed = list(self._listed(running, closed))
        progress.start("compile", len(listed), "programs")
        running.executables.make(listed, progress.advance)
        try:
            self._run_padding(running, closed)
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            if not running.executables.doubt():
                raise
            log.warning("compiled programs that were kept do not run, and are made anew: %s", first_line(error))
            running.kv, running.last = self._zeros(running.model)
            running.executables.make(self._listed(running, closed), progress.advance)
            self._run_padding(running, closed)
        running.executables.proven()
        progress.finish()
        self._ready = compilations().count

    def _run_padding(self, running: Running, closed: Iterable[Programs]) -> None:
        with enough_memory(self._device, "the arrays of a step"):
            for each in closed:
                for asked in each.whole:
                    self._forward_and_draw(each.launch, asked)
                    self._await_end(each.launch.shape.words)
                for run in each.runs:
                    self._forward_and_draw_run(run)
                    self._await_end(run.words)
                if each.alone:
                    logits, _ = self._forward(each.launch)
                    self._await_end(each.launch.shape.words)
                for asked in each.draws:
                    running.last, _ = running.call(draw, running.for_draw(asked, logits))
            self._await_end("draws")
            if running.layout.paged:
                self._copy_pages(running.no_copies)
            running.kv = running.call(storage.clear_spoilt, running.for_clearing(*running.nobody))
            jax.block_until_ready((running.kv, running.last))  # type: ignore[no-untyped-call]

    def _await_end(self, program: str) -> None:
        """Of a first run, on a GPU. DeviceHangs where it does not end."""
        if self._numerics.platform != "cpu":
            running = self._started()
            await_end(program, (*running.kv, *running.last))

    def _listed(self, running: Running, closed: Sequence[Programs]) -> Iterator[Program]:
        """Every program with what it will be called with, or with what only looks like it. Draws first: the wide ones
        take longest to compile and are quickly lowered, and those of kernels the other way round."""
        for each in closed:
            for asked in each.draws:
                yield running.draw_program(asked)
        for each in closed:
            for asked in each.whole:
                yield running.whole_program(each.launch, asked)
            for run in each.runs:
                yield running.run_program(run)
            if each.alone:
                yield running.forward_program(each.launch)
        if running.layout.paged:  # else a page is a whole row, which nobody copies, and eight of them are many
            yield Program("copies of pages", storage.copy_pages, running.for_copies(running.no_copies))
        yield Program("clearing of pages", storage.clear_spoilt, running.for_clearing(*running.nobody))

    @mended()
    def prepare_steps(self, calls: Sequence[Sequence[StepPlan]], progress: Progress) -> None:
        """As `warm_up`, of what these calls will run, which for itself is not run here."""
        running = self._started()
        running.executables.make_missing(self._coming(running, calls), progress)

    def _coming(self, running: Running, calls: Iterable[Sequence[StepPlan]]) -> Iterator[Program]:
        """The programs of `submit` and `submit_run`."""
        for plans in calls:
            if (run := self._run_of(plans)) is not None:
                yield running.run_program(run)
                continue
            for plan in plans:
                for launch in running.launching.cut(plan):
                    asked = self._asked(plan, launch) if len(launch.draws) else None
                    if asked is not None and self._at_once(launch, asked):
                        yield running.whole_program(launch, asked)
                        continue
                    yield running.forward_program(launch)
                    if asked is not None:
                        yield running.draw_program(asked)

    @property
    def compilations_after_ready(self) -> int:
        """Programs that were compiled since `warm_up`, in the whole process."""
        return compilations().count - self._ready

    @property
    def compilations(self) -> Compilations:
        return Compilations(self._ready, self.compilations_after_ready)

    @property
    def remark(self) -> str | None:
        """Of a GPU that runs this model op by op."""
        return remark(self._started().model)

    def open(self, slot: int, spec: SequenceSpec) -> None:
        """A slot's ring is masked by its row's length, and its state begins as zeros at position 0."""
        self._started().begun[slot] = UNKNOWN

    def release(self, slot: int) -> None:
        """Nothing to free; pages are masked by their rows' lengths."""

    def submit(self, plan: StepPlan) -> Submitted:
        running = self._started()
        drawn, ran, logits = [], 0, None
        try:
            self._copy_pages(plan.page_copies)
            for launch in running.launching.cut(plan):
                running.begin(launch)
                ran += 1
                if len(launch.draws):
                    drawn.append(self._drawn(plan, launch))
                else:
                    logits, _ = self._forward(launch)
        except Exception as error:
            raise self._fault(error) from error
        routes = {name: count * ran for name, count in running.routes.items()}
        return Submitted(plan, tuple(drawn), routes, None if drawn else logits)

    def submit_run(self, plans: Sequence[StepPlan]) -> list[Submitted]:
        """One program, where there is one for these draws."""
        running, run = self._started(), self._run_of(plans)
        if run is None:
            return [self.submit(plan) for plan in plans]
        try:
            self._copy_pages(plans[0].page_copies)
            words = self._forward_and_draw_run(run)
        except Exception as error:
            raise self._fault(error) from error
        steps = Drawn.of_run(run.launch, words, len(plans))
        return [Submitted(plan, (step,), running.routes, None) for plan, step in zip(plans, steps, strict=True)]

    def _run_of(self, plans: Sequence[StepPlan]) -> Run | None:
        """None where these are steps one by one."""
        if len(plans) == 1:
            return None
        running = self._started()
        launch, *others = running.launching.cut(plans[0])
        together = None if others else running.runs.get(launch.shape)
        if together is None or len(plans) != together.steps:
            return None
        asked = self._asked(plans[0], launch)
        return Run.of_plans(launch, asked, plans) if together.takes(asked.shape) else None

    def _drawn(self, plan: StepPlan, launch: Launch) -> Drawn:
        asked = self._asked(plan, launch)
        seen = None
        if self._at_once(launch, asked):
            found = self._forward_and_draw(launch, asked)
        else:
            logits, seen = self._forward(launch)
            found = self._draw(plan, launch, asked, logits)
        return Drawn.of(launch, found, asked.unread, seen)

    def _asked(self, plan: StepPlan, launch: Launch) -> Asked:
        running, rows, sampling = self._started(), launch.shape.logits, plan.sampling
        slots = np.full(rows, running.layout.slots, np.int32)
        slots[launch.logits] = launch.slots
        if sampling.params:
            # A row of padding repeats the parameters of a real one: what it comes to is dropped.
            origin = np.full(rows, launch.draws[0])
            origin[launch.logits] = launch.draws
            params = {name: array[origin] for name, array in sampling.params.items()}
            sampling = SamplingArrays(sampling.stages, params, sampling.top_logprobs, sampling.unread)
        return Asked.of(running.sampler, sampling, slots)

    def _at_once(self, launch: Launch, asked: Asked) -> bool:
        return at_once(self._started().model, launch.shape, asked.shape)

    def _forward_and_draw(self, launch: Launch, asked: Asked) -> Found:
        running = self._started()
        found: Found
        running.kv, running.last, found = running.call(forward_and_draw, running.for_both(launch, asked))
        return found

    def _forward_and_draw_run(self, run: Run) -> jax.Array:
        """Words int32 [steps, 2, R]."""
        running = self._started()
        words: jax.Array
        running.kv, running.last, words = running.call(forward_and_draw_run, running.for_run(run))
        return words

    def _forward(self, launch: Launch) -> tuple[jax.Array, jax.Array | None]:
        """Logits float32 [R, V], and where layers are watched int32 [S]; the KV is what the launch leaves of it."""
        running = self._started()
        running.kv, logits, seen = running.call(forward, running.for_forward(launch))
        return logits, seen

    def _draw(self, plan: StepPlan, launch: Launch, asked: Asked, logits: jax.Array) -> Found:
        running = self._started()
        found: Found
        running.last, found = running.call(draw, running.for_draw(asked, logits))
        return found

    def _copy_pages(self, copies: np.ndarray) -> None:
        running = self._started()
        for first in range(0, len(copies), COPIES):
            running.kv = running.call(storage.copy_pages, running.for_copies(copies[first : first + COPIES]))

    def read(self, handle: Submitted) -> StepResult:
        running = self._started()
        try:
            if handle.logits is not None:
                handle.logits.block_until_ready()
            result = handle.result()
            for row in handle.rows_not_finite(result):
                # Whoever gets its pages next masks what lies behind its own end, and 0 times NaN is NaN.
                running.kv = running.call(storage.clear_spoilt, running.for_clearing(*running.own(handle.plan, row)))
            return result
        except Exception as error:
            raise self._fault(error, ran=True) from error

    def export_state(self, slot: int) -> tuple[list[jax.Array], int]:
        running = self._started()
        rings = storage.take_rings(running.model.kv, running.kv, np.array([slot], np.int32))
        return list(rings), sum(ring.nbytes for ring in rings)

    def import_state(self, slot: int, state: Sequence[Any]) -> None:
        running = self._started()
        rings = tuple(jnp.asarray(ring) for ring in state)
        running.kv = storage.put_rings(running.model.kv, running.kv, np.array([slot], np.int32), rings)

    def export_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
        running = self._started()
        return storage.pages_to_host(running.model.kv, running.kv, np.array(pages, np.int32))

    def import_pages(self, pages: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        running = self._started()
        for kv in storage.pages_from_host(running.model.kv, running.kv, np.array(pages, np.int32), arrays):
            running.kv = kv

    def close(self) -> None:
        self._loaded = self._running = None

    def _fault(self, error: Exception, *, ran: bool = False) -> BackendFault:
        """What a step ends with. What was donated to a launch that failed is gone, and is made anew."""
        running = self._started()
        lost = ran or any(array.is_deleted() for array in (*running.kv, *running.last))
        if lost:
            running.kv, running.last = self._zeros(running.model)
        return BackendFault(f"{type(error).__name__}: {error}", kv_intact=not lost)

    def _zeros(self, model: Model) -> tuple[storage.Leaves, LastDrawn]:
        """KV and carry before anything ran, committed to the device as what launches give is: an array of another
        kind would be another executable."""
        with held_interrupts(), jax.default_device(self._device):
            made = storage.make_storage(model.kv, self._numerics), _nothing_drawn(model.layout)
        placed: tuple[storage.Leaves, LastDrawn] = jax.device_put(made, self._device)
        return placed

    def _model(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError("load() comes before this")
        return self._loaded

    def _started(self) -> Running:
        if self._running is None:
            raise RuntimeError("start() comes before this")
        return self._running


def _numerics(device: jax.Device, dtype: str, deterministic: bool, level: Level | None) -> Numerics:
    facts = device_facts(device)
    kind = compute_dtype(dtype, facts.platform)
    chosen: Level = "R2" if facts.platform == "cpu" else "R1" if deterministic else "R0"
    hopper = facts.sms if facts.capability == "9.0" and kind == "bfloat16" else 0
    return Numerics(facts.platform, kind, level or chosen, hopper)


def _caps(numerics: Numerics, device: jax.Device) -> BackendCaps:
    return BackendCaps(
        level=numerics.level,
        platform=numerics.platform,
        device=device_facts(device).name,
        dtype=numerics.dtype,
        page_sizes=(64, 128) if numerics.platform == "cuda" else (64, 128, 32, 16),
        run_ahead=True,
        mixed_steps=numerics.level != "R1",
        prefill_widths=TOKENS if numerics.level == "R0" else (),
        r1_rows=R1_ROWS,
        r1_tokens=R1_TOKENS,
        compiled=True,
    )


def _nothing_drawn(layout: KVLayout) -> LastDrawn:
    """A place for each slot and one for rows without; rounded up, so that engines of like sizes share their draws."""
    size = -(-layout.slots // TILE) * TILE + 1
    return LastDrawn(jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.float32))
