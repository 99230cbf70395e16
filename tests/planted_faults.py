"""Engines with one mistake each, as plugins of a distribution of their own: what `engine-parity` must see."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from plugin_doubles import HEADER

from mlxcel.core.plan import Span, StepPlan, StepResult
from mlxcel.errors import UsageError
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.scripted import ScriptedBackend
from mlxcel_reference_numpy.backend import NumpyBackend

SCRIPT = tuple(range(40, 240))
"""Ids that a scripted reply draws, one after the other."""

PENALTIES = ("repetition", "frequency", "window_frequency")
"""Stages by the names that the chain has for them."""

PLANT = 7
"""The step at which a scripted reply goes another way."""


class WrongPage(NumpyBackend):
    """On pages of a lone row, the second entry of its table stands in the place of the first while it decodes."""

    lone_pages = False

    def start(self, layout: Any, sampler: Any) -> None:
        self.lone_pages = layout.paged and layout.slots == 1
        super().start(layout, sampler)

    def submit(self, plan: StepPlan) -> StepResult:
        if self.lone_pages and not plan.pieces[0] and plan.page_tables.shape[1] > 2:
            tables = plan.page_tables.copy()
            tables[:, 0] = tables[:, 1]
            plan = attrs.evolve(plan, page_tables=tables)
        return super().submit(plan)


class StaleEntry(NumpyBackend):
    """What a row adopts is not what its ids say: the first page of it is empty."""

    def start(self, layout: Any, sampler: Any) -> None:
        self.seen: set[int] = set()
        super().start(layout, sampler)

    def submit(self, plan: StepPlan) -> StepResult:
        for row, sequence in enumerate(plan.sequence_ids.tolist()):
            if sequence not in self.seen and plan.positions[plan.query_start[row]] > 0:
                first = plan.page_tables[row, :1].tolist()
                self.import_pages(first, [np.zeros_like(array) for array in self.export_pages(first)])
            self.seen.add(sequence)
        return super().submit(plan)


class OffByOne(NumpyBackend):
    """A piece that begins at position 32 is computed as if it began at 31."""

    def submit(self, plan: StepPlan) -> StepResult:
        positions = plan.positions.copy()
        for row in np.flatnonzero(plan.pieces):
            first, end = plan.query_start[row : row + 2]
            if positions[first] == 32:
                positions[first:end] -= 1
        return super().submit(attrs.evolve(plan, positions=positions))


class Lost(NumpyBackend):
    """Fails at the sixth step of a lone row on pages."""

    def start(self, layout: Any, sampler: Any) -> None:
        self.left = 6 if layout.paged and layout.slots == 1 else -1
        super().start(layout, sampler)

    def submit(self, plan: StepPlan) -> StepResult:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the device fell off the bus")
        return super().submit(plan)


class Pageless(NumpyBackend):
    """Knows big pages alone."""

    def start(self, layout: Any, sampler: Any) -> None:
        if layout.paged:
            raise UsageError("this backend has no pages", hint="take --kv-storage dense")
        super().start(layout, sampler)


class Broken(NumpyBackend):
    """Fails at every step."""

    def submit(self, plan: StepPlan) -> StepResult:
        raise RuntimeError("the device fell off the bus")


class Interrupted(NumpyBackend):
    """Somebody presses Ctrl-C at the first step."""

    def submit(self, plan: StepPlan) -> StepResult:
        raise KeyboardInterrupt


class Lonely(NumpyBackend):
    """Takes no row but that of the request under test."""

    def open(self, slot: int, spec: Any) -> None:
        if spec.request_id == "beside":
            raise RuntimeError("no room beside")


class Script(ScriptedBackend):
    """Every reply is the script; that of a scheduler, whose requests here have a salt, leaves it at PLANT."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(self._ids)

    def _ids(self, spec: Any) -> tuple[int, ...]:
        other = spec.cache_salt is not None
        return (*SCRIPT[:PLANT], SCRIPT[PLANT] + other, *SCRIPT[PLANT + 1 :])


class SkippedPenalty(ChainSampler):
    """Rows behind the first of a step draw without their penalties."""

    def pack(self, states: Any, positions: Any, pending: Any, *, closed: bool = False) -> Any:
        forgetful = list(states[:1])
        for state in states[1:]:
            kept = {name: value for name, value in state.prepared.items() if name not in PENALTIES}
            forgetful.append(attrs.evolve(state, prepared=kept))
        return super().pack(forgetful, positions, pending, closed=closed)


class OddPlanner(ChunkedPlanner):
    """The first piece has 5 tokens, whatever the chunk."""

    def build(self, ids: Any, adopted: int = 0, **more: Any) -> Any:
        plan = super().build(ids, adopted, **more)
        first = plan.pieces[0]
        if first.length <= 5:
            return plan
        middle = first.start + 5
        cut = (Span(first.start, middle, 5), Span(middle, first.end, first.end - middle))
        return attrs.evolve(plan, pieces=(*cut, *plan.pieces[1:]))


def probe(device: str) -> Any:
    from mlxcel.core.backend import Probe

    return Probe(available=device in ("auto", "cpu"), reason="planted", devices=("cpu",), by_name_only=True)


BACKENDS = {
    "wrong-page": "WrongPage",
    "stale-entry": "StaleEntry",
    "off-by-one": "OffByOne",
    "lost": "Lost",
    "broken": "Broken",
    "pageless": "Pageless",
    "interrupted": "Interrupted",
    "lonely": "Lonely",
    "script": "Script",
}

PLUGIN = f"""{HEADER}
@hookimpl
def mlxcel_backends():
    return [
        BackendSpec(name, "", f"planted_faults:{{kind}}", priority=-1, probe_target="planted_faults:probe")
        for name, kind in {BACKENDS!r}.items()
    ]

@hookimpl
def mlxcel_samplers():
    return [Named("skipped-penalty", "", "planted_faults:SkippedPenalty")]

@hookimpl
def mlxcel_prefill_planners():
    return [Named("odd", "", "planted_faults:OddPlanner")]
"""
