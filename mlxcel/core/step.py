"""A step between submit and collect, and what its result must look like."""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.parts import part_length
from mlxcel.core.plan import StepResult, Ticket
from mlxcel.core.sequence import Sequence
from mlxcel.errors import BackendFault


@attrs.define
class Step:
    """A submitted step until it is collected."""

    ticket: Ticket
    handle: Any  # the backend's own, or the BackendFault that kept it from starting
    rows: tuple[Sequence, ...]
    drawing: tuple[bool, ...]
    followed: list[Sequence] = attrs.field(factory=list)  # rows of a step started behind it, or interrupted in that
    lost: bool = False  # an older step took its KV or its input away: nothing of it may be believed

    @property
    def tokens(self) -> int:
        """T."""
        return sum(part_length(part) for part in self.ticket.parts)

    def count(self, sign: int) -> None:
        """Add to the numbers of its rows what this step feeds and draws (1), or take it back (-1)."""
        for row, part, draw in zip(self.rows, self.ticket.parts, self.drawing, strict=True):
            row.fed += sign * part_length(part)
            row.drawing += sign * draw
            row.ahead += sign

    def lose(self) -> None:
        """Its rows are where they were before it; its result will be dropped."""
        if not self.lost:
            self.lost = True
            self.count(-1)


def as_fault(error: Exception) -> BackendFault:
    """What a step that raised `error` ends with."""
    return error if isinstance(error, BackendFault) else BackendFault(repr(error))


def check_result(result: StepResult, *, rows: int, vocab: int) -> None:
    """BackendFault unless there is one id and one status word for each of `rows`, every id in [0, `vocab`)."""
    for name, array in (("ids", result.tokens), ("status words", result.status)):
        if array.shape != (rows,):
            raise BackendFault(f"the step returned {name} of shape {array.shape}, {rows} rows draw")
    fine = result.tokens[result.status == 0]
    if fine.size and (int(fine.min()) < 0 or int(fine.max()) >= vocab):
        raise BackendFault(f"the step returned a token outside the vocabulary of {vocab}")
