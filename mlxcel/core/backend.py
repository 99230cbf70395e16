"""What a backend offers. It alone holds device arrays; the engine hands it plain records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from mlxcel.core.named import Named, load_target

if TYPE_CHECKING:  # plugins import this module to register: no numpy
    import numpy as np

    from mlxcel.core.checkpoint import Checkpoint
    from mlxcel.core.family import ModelFamily
    from mlxcel.core.kv import KVLayout
    from mlxcel.core.plan import StepPlan, StepResult
    from mlxcel.core.request import SequenceSpec
    from mlxcel.core.sampling import Sampler
    from mlxcel.core.source import Progress

Level = Literal["R0", "R1", "R2"]
"""How far the promise of row invariance holds (docs/design.md 1)."""


@attrs.frozen
class Probe:
    """Whether a backend can run here on the device that is asked for, and why.

    `devices` names what it runs on, best first, or what is there and it cannot use. `by_name_only`: it is not taken
    unless somebody names it. `hint`: what brings that which is missing.
    """

    available: bool
    reason: str
    devices: tuple[str, ...] = ()
    by_name_only: bool = False
    hint: str | None = None


@attrs.frozen
class BackendSettings:
    """What has to be settled before a backend, or a library under it, is imported."""

    device: str  # as asked for: "auto", "cpu", "cuda", "cuda:1"
    memory_share: float | None  # of the device's memory, to be taken at once; None: as it is needed
    cache_folder: Path | None  # for what a backend keeps from one run to the next; None: there is no place for it


@attrs.frozen
class BackendSpec(Named):
    """A backend by name. `load()` gives its class, called with `device`, `dtype` and `deterministic` by keyword.

    `probe_target` is a lazy "module:function" `(device: str) -> Probe` that imports nothing heavy. Without `--backend`
    the available one of highest priority is taken. `prepare_target` is one `(settings: BackendSettings) -> None` that
    is called each time before the class is imported and called; DeviceError when it is too late for these settings.
    """

    priority: int = attrs.field(kw_only=True)
    probe_target: str = attrs.field(kw_only=True)
    prepare_target: str | None = attrs.field(default=None, kw_only=True)

    def probe(self, device: str = "auto") -> Probe:
        found: Probe = load_target(self.probe_target)(device)
        return found

    def prepare(self, settings: BackendSettings) -> None:
        if self.prepare_target is not None:
            load_target(self.prepare_target)(settings)


@attrs.frozen
class DeviceMemory:
    """Memory that a device has of its own, in bytes: all of it, and what of it this process may still take."""

    total: int
    free: int


@attrs.frozen
class BackendCaps:
    """What planning may rely on."""

    level: Level
    platform: str  # "cpu", "cuda"
    device: str  # for people
    dtype: str  # compute type: "float32"
    page_sizes: tuple[int, ...]  # divisors of 128, the preferred one first
    run_ahead: bool  # a second step may be submitted before the first is read
    mixed_steps: bool  # decode rows and pieces in one step, with the bits of separate steps
    prefill_widths: tuple[int, ...] = ()  # padded widths at R0; () pads nothing
    r1_rows: int = 0  # the one width of a decode at R1; more rows are several forwards
    r1_tokens: int = 0  # the one width of a piece at R1
    decode_runs: tuple[tuple[int, int], ...] = ()  # (most rows, steps) of what one `submit_run` takes, rows ascending
    compiled: bool = False  # it compiles what it runs: steps are packed for the sampler's closed list of stage sets

    def run_steps(self, rows: int) -> int:
        """Decode steps of so many rows that one `submit_run` takes; 1: they have no runs."""
        return next((steps for most, steps in self.decode_runs if rows <= most), 1)

    def piece_width(self, length: int, level: Level) -> int:
        """Tokens that a piece of `length` is padded to (spec P3): multiples of one width at R1, the smallest width that
        holds it at R0, none at R2."""
        if level == "R1" and self.r1_tokens:
            return -(-length // self.r1_tokens) * self.r1_tokens
        if level == "R0":
            return next((width for width in self.prefill_widths if width >= length), length)
        return length


class Backend(Protocol):
    """One model on one device. Every method but `read` may raise BackendFault or an error of its own, which the engine
    turns into one; none may be called from outside the engine once it is open."""

    @property
    def caps(self) -> BackendCaps: ...

    def memory(self) -> DeviceMemory | None:
        """Of the device, asked before `load`. None where it has none of its own: then the host's counts."""
        ...

    def load(self, family: ModelFamily, config: Any, checkpoint: Checkpoint, progress: Progress) -> None:
        """Read every weight of the family's schema, once. CheckpointError names what is missing or of another shape."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        ...

    def start(self, layout: KVLayout, sampler: Sampler) -> None:
        """Make the KV arrays, zeroed, and fix the sampler that `submit` runs. Called once, after `load`; again, with a
        smaller layout, where it raised CapacityError because the device did not give their memory."""
        ...

    def open(self, slot: int, spec: SequenceSpec) -> None:
        """Prepare state that a row owns on the device."""
        ...

    def release(self, slot: int) -> None:
        """The row of this slot is gone."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Start a step: first the copies of its pages, then the forward. Returns a handle for `read`."""
        ...

    def read(self, handle: Any) -> StepResult:
        """Wait for a step. BackendFault, with `kv_intact`, when it failed."""
        ...

    def export_state(self, slot: int) -> tuple[Sequence[Any], int]:
        """A copy of the rings of a slot, behind all that was submitted, and its bytes: arrays of any kind that
        np.asarray takes. Only asked for where a layer has a window and none is recurrent."""
        ...

    def import_state(self, slot: int, state: Sequence[Any]) -> None:
        """Put such a copy, or host arrays made of one, into the rings of a slot. The copy stays as it is."""
        ...

    def export_pages(self, pages: Sequence[int]) -> list[np.ndarray]:
        """What these pages hold, on the host: arrays [pages, heads, page_size, width], keys and values of each full
        layer in turn, behind all that was submitted."""
        ...

    def import_pages(self, pages: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Put such arrays onto these pages."""
        ...

    def close(self) -> None:
        """Free device memory; harmless when called again."""
        ...


@runtime_checkable
class RunsSteps(Protocol):
    """A backend whose caps say `decode_runs`."""

    def submit_run(self, plans: Sequence[StepPlan]) -> list[Any]:
        """Start so many decode steps of the same rows, each behind the one before it, with the bits of as many calls of
        `submit`: a handle for `read` of each. Page copies are in the first plan alone. An exception is all of theirs.

        Every row draws in every step, is memoryless (`Sampler.memoryless`) and wants neither log-probabilities nor
        what its draws observed."""
        ...


@runtime_checkable
class PreparesSteps(Protocol):
    """A backend that compiles, and can do so for steps that it is told of before they are submitted."""

    def prepare_steps(self, calls: Sequence[Sequence[StepPlan]], progress: Progress) -> None:
        """Make what these calls need and is not at hand: a call of one plan will be `submit`, of more `submit_run`.
        None of them runs now, and their tokens and pages are not those that will come. What has to be compiled is the
        phase "compile" of so many programs; where nothing has to, there is none. An exception counts for nothing: a
        step makes what it still lacks, and fails where that fails."""
        ...


@attrs.frozen
class Compilations:
    """Programs that were compiled: before a backend was ready, and since."""

    warm_up: int
    service: int


@runtime_checkable
class CountsCompilations(Protocol):
    """A backend that compiles, and counts."""

    @property
    def compilations(self) -> Compilations: ...


@runtime_checkable
class WatchesNumerics(Protocol):
    """A backend that can look at what each layer gives."""

    def watch_numerics(self) -> None:
        """Called before `load`, where somebody asked for it: every step then says in `StepResult.spoilt` where the
        numbers of a row were first not finite."""
        ...


@runtime_checkable
class Remarks(Protocol):
    """A backend that has something to say about how it runs a model."""

    @property
    def remark(self) -> str | None:
        """Behind `start`: one line for whoever runs this model, None for nothing."""
        ...


@runtime_checkable
class SharesWeights(Protocol):
    """A backend whose weights another one of its class, made with the same settings, can use as well."""

    def take_weights(self, other: Any) -> None:
        """In the place of `load`: the model that `other` has loaded, which keeps it too."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """A backend that compiles. One that has this method is called once, behind `start` and before the first step."""

    def warm_up(self, progress: Progress) -> None:
        """Compile all that a step may need, as the phase "compile" of so many programs."""
        ...
