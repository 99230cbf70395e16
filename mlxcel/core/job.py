"""A request inside the scheduler, and its rows: what the engine's side of it does not know."""

from __future__ import annotations

from enum import StrEnum

import attrs
import numpy as np

from mlxcel.core.bind_params import reply_bound
from mlxcel.core.outbox import Outbox
from mlxcel.core.plan import Decode, PrefillPlan, Scores, Span, TokenLogprobs
from mlxcel.core.prefix import Reject
from mlxcel.core.request import Request, SequenceSpec

Rank = tuple[int, float, int, int]
"""Lane, virtual arrival, number of the request, choice: smaller goes first where KV is short (spec C21)."""


@attrs.define(eq=False)
class Job:
    """A request that was accepted. Times are seconds on the scheduler's clock; `virtual` is its arrival as lanes shift
    it (spec C7), `deadline` when its time is over, None: never."""

    request: Request
    outbox: Outbox
    number: int
    accepted: float
    virtual: float
    lane: int
    deadline: float | None
    truncated: int  # ids that were cut off its prompt
    rows: list[Row] = attrs.field(factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once its prompt was scored
    waits: bool = True  # it counts as one of the queue
    left: bool = False  # its client is gone, or too slow: that was noted

    @property
    def ended(self) -> bool:
        return all(row.state is RowState.ENDED for row in self.rows)


class RowState(StrEnum):
    WAITING = "waiting"  # in the queue: it never ran, or it was preempted
    PARKED = "parked"  # pieces of its prompt are due
    DECODING = "decoding"
    ENDED = "ended"


_DECODING = RowState.DECODING  # members are slow to look up, and each token asks

_NO_PART = Decode(0)


@attrs.define(eq=False)
class Row:
    """A choice. `at` counts positions in KV or on their way there, `drawing` the draws in flight."""

    job: Job
    spec: SequenceSpec
    prompt_length: int  # P
    max_new: int
    state: RowState = RowState.WAITING
    sequence_id: int | None = None
    decode: Decode = _NO_PART  # the part that decodes it, once it is seated
    scoring: bool = False  # its engine row is there to score the prompt, another one will make the reply
    plan: PrefillPlan | None = None
    busy_plan: bool = False  # whether `plan` was made for when rows decode
    adopted_prefilled: bool = True  # whether all that its KV began with was computed by pieces
    at: int = 0
    drawing: int = 0
    in_flight: int = 0
    announced: bool = False  # its client heard of its start
    donates: bool = False  # it ended, and its KV is worth keeping
    output: list[int] = attrs.field(factory=list)
    scores: list[Scores] = attrs.field(factory=list)
    # for its end record
    cached: int = 0
    cache_miss: Reject | None = None  # why nothing was cached
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    text: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    pieces: list[Span] = attrs.field(factory=list)

    @classmethod
    def of(cls, job: Job, spec: SequenceSpec, context: int) -> Row:
        length = len(spec.prompt_ids)
        return cls(job, spec, length, reply_bound(spec.params, length, context))

    @property
    def rank(self) -> Rank:
        return (self.job.lane, self.job.virtual, self.job.number, self.spec.choice)

    @property
    def length(self) -> int:
        """P + G."""
        return self.prompt_length + len(self.output)

    @property
    def draws(self) -> bool:
        """Whether its next decode draws: an older token is a replay (spec E22)."""
        return self.at == self.prompt_length + len(self.output) - 1 + self.drawing

    @property
    def can_decode(self) -> bool:
        """Whether a decode is due: none is behind the token that spends the budget (spec E13)."""
        if self.state is not _DECODING:
            return False
        coming = len(self.output) + self.drawing
        return coming < self.max_new or self.at < self.prompt_length + coming - 1

    def feeds(self, level: str) -> tuple[np.ndarray, bool]:
        """Ids that its plan is over, int32, and whether the last piece draws (spec C19): the prompt, or behind a
        preemption what was known. Below R2 the output is not of it: decodes replay it, as it was computed at first."""
        prompt = self.spec.prompt_ids
        if not self.output:
            return prompt, True
        if level != "R2" and self.at < self.prompt_length:
            return prompt, False
        return np.concatenate([prompt, np.asarray(self.output[:-1], np.int32)]), False

    def forget_kv(self) -> None:
        """It starts over from its ids."""
        self.plan, self.at, self.drawing = None, 0, 0
        self.scoring, self.scores = False, []
