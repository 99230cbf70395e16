"""A model that runs: its weights, its KV, and what a step leaves on the device for the next."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import StepPlan
from mlxcel.core.sampling import Sampler
from mlxcel_jax_cuda import storage
from mlxcel_jax_cuda.compile_ahead import Program
from mlxcel_jax_cuda.decode_run import Run, forward_and_draw_run
from mlxcel_jax_cuda.drawing import Asked, LastDrawn, draw
from mlxcel_jax_cuda.executables import Executables
from mlxcel_jax_cuda.forward import Read, forward, forward_and_draw
from mlxcel_jax_cuda.launch import Launch, Launching
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.runs_together import Runs

UNKNOWN = -1
COPIES = 8
"""Pages that one program copies."""


def _unknown(running: Running) -> np.ndarray:
    return np.full(running.layout.slots, UNKNOWN, np.int64)


def _routes(running: Running) -> dict[str, int]:
    return dict(Counter(storage.routes(running.layout, kernel=bool(running.model.numerics.hopper))))


@attrs.define(eq=False)
class Running:
    model: Model
    sampler: Sampler
    weights: Read
    launching: Launching
    kv: storage.Leaves
    last: LastDrawn
    executables: Executables
    runs: Runs
    begun: np.ndarray = attrs.field(default=attrs.Factory(_unknown, takes_self=True))
    """[slots]: the position at which the row of a slot began to write, behind a prefix that others may hold too."""
    routes: dict[str, int] = attrs.field(default=attrs.Factory(_routes, takes_self=True))
    """Calls by attention route of one launch."""

    @property
    def layout(self) -> KVLayout:
        return self.model.layout

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """A jitted function with such arguments as the following give, by its program."""
        return self.executables.call(function, arguments)

    def for_forward(self, launch: Launch) -> tuple[Any, ...]:
        """The arguments of `forward`."""
        shape = launch.shape
        return self.model, shape, self.weights, self.kv, self.last.tokens, launch.buffer

    def for_both(self, launch: Launch, asked: Asked) -> tuple[Any, ...]:
        """The arguments of `forward_and_draw`."""
        shape, buffer = launch.shape, np.concatenate([launch.buffer, asked.buffer])
        return self.model, shape, asked.shape, self.weights, self.kv, self.last, buffer

    def for_run(self, run: Run) -> tuple[Any, ...]:
        """The arguments of `forward_and_draw_run`."""
        shape = run.launch.shape
        return self.model, shape, run.drawing, run.steps, self.weights, self.kv, self.last, run.buffer.reshape(-1)

    def for_draw(self, asked: Asked, logits: jax.Array) -> tuple[Any, ...]:
        """The arguments of `draw`."""
        return asked.shape, logits, self.last, asked.buffer

    def whole_program(self, launch: Launch, asked: Asked) -> Program:
        """Forward and draw as one."""
        return Program(f"{launch.shape.words}, {asked.shape.words}", forward_and_draw, self.for_both(launch, asked))

    def run_program(self, run: Run) -> Program:
        return Program(run.words, forward_and_draw_run, self.for_run(run))

    def forward_program(self, launch: Launch) -> Program:
        return Program(launch.shape.words, forward, self.for_forward(launch))

    def draw_program(self, asked: Asked) -> Program:
        """Behind logits that are not there yet."""
        size = (asked.shape.rows, self.model.config.vocab_size)
        logits: Any = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            size, jnp.float32, sharding=self.last.tokens.sharding
        )
        return Program(asked.shape.words, draw, self.for_draw(asked, logits))

    def for_copies(self, copies: np.ndarray) -> tuple[Any, ...]:
        """The arguments of `storage.copy_pages`. copies int32 [N, 3], N at most COPIES."""
        return self.model.kv, self.kv, storage.as_copies(copies, self.layout.pages, COPIES)

    def for_clearing(self, pages: np.ndarray, slot: np.int32) -> tuple[Any, ...]:
        """The arguments of `storage.clear_spoilt`."""
        return self.model.kv, self.kv, pages, slot

    def begin(self, launch: Launch) -> None:
        """Note where a row begins, with its first piece."""
        if launch.shape.width > 1:
            fields = launch.shape.cut(launch.buffer)
            slot = fields.slots[0]
            if self.begun[slot] == UNKNOWN:
                self.begun[slot] = fields.positions[0, 0]

    def own(self, plan: StepPlan, row: int) -> tuple[np.ndarray, np.int32]:
        """The pages that a row of a plan wrote to, int32 [P] with -1 behind the last, and its slot."""
        slot, table = plan.slots[row], plan.page_tables[row]
        first = max(int(self.begun[slot]), 0) // self.layout.page_size
        pages, _ = self.nobody
        own = table[first:][table[first:] >= 0][: len(pages)]
        pages[: len(own)] = own
        return pages, np.int32(slot)

    @property
    def no_copies(self) -> np.ndarray:
        """As in `StepPlan.page_copies`: one that copies nothing."""
        return np.full((1, 3), self.layout.pages, np.int32)

    @property
    def nobody(self) -> tuple[np.ndarray, np.int32]:
        """The same of no row."""
        return np.full(self.launching.pages, UNKNOWN, np.int32), np.int32(self.layout.slots)
