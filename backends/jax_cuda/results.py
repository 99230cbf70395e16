"""What the host reads of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import numpy as np

from mlxcel.core.plan import FINITE, StepPlan, StepResult
from mlxcel_jax_cuda.drawing import Found
from mlxcel_jax_cuda.launch import Launch

_NOT_A_NUMBER = 1
"""The kind of a status word, in its low byte."""


@attrs.frozen(eq=False)
class Drawn:
    """A launch whose draw is under way, and whose results are on their way to the host."""

    launch: Launch
    found: Found
    seen: jax.Array | None = None  # int32 [S], where layers are watched
    step: int | None = None  # of a run, whose words `found` then has: int32 [steps, 2, R]

    @classmethod
    def of(cls, launch: Launch, found: Found, unread: frozenset[str], seen: jax.Array | None) -> Drawn:
        """`unread` names what nobody wants to read of `found`."""
        left_out: dict[str, Any] = dict.fromkeys(unread.intersection(found._fields))
        wanted = found._replace(**left_out)
        for array in (*wanted, seen):
            if array is not None:
                array.copy_to_host_async()
        return cls(launch, wanted, seen)

    @classmethod
    def of_run(cls, launch: Launch, words: jax.Array, steps: int) -> list[Drawn]:
        """Of each step of a run of a launch; its words are read once."""
        words.copy_to_host_async()
        found = Found(words, None, None, None, None)
        return [cls(launch, found, step=step) for step in range(steps)]

    def words(self) -> np.ndarray:
        """int32 [2, R]: waits for them."""
        words = np.asarray(self.found.words)
        return words if self.step is None else words[self.step]

    def columns(self) -> Iterator[tuple[str, np.ndarray]]:
        """What StepResult has beside ids and status words, of each of the R of the launch."""
        for name in ("logprobs", "top_ids", "top_logprobs", "observed"):
            array = getattr(self.found, name)
            if array is not None:
                yield name, np.asarray(array)
        if self.seen is not None:
            shape, layers = self.launch.shape, np.asarray(self.seen)
            yield "spoilt", layers if shape.width == 1 else np.repeat(layers, shape.logits)


@attrs.frozen(eq=False)
class Submitted:
    plan: StepPlan
    drawn: tuple[Drawn, ...]
    routes: dict[str, int]
    logits: jax.Array | None  # what there is to wait for where nothing is drawn: the KV is the next step's

    def result(self) -> StepResult:
        """Waits for it. Rows in the order of the plan, whatever launches they came from."""
        R = len(self.plan.logits_rows)
        words = np.zeros((2, R), np.int32)
        columns: dict[str, np.ndarray] = {}
        for drawn in self.drawn:
            to, own = drawn.launch.draws, drawn.launch.logits
            words[:, to] = drawn.words()[:, own]
            for name, array in drawn.columns():
                if name not in columns:
                    columns[name] = np.full((R, *array.shape[1:]), FINITE if name == "spoilt" else 0, array.dtype)
                columns[name][to] = array[own]
        return StepResult(words[0], words[1], **columns, routes=self.routes)

    def rows_not_finite(self, result: StepResult) -> list[int]:
        """Among the S of the plan, those of which logits were not finite."""
        if not result.status.any():
            return []
        return sorted({int(row) for row in self.plan.draw_rows[result.status & 0xFF == _NOT_A_NUMBER]})
