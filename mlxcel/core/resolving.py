"""What a step that was read makes of its rows: steps 3 to 9 of spec 1.3."""

from __future__ import annotations

import logging

from mlxcel.core.finish import Finish
from mlxcel.core.plan import Part, Piece, RowOutcome, StepResult
from mlxcel.core.rows import Rows
from mlxcel.core.sampling import Sampler
from mlxcel.core.sequence import Sequence, SequenceState
from mlxcel.core.step import Step, part_scores, score_status
from mlxcel.errors import MlxcelError, NoTokenAllowed, NumericFault, RowFault

log = logging.getLogger("mlxcel.engine")

_PREFILLING = SequenceState.PREFILLING  # members are slow to look up, and each token asks


class Resolving:
    """The one place where a token that was read becomes part of its row. A fault here is its row's alone."""

    def __init__(self, rows: Rows, sampler: Sampler, finish: Finish) -> None:
        self._rows, self._sampler, self._finish = rows, sampler, finish

    def all(self, step: Step, result: StepResult) -> list[RowOutcome]:
        """One outcome a part. `result` was checked."""
        words, tokens = result.status.tolist(), result.tokens.tolist()  # Python's own: 128 of NumPy's cost more
        observed = None if result.observed is None else result.observed.tolist()
        outcomes = []
        place = 0
        for row, part, length, draw in zip(step.rows, step.ticket.parts, step.lengths, step.drawing, strict=True):
            if row.ended:
                outcome = self.drop(row)
            elif not draw:
                outcome = self._undrawn(row, part, length, result)
            elif words[place]:
                where = result.spoilt_words(place)
                outcome = self._fault(row, words[place], row.stored + length, where)
            else:
                self._stored(row, part, length, unfed=0)
                outcome = self._drawn(row, tokens[place], observed, result, place)
            outcomes.append(outcome)
            place += draw
        return outcomes

    def drop(self, row: Sequence) -> RowOutcome:
        """A result that must not count: of a row that ended with this step in flight, whose position is taken back, or
        of a step that was lost."""
        row.rewindable = 0  # the older copy of recurrent state was written to
        if row.state is SequenceState.FINISHED and row.in_flight == 0 and (short := self._rows.trim(row)) is not None:
            return self._rows.fail(row, short)
        return RowOutcome(row.id)

    def _undrawn(self, row: Sequence, part: Part, length: int, result: StepResult) -> RowOutcome:
        status, position, where = score_status(part, result)
        if status:
            return self._fault(row, status, position, where)
        self._stored(row, part, length, unfed=1)
        return RowOutcome(row.id, scores=part_scores(part, result))

    def _fault(self, row: Sequence, status: int, position: int, where: str) -> RowOutcome:
        kind = NumericFault if status & 0xFF == 1 else NoTokenAllowed
        words = self._sampler.fault(row.sampler_state, status)
        return self._rows.fail(row, kind(f"sequence {row.id}: {words} at position {position}{where}"))

    def _stored(self, row: Sequence, part: Part, length: int, *, unfed: int) -> None:
        """The positions of a part are valid. A row decodes from now on whose tokens are all stored, but for the newest
        `unfed`."""
        if isinstance(part, Piece) and row.prefilled == row.stored:
            row.prefilled += length
        row.stored += length
        row.steps += 1
        row.rewindable = length
        if row.state is _PREFILLING and row.stored >= row.prompt_length and row.length - unfed <= row.stored:
            row.state = SequenceState.DECODING
            self._finish.resume(row.finish_state)

    def _drawn(
        self, row: Sequence, token: int, observed: list[float] | None, result: StepResult, place: int
    ) -> RowOutcome:
        try:
            logprobs = None
            if result.logprobs is not None and (count := row.spec.params.logprobs) is not None:
                logprobs = result.token_logprobs(place, count, linear=row.spec.params.post_sampling_probs)
            resolution = self._finish.resolve(row.finish_state, token)
            if resolution.appended:
                if not row.runs:  # else nothing is made of it
                    self._sampler.commit(row.sampler_state, token, None if observed is None else observed[place])
                row.output.append(token)
            if resolution.ending is not None:
                row.state, row.ending = SequenceState.FINISHED, resolution.ending
        except Exception as error:
            log.warning("sequence %d failed behind the forward", row.id, exc_info=error)
            fault = error if isinstance(error, MlxcelError) else RowFault(f"sequence {row.id}: {error!r}")
            return self._rows.fail(row, fault)
        released, ending = resolution.released, resolution.ending
        text, reasoning = released.text, released.reasoning
        if ending is None:
            return RowOutcome(row.id, token, resolution.appended, text, reasoning, None, None, None, logprobs)
        if row.in_flight == 0 and (short := self._rows.trim(row)) is not None:
            return self._rows.fail(row, short, released)
        cause, detail = ending.cause, ending.detail
        return RowOutcome(row.id, token, resolution.appended, text, reasoning, cause, detail, None, logprobs)
