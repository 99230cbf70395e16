"""The steps that a row has before it, packed before their time: a backend that compiles can make what they need."""

from __future__ import annotations

import logging

import attrs
import numpy as np

from mlxcel.core.backend import PreparesSteps
from mlxcel.core.engine_parts import EngineParts
from mlxcel.core.packing import pack_behind, pack_step
from mlxcel.core.parts import longest_run, part_length
from mlxcel.core.plan import Decode, Part, Piece, PrefillPlan, StepPlan
from mlxcel.core.sequence import Sequence
from mlxcel.core.source import Progress

log = logging.getLogger("mlxcel.engine")


def prepare_steps(parts: EngineParts, row: Sequence, plan: PrefillPlan, progress: Progress, *, ahead: bool) -> None:
    """As `Engine.prepare`. What fails is not told of: it fails again in the step that needs it, which tells."""
    backend = parts.backend
    if row.ended or not isinstance(backend, PreparesSteps):
        return
    try:
        backend.prepare_steps(coming_steps(parts, row, plan, ahead=ahead), progress)
    except Exception as error:
        log.debug("steps of sequence %d could not be prepared", row.id, exc_info=error)
        progress.finish()


def coming_steps(parts: EngineParts, row: Sequence, plan: PrefillPlan, *, ahead: bool) -> list[list[StepPlan]]:
    """The plans of each call of the backend that a row, seated and alone, will come to: every piece of `plan` from what
    is stored on, one decode, and with `ahead` one run, where its budget has them.

    They are what will be submitted but for what nobody knows yet: tokens that are drawn, and what the sampler learns of
    them. Every page is page 0, and none is reserved.
    """
    first = plan.piece_at(row.stored)
    found = []
    for index in range(first, len(plan.pieces)):
        at = attrs.evolve(row, stored=plan.pieces[index].start, steps=row.steps + index - first)
        draws = plan.draw and plan.is_terminal(index)
        found.append([_packed(parts, at, Piece(row.id, plan, index), draws=draws)])
    steps, decode = row.steps + len(plan.pieces) - first, Decode(row.id)
    if plan.draw and row.max_new > 1:
        # Where the sampler cannot go on without the token in flight, it is asked for the draw that it knows.
        unread = int(parts.sampler.closed(row.sampler_state))
        found.append([_packed(parts, attrs.evolve(row, stored=row.length, steps=steps, drawing=unread), decode)])
        # A run is started ahead at the earliest: behind the first token, with a decode in flight.
        behind = attrs.evolve(row, stored=row.length + 1, steps=steps + 1, drawing=2)
        longest = longest_run([behind], parts.backend.caps, parts.kv_spec) if ahead else 1
        if longest > 1:
            begins = _packed(parts, behind, decode)
            rest = pack_behind(begins, [behind], longest, sampler=parts.sampler, closed=parts.backend.caps.compiled)
            found.append([begins, *rest])
    return found


def _packed(parts: EngineParts, row: Sequence, part: Part, *, draws: bool = True) -> StepPlan:
    kv, length = parts.kv, part_length(part)
    pages = np.zeros(-(-(row.stored + length) // kv.page_size), np.int32)
    any_pages = _AnyPages(kv.name, kv.page_size, kv.num_pages, pages)
    closed = parts.backend.caps.compiled
    return pack_step([row], [part], [length], [draws], [], kv=any_pages, sampler=parts.sampler, closed=closed)


@attrs.frozen(eq=False)
class _AnyPages:
    """In the place of a KV store: a table that is no row's."""

    name: str
    page_size: int
    num_pages: int
    pages: np.ndarray

    def page_table(self, sequence_id: int) -> np.ndarray:
        return self.pages
