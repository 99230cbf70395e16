"""What a watched or timed persistent step notes about itself: where its blocks are, and when they were where."""

from __future__ import annotations

from typing import Any

import attrs
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from mlxcel_jax_cuda.kernels.mosaic import plgpu

PHASES = ("qkv", "attention", "o", "gate_up", "down")

MOMENTS = ("waits", "results seen", "tokens here", "products done", "parts seen", "over")
"""Of a phase, in the compute warpgroup."""

EVENTS = (
    *(f"{phase}: {moment}" for phase in PHASES for moment in MOMENTS),
    *(f"{phase}: asked for" for phase in PHASES if phase != "attention"),  # by the memory warpgroup, all of it
)

PATIENCE = 100_000
"""Looks of a watched step before it gives a wait up: about a tenth of a second."""

_NOTE = """{
.reg .pred first;
.reg .u32 thread, time, clock;
mov.u32 thread, %tid.x;
and.b32 thread, thread, 127;
setp.eq.u32 first, thread, 0;
mov.u32 time, %globaltimer_lo;
mov.u32 clock, %clock;
@first st.global.v2.u32 [$0], {time, clock};
}"""


@attrs.frozen
class Watch:
    """Where a block is, in device memory. `None` where the step has no such record."""

    block: Any
    places: Any | None  # [2, blocks] int32: the phase begun last; 1 + the one in which a wait was first given up, or 0
    times: Any | None  # [L, EVENTS, blocks, 2] int32: nanoseconds, and clocks of the multiprocessor, low 32 bits

    def begin(self) -> None:
        if self.places is not None:
            self.places[1, self.block] = jnp.int32(0)

    def phase(self, layer: Any, phase: int) -> None:
        if self.places is not None:
            self.places[0, self.block] = layer * len(PHASES) + phase

    def given_up(self) -> None:
        places = self.places
        if places is not None:

            @pl.when(places[1, self.block] == 0)
            def _first() -> None:
                places[1, self.block] = places[0, self.block] + 1

    def moment(self, layer: Any, phase: str, moment: str) -> None:
        self._time(layer, PHASES.index(phase) * len(MOMENTS) + MOMENTS.index(moment))

    def asked(self, layer: Any, which: Any) -> None:
        """All weights of a phase: qkv, o, gate_up, down are 0 to 3."""
        self._time(layer, len(PHASES) * len(MOMENTS) + which)

    def _time(self, layer: Any, event: Any) -> None:
        if self.times is None:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[untyped-decorator]
        def note(_context: Any, where: Any) -> None:
            pointer = mosaic_utils.memref_ptr(where)  # type: ignore[no-untyped-call]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), [pointer], _NOTE, "l", has_side_effects=True)

        note(self.times.at[layer, event, self.block])
