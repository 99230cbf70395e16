"""Work as plain data: how a prompt is cut into pieces, and what one forward runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

CARRY = -1
"""A token id in StepPlan.token_ids: the device's own last drawn token of that row's slot."""


EMBEDDING, FINITE = -1, 2**31 - 1
"""In StepResult.spoilt: not even what the first layer gets is finite, and the output of every layer is."""


def id_bytes(ids: np.ndarray) -> bytes:
    """Token ids [P] as little-endian int32: hashable, and compared without a Python loop."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


@attrs.frozen
class Span:
    """Positions [start, end) of a prompt, run as one forward of `width` tokens (padding behind the real ones)."""

    start: int
    end: int
    width: int

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def pad(self) -> int:
        return self.width - self.length


@attrs.frozen
class Scoring:
    """Positions that are asked what they say of the token behind them, with the `top` best ids of each."""

    positions: range
    top: int


@attrs.frozen
class PrefillPlan:
    """A prompt cut into pieces: a pure, hashable value (spec 3.1).

    `ids` is id_bytes of the P tokens the plan was built for; `start` the adopted length A'; pieces tile [A', P).
    `boundary` is the history boundary that was cut at, or None. `level` is the level in force.
    """

    ids: bytes
    start: int
    pieces: tuple[Span, ...]
    level: str
    draw: bool = True
    boundary: int | None = None
    adopted_prefilled: bool = True
    scoring: Scoring | None = None  # only in a plan that draws nothing

    @property
    def length(self) -> int:
        """P."""
        return len(self.ids) // 4

    def token_ids(self, index: int) -> np.ndarray:
        """int32 ids of piece `index`."""
        span = self.pieces[index]
        return np.frombuffer(self.ids, dtype="<i4")[span.start : span.end]

    def piece_at(self, offset: int) -> int:
        """Index of the piece that holds position `offset`. IndexError outside [start, P)."""
        for index, span in enumerate(self.pieces):
            if span.start <= offset < span.end:
                return index
        raise IndexError(f"position {offset} is outside [{self.start}, {self.length})")

    def scoring_of(self, index: int) -> Scoring | None:
        """What of `scoring` is of piece `index`, None for nothing."""
        if self.scoring is None:
            return None
        span, asked = self.pieces[index], self.scoring.positions
        own = range(max(span.start, asked.start), min(span.end, asked.stop))
        return Scoring(own, self.scoring.top) if own else None

    def is_terminal(self, index: int) -> bool:
        return index == len(self.pieces) - 1

    def ends_at_boundary(self, index: int) -> bool:
        return self.boundary is not None and self.pieces[index].end == self.boundary

    def trim_after(self, index: int) -> int:
        """Positions of padding behind piece `index` that must never be read."""
        return self.pieces[index].pad

    def tokens_left(self, offset: int) -> int:
        """Prompt tokens at or behind `offset`."""
        return max(0, self.length - max(offset, self.start))

    def reproduces(self, cold: PrefillPlan) -> bool:
        """Whether this plan, on its adopted prefix, computes the bits that `cold` computes from nothing (spec P7)."""
        if self.ids != cold.ids:
            return False
        if self.level == "R2":
            return True
        cuts = {cold.start, *(span.end for span in cold.pieces)}
        tail = cold.pieces[len(cold.pieces) - len(self.pieces) :]
        return self.start in cuts and self.pieces == tail and self.adopted_prefilled


@attrs.frozen
class Decode:
    """A part of a step: feed one token of a row."""

    sequence_id: int


@attrs.frozen
class Piece:
    """A part of a step: feed piece `index` of a plan to a row."""

    sequence_id: int
    plan: PrefillPlan
    index: int


Part = Decode | Piece


@attrs.frozen(eq=False)
class SamplingArrays:
    """Sampling of the R drawing rows of a step, packed by a sampler for its own `draw`.

    `stages` and `top_logprobs` are static (they may choose an executable); `params` are [R, …] arrays and never do.
    """

    stages: tuple[str, ...]
    params: Mapping[str, np.ndarray]
    top_logprobs: int | None = None
    unread: frozenset[str] = frozenset()
    """Fields of StepResult that no row of the step wants, though the draw gives them: a backend may leave them out."""


@attrs.frozen(eq=False)
class StepPlan:
    """One forward, as data: T tokens of S rows, R of which draw, at most P pages a row."""

    token_ids: np.ndarray  # [T] int32, or CARRY
    positions: np.ndarray  # [T] int32, absolute
    query_start: np.ndarray  # [S+1] int32, row s owns tokens query_start[s]:query_start[s+1]
    seq_lens: np.ndarray  # [S] int32, positions in KV once this step has run
    page_tables: np.ndarray  # [S, P] int32, -1 behind a row's last page
    slots: np.ndarray  # [S] int32, where the backend carries the row's last token, its rings and its state
    state_copies: np.ndarray  # [S] int32, 0 or 1: the copy of its recurrent state a row reads; it writes the other
    sequence_ids: np.ndarray  # [S] int64
    logits_rows: np.ndarray  # [R] int32, indices into the T tokens: the last one of each row that draws, or all scored
    draw_rows: np.ndarray  # [R] int32, indices into the S rows: the drawing ones, or 0 for each position that is scored
    sampling: SamplingArrays
    page_copies: np.ndarray = attrs.field(factory=lambda: np.zeros((0, 3), np.int32))
    """[N, 3] int32: from page, to page, how many positions; made before the forward (spec V5)"""
    pieces: np.ndarray = attrs.field(default=attrs.Factory(lambda plan: np.diff(plan.query_start) > 1, takes_self=True))
    """[S] bool: rows fed by a piece of a plan, which may be one token long, and not by a decode"""
    scores: bool = False
    """Whether the tokens behind its R are known, and what the model says of them is asked for: nothing is drawn"""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)


@attrs.frozen(eq=False)
class StepResult:
    """What the host reads of a step, rows in the order of StepPlan.draw_rows."""

    tokens: np.ndarray  # [R] int32; -1 where status is not 0
    status: np.ndarray  # [R] int32; 0 fine, low byte 1: NaN or +inf, 2: nothing allowed; see Sampler.fault
    logprobs: np.ndarray | None = None  # [R] float32, of the drawn token
    top_ids: np.ndarray | None = None  # [R, n] int32, by (value descending, id ascending)
    top_logprobs: np.ndarray | None = None  # [R, n] float32
    observed: np.ndarray | None = None  # [R] float32, for Sampler.commit
    routes: Mapping[str, int] = attrs.field(factory=dict)  # layer calls by attention route
    spoilt: np.ndarray | None = None  # [R] int32, where layers are watched: the first whose output was not finite

    def spoilt_words(self, place: int) -> str:
        """Where the numbers behind logits that are not finite, at `place`, were so first, to end a sentence; "" where
        nobody looked."""
        if self.spoilt is None or self.status[place] & 0xFF != 1:
            return ""
        layer = int(self.spoilt[place])
        where = {EMBEDDING: "in the embedding", FINITE: "behind the last layer"}.get(layer, f"in layer {layer}")
        return f"; first not finite {where}"

    def token_logprobs(self, place: int, count: int, *, linear: bool = False) -> TokenLogprobs | None:
        """Of the token at `place` among the R, with the `count` best, all for -1; None when the step computed none.

        `linear` gives probabilities for their logarithms. What has none is left out (spec S39).
        """
        if self.logprobs is None:
            return None
        top: tuple[tuple[int, float], ...] = ()
        if count and self.top_ids is not None and self.top_logprobs is not None:
            values = self.top_logprobs[place]
            order = np.argsort(-values, kind="stable")[: len(values) if count < 0 else count]
            pairs = zip(self.top_ids[place][order], values[order], strict=True)
            top = tuple((int(token), _plain(value, linear)) for token, value in pairs if np.isfinite(value))
        return TokenLogprobs(int(self.tokens[place]), _plain(self.logprobs[place], linear), top)


@attrs.frozen
class Ticket:
    """A step that was submitted and not collected."""

    number: int
    parts: tuple[Part, ...]


NO_CHANCE = -9999.0
"""The log-probability of what had none, where a number is unavoidable (spec S39)."""


def _plain(value: np.float32, linear: bool) -> float:
    if not np.isfinite(value):
        return 0.0 if linear else NO_CHANCE
    return float(np.exp(value)) if linear else float(value)


@attrs.frozen
class TokenLogprobs:
    """Of one drawn token: its own log-probability, and the n best (id, value), best first.

    Of the model's logits or of what was drawn from, by `logprobs_mode`; probabilities with `post_sampling_probs`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@attrs.frozen(eq=False)
class Scores:
    """Of n positions, first to last: what the model says there of the token behind, by its raw logits (spec S37).

    What has no probability is -inf here.
    """

    logprobs: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, top] int32, by (value descending, id ascending)
    top_logprobs: np.ndarray  # [n, top] float32

    @classmethod
    def none(cls, top: int) -> Scores:
        """Of no position."""
        return cls(np.zeros(0, np.float32), np.zeros((0, top), np.int32), np.zeros((0, top), np.float32))

    @classmethod
    def joined(cls, found: Sequence[Scores]) -> Scores:
        """Of all positions of one or more, in their order."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*map(attrs.astuple, found), strict=True)))

    def of_tokens(self, tokens: np.ndarray) -> tuple[TokenLogprobs, ...]:
        """For clients: int32 [n], the tokens behind the positions, with what is said of each."""
        result = StepResult(tokens, np.zeros(len(tokens), np.int32), self.logprobs, self.top_ids, self.top_logprobs)
        found = [result.token_logprobs(place, self.top_ids.shape[-1]) for place in range(len(tokens))]
        return tuple(each for each in found if each is not None)


@attrs.frozen(slots=False)  # made for each token: without slots that takes two thirds of the time
class RowOutcome:
    """What one part of a step did to its row. `error` and `cause` exclude each other (spec E10)."""

    sequence_id: int
    token: int | None = None
    appended: bool = False
    text: str = ""  # content that this token let go of, the tail included when the row ended
    reasoning: str = ""  # the same of what was split off the content
    cause: str | None = None
    detail: Any = None  # with the cause, as in Ending
    error: Exception | None = None
    logprobs: TokenLogprobs | None = None
    scores: Scores | None = None  # of a piece whose plan scores


@attrs.frozen
class StepReport:
    """A step as it was executed, for observers."""

    number: int
    parts: tuple[Part, ...]
    outcomes: tuple[RowOutcome, ...]
    tokens: int  # T
    routes: Mapping[str, int]
    error: Exception | None = None
