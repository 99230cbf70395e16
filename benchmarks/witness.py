"""Engines whose every draw is seen with its logits, on any backend, by the backend's own contract alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from random_engines import Bench, GreedySampler

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.sampling import Carry, Drawn


class WitnessSampler(GreedySampler):
    """The chain of greedy rows, which gives all V logits of each draw back as its listed log-probabilities."""

    def pack(self, *rows: Any, **how: Any) -> SamplingArrays:
        return attrs.evolve(super().pack(*rows, **how), unread=frozenset())

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        return super().draw(xp, logits, sampling, carry)._replace(top_logprobs=logits)


class Witness:
    """A backend, and in `kept` what it drew from: logits float32 [V] by (sequence id, position of the drawn token)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.kept: dict[tuple[int, int], np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, plan: Any) -> Any:
        return plan, self._backend.submit(plan)

    def read(self, handle: Any) -> Any:
        plan, own = handle
        result = self._backend.read(own)
        for place, row in enumerate(plan.draw_rows):
            self.kept[int(plan.sequence_ids[row]), int(plan.seq_lens[row])] = result.top_logprobs[place].copy()
        return attrs.evolve(result, top_logprobs=None)


@attrs.frozen
class Seen:
    """What a row drew, and from what: logits float32 [drawn, V]."""

    ids: tuple[int, ...]
    logits: np.ndarray


def seen(bench: Bench, row: int) -> Seen:
    """Of a row of an engine over a Witness, which is closed."""
    kept = bench.backend.kept
    positions = sorted(position for sequence, position in kept if sequence == row)
    logits = np.stack([kept.pop((row, position)) for position in positions])
    ids = tuple(bench.engine.view(row).output)
    bench.engine.close(row)
    return Seen(ids, logits)


def alone(bench: Bench, ids: Sequence[int] | np.ndarray, steps: int, *, chunk: int | None = None) -> Seen:
    """A lone row: its first token and `steps` more."""
    row = bench.begin(ids, chunk=chunk)
    if steps:
        bench.decode([row], steps)
    return seen(bench, row)


def difference(one: Seen, other: Seen) -> str:
    """ "" for the same ids and the same bits, else where they part."""
    if one.ids != other.ids:
        step = next(n for n, (a, b) in enumerate(zip(one.ids, other.ids, strict=True)) if a != b)
        return f"ids differ from step {step} on"
    unequal = one.logits.view(np.int32) != other.logits.view(np.int32)
    if not unequal.any():
        return ""
    step, place = np.argwhere(unequal)[0]
    a, b = float(one.logits[step, place]), float(other.logits[step, place])
    return f"{int(unequal.sum())} logits differ, first at step {step}: id {place}, {a!r} and {b!r}"
