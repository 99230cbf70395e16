"""A step between submit and collect, and what its result must look like."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from mlxcel.core.parts import scoring
from mlxcel.core.plan import Part, Piece, RowOutcome, Scores, Scoring, StepResult, Ticket
from mlxcel.core.sequence import Sequence, SequenceState
from mlxcel.errors import BackendFault


@attrs.define
class Step:
    """A submitted step until it is collected."""

    ticket: Ticket
    handle: Any  # the backend's own, or the BackendFault that kept it from starting
    rows: tuple[Sequence, ...]
    lengths: tuple[int, ...]  # tokens of each part
    drawing: tuple[bool, ...]
    run: int  # number of the first ticket of what it was submitted with
    followed: list[Sequence] = attrs.field(factory=list)  # rows of a step started behind it, or interrupted in that
    lost: bool = False  # an older step took its KV or its input away: nothing of it may be believed

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def scoring(self) -> Scoring | None:
        """What its part scores, which then is the only one."""
        return scoring(self.ticket.parts[0])

    @property
    def logits_rows(self) -> int:
        """R: draws, or positions that are scored."""
        return sum(self.drawing) if self.scoring is None else len(self.scoring.positions)

    def begin(self) -> None:
        """It is in flight: its rows know of it."""
        for row, part, length, draw in zip(self.rows, self.ticket.parts, self.lengths, self.drawing, strict=True):
            row.in_flight += 1
            row.ahead += 1
            row.fed += length
            row.drawing += draw
            end = row.stored + row.fed
            if end > row.written:
                row.written = end
            if isinstance(part, Piece):
                row.state = SequenceState.PREFILLING

    def end(self) -> None:
        """It is in flight no more."""
        for row in self.rows:
            row.in_flight -= 1
        if not self.lost:
            self._take_back()

    def lose(self) -> None:
        """Its rows are where they were before it; its result will be dropped."""
        if not self.lost:
            self.lost = True
            self._take_back()

    def _take_back(self) -> None:
        for row, length, draw in zip(self.rows, self.lengths, self.drawing, strict=True):
            row.ahead -= 1
            row.fed -= length
            row.drawing -= draw


def as_fault(error: Exception) -> BackendFault:
    """What a step that raised `error` ends with."""
    return error if isinstance(error, BackendFault) else BackendFault(repr(error))


def check_result(result: StepResult, step: Step, *, vocab: int) -> None:
    """BackendFault unless there is one id and one status word for each of R, every id in [0, `vocab`), and every score
    that was asked for."""
    rows = step.logits_rows
    for name, array in (("ids", result.tokens), ("status words", result.status)):
        if array.shape != (rows,):
            raise BackendFault(f"the step returned {name} of shape {array.shape}, {rows} are asked for")
    words, fine = result.status.tolist(), result.tokens.tolist()
    if any(words):
        fine = [token for token, word in zip(fine, words, strict=True) if not word]
    if fine and not (min(fine) >= 0 and max(fine) < vocab):
        raise BackendFault(f"the step returned a token outside the vocabulary of {vocab}")
    if step.scoring is not None:
        top = step.scoring.top
        listed = 0 if result.top_ids is None else result.top_ids.shape[-1]
        if result.logprobs is None or result.logprobs.shape != (rows,) or listed < top:
            raise BackendFault(f"the step scored no {rows} positions with the {top} best ids of each")


def score_status(part: Part, result: StepResult) -> tuple[int, int, str]:
    """The status word of a part that draws nothing, the position whose token its logits were for, and where they were
    spoilt: of positions that are scored the first that failed counts; a part without logits has status 0."""
    if (asked := scoring(part)) is not None and (failed := np.flatnonzero(result.status)).size:
        place = int(failed[0])
        return int(result.status[place]), asked.positions[place] + 1, result.spoilt_words(place)
    return 0, 0, ""


def part_scores(part: Part, result: StepResult) -> Scores | None:
    """What a part that scores found; None for any other. `result` was checked."""
    asked = scoring(part)
    if asked is None or result.logprobs is None:
        return None
    if not asked.top or result.top_ids is None or result.top_logprobs is None:
        count = len(result.logprobs)
        return Scores(result.logprobs, np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32))
    # The step may list more than was asked for, and lists all of V by their ids.
    order = np.argsort(-result.top_logprobs, axis=-1, kind="stable")[:, : asked.top]
    return Scores(
        result.logprobs,
        np.take_along_axis(result.top_ids, order, axis=-1),
        np.take_along_axis(result.top_logprobs, order, axis=-1),
    )


def last_outcome(row: Sequence) -> RowOutcome:
    """How a row ended, for whoever asks again."""
    if row.error is not None:
        return RowOutcome(row.id, error=row.error)
    ending = row.ending
    return RowOutcome(row.id, cause=ending.cause if ending else None, detail=ending.detail if ending else None)
