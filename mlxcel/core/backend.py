"""What a backend offers. It alone holds device arrays; the engine hands it plain records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    """Whether a backend can run here, and why; `devices` names what it would run on, best first."""

    available: bool
    reason: str
    devices: tuple[str, ...] = ()


@attrs.frozen
class BackendSpec(Named):
    """A backend by name. `load()` gives its class, called with `device`, `dtype` and `deterministic` by keyword.

    `probe_target` is a lazy "module:function" `() -> Probe` that imports nothing heavy. Without `--backend` the
    available one of highest priority is taken.
    """

    priority: int = attrs.field(kw_only=True)
    probe_target: str = attrs.field(kw_only=True)

    def probe(self) -> Probe:
        found: Probe = load_target(self.probe_target)()
        return found


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
    r1_tokens: int = 0  # the one width of a piece at R1

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

    def load(self, family: ModelFamily, config: Any, checkpoint: Checkpoint, progress: Progress) -> None:
        """Read every weight of the family's schema, once. CheckpointError names what is missing or of another shape."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        ...

    def start(self, layout: KVLayout, sampler: Sampler) -> None:
        """Make the KV arrays, zeroed, and fix the sampler that `submit` runs. Called once, after `load`."""
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
