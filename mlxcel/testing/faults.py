"""Faults on purpose (spec 1.5): a list of what goes wrong at which call, honoured by wrappers around the real parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import numpy as np

from mlxcel.core.backend import Backend
from mlxcel.core.finish import Finish
from mlxcel.core.kv import KVStore
from mlxcel.core.observe import Observer
from mlxcel.core.plan import StepPlan, StepReport, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Sampler
from mlxcel.errors import BackendFault, CapacityError
from mlxcel.plugins.finish.reply_text import TextStream
from mlxcel.testing.clock import ManualClock

Point = Literal[
    "submit",
    "read",
    "status",
    "reserve",
    "trim",
    "open.kv",
    "open.backend",
    "open.sampler",
    "open.finish",
    "detokenise",
    "observer",
    "clock",
    "slow",
]
Effect = Literal["raise", "lose_kv", "short", "out_of_range", "nan"]


@attrs.frozen
class Fault:
    """The `nth` call (1 = the first) of a point goes wrong.

    Effects: "raise" everywhere. `read` knows "lose_kv" (raises, KV gone), "short" (a vector one too short) and
    "out_of_range" (an id of V). `status` always means NaN, for the drawing rows in `rows`, or all. `trim` always keeps
    one position too few. `clock` and `slow` advance the clock by `seconds` when a step is read.
    """

    point: Point
    nth: int
    effect: Effect = "raise"
    rows: tuple[int, ...] | None = None
    seconds: float = 0.0


class InjectedFault(Exception):
    """What an injected "raise" raises: no class that the engine could know."""


class FaultPlan:
    """Counts the calls of each point and says which of them go wrong."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self.calls: Counter[str] = Counter()
        self.clock = ManualClock()

    def due(self, point: Point) -> Fault | None:
        """Count one call of `point`; the fault it meets, or None."""
        self.calls[point] += 1
        for fault in self._faults:
            if fault.point == point and fault.nth == self.calls[point]:
                return fault
        return None

    def check(self, point: Point) -> None:
        """Count one call of `point`, and raise when it is to fail."""
        if self.due(point) is not None:
            raise InjectedFault(f"injected at {point}, call {self.calls[point]}")

    def backend(self, backend: Backend) -> Backend:
        return _FaultyBackend(backend, self)

    def kv(self, kv: KVStore) -> KVStore:
        return _FaultyKV(kv, self)

    def sampler(self, sampler: Sampler) -> Sampler:
        return _FaultySampler(sampler, self)

    def finish(self, finish: Finish) -> Finish:
        return _FaultyFinish(finish, self)

    def stream(self, factory: Callable[[SequenceSpec], TextStream]) -> Callable[[SequenceSpec], TextStream]:
        return lambda spec: _FaultyStream(factory(spec), self)

    def observers(self, observers: Sequence[Observer]) -> tuple[Observer, ...]:
        return tuple(_FaultyObserver(observer, self) for observer in observers)


class _Wrapper:
    """Passes on whatever it does not change."""

    def __init__(self, inner: Any, faults: FaultPlan) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FaultyBackend(_Wrapper):
    def open(self, slot: int, spec: SequenceSpec) -> None:
        self._faults.check("open.backend")
        self._inner.open(slot, spec)

    def submit(self, plan: StepPlan) -> Any:
        self._faults.check("submit")
        return self._inner.submit(plan)

    def submit_run(self, plans: Sequence[StepPlan]) -> list[Any]:
        self._faults.check("submit")
        handles: list[Any] = self._inner.submit_run(plans)
        return handles

    def read(self, handle: Any) -> StepResult:
        result: StepResult = self._inner.read(handle)
        for point in ("clock", "slow"):
            if (jump := self._faults.due(point)) is not None:
                self._faults.clock.advance(jump.seconds)
        if (fault := self._faults.due("read")) is not None:
            if fault.effect == "lose_kv":
                raise BackendFault("injected: the KV is gone", kv_intact=False)
            if fault.effect == "short":
                return attrs.evolve(result, tokens=result.tokens[:-1])
            if fault.effect == "out_of_range":
                return attrs.evolve(result, tokens=np.full_like(result.tokens, 2**31 - 1))
            raise InjectedFault("injected at read")
        if (fault := self._faults.due("status")) is not None:
            rows = slice(None) if fault.rows is None else list(fault.rows)
            status, tokens = result.status.copy(), result.tokens.copy()
            status[rows], tokens[rows] = 1, -1
            return attrs.evolve(result, status=status, tokens=tokens)
        return result


class _FaultyKV(_Wrapper):
    def open(self, sequence_id: int, capacity: int) -> None:
        self._faults.check("open.kv")
        self._inner.open(sequence_id, capacity)

    def reserve(self, wants: Sequence[tuple[int, int]]) -> None:
        if self._faults.due("reserve") is not None:
            self._inner.reserve([])
            raise CapacityError("injected: no page is free")
        self._inner.reserve(wants)

    def trim(self, sequence_id: int, length: int) -> int:
        short = self._faults.due("trim") is not None
        kept: int = self._inner.trim(sequence_id, max(0, length - 1) if short else length)
        return kept


class _FaultySampler(_Wrapper):
    def open(self, spec: SequenceSpec) -> Any:
        self._faults.check("open.sampler")
        return self._inner.open(spec)


class _FaultyFinish(_Wrapper):
    def open(self, spec: SequenceSpec, *, max_new: int, context: int) -> Any:
        self._faults.check("open.finish")
        return self._inner.open(spec, max_new=max_new, context=context)


class _FaultyStream(_Wrapper):
    def push(self, token_id: int) -> str:
        self._faults.check("detokenise")
        text: str = self._inner.push(token_id)
        return text

    def flush(self) -> str:
        text: str = self._inner.flush()
        return text


class _FaultyObserver(_Wrapper):
    def step_finished(self, report: StepReport) -> None:
        self._faults.check("observer")
        self._inner.step_finished(report)

    def request_finished(self, result: Any) -> None:
        self._faults.check("observer")
        self._inner.request_finished(result)
