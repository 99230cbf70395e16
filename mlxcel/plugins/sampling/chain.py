"""The sampler chain: array-API functions over [R, V]. Only the set of active stages is static (spec 4.1)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxcel.core.params import STAGE_NAMES, SamplingParams
from mlxcel.core.plan import SamplingArrays
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry, Drawn, LogitsProcessor
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import RequestError
from mlxcel.plugins.sampling import noise
from mlxcel.plugins.sampling.draw import draw_sampled
from mlxcel.plugins.sampling.ends import without_ends
from mlxcel.plugins.sampling.history import History
from mlxcel.plugins.sampling.logit_stages import logit_stages
from mlxcel.plugins.sampling.logprobs import best, log_softmax
from mlxcel.plugins.sampling.pack import DRAW, ENDS, first_state, next_weight, prepare_drawing
from mlxcel.plugins.sampling.processors import check_names
from mlxcel.plugins.sampling.scoring import SCORING, draw_scores, pack_scores
from mlxcel.plugins.sampling.selection import WHEN_USED, select, when
from mlxcel.plugins.sampling.stage import RowState
from mlxcel.plugins.sampling.stage_sets import StageSets
from mlxcel.plugins.sampling.standing import Standing
from mlxcel.plugins.sampling.status import FINE, NOTHING_ALLOWED, behind_stage, fault_words, of_logits


class ChainSampler:
    """Logit stages, then greedy rows leave by argmax; the others go through filters, XTC, temperature, adaptive-p or
    mirostat, and a Gumbel draw.

    A row's result is a function of its own logits, parameters and carry, bit for bit: over a row run only elementwise
    arithmetic, maxima, integer counts and one fixed tree of additions.
    """

    name = "chain"
    stage_order = STAGE_NAMES

    def __init__(
        self, *, vocab: int, tokenizer: Tokenizer | None = None, processors: Mapping[str, LogitsProcessor] | None = None
    ) -> None:
        """`vocab` is V. Ids at or above the tokenizer's size are padding rows of the model and never drawn (spec S14);
        without a tokenizer every id is a token, and none is a newline. `processors` are by registered name."""
        self._vocab = vocab
        self._tokenizer = tokenizer
        self._named = vocab if tokenizer is None else min(tokenizer.size, vocab)
        self._processors = dict(processors or {})
        self._stages = logit_stages(vocab, tokenizer, self._processors)
        self._standing: Standing | None = None  # of the last step that was packed
        self._by_name = {stage.name: stage for stage in self._stages}
        self._newlines: np.ndarray | None = None

    def __eq__(self, other: object) -> bool:
        """Whether `draw` is the same function of its arguments: engines whose samplers are equal share what a backend
        compiled of it."""
        if type(other) is not type(self):
            return NotImplemented
        if (self._vocab, self._named, self._processors) != (other._vocab, other._named, other._processors):
            return False
        return self._tokenizer is other._tokenizer or np.array_equal(self._all_newlines(), other._all_newlines())

    def __hash__(self) -> int:
        return hash((type(self), self._vocab, self._named))

    def draw_goes_by(self, stages: Sequence[str]) -> tuple[Any, ...] | None:
        """Plain values that `draw` with these stages depends on beside its arguments, for a backend that keeps what it
        compiled; None where a third party's processor is among them."""
        if any(stage.foreign is not None and stage.name in stages for stage in self._stages):
            return None
        return self._vocab, self._named, self._all_newlines() if "xtc" in stages else None

    def largest_of(self, stages: Sequence[str]) -> int | None:
        """Where a draw with these stages is each row's largest logit, among so many first ids but the ends that it
        ignores; else None."""
        return self._named if set(stages) <= {ENDS} else None

    def open(self, spec: SequenceSpec) -> RowState:
        """RequestError for a sampled row whose seed nobody drew, since its reply could not be reported or repeated, and
        for what a logit stage refuses."""
        if spec.params.seed < 0 and not spec.params.greedy:
            raise RequestError(
                f"seed is {spec.params.seed}, and a sampled sequence needs one that is drawn",
                field="seed",
                hint="give a seed from 0 to 2**63 - 1, or take the parameters from resolve_sampling, which draws one",
            )
        check_names(spec, self._processors)
        prepared = {stage.name: stage.prepare(spec) for stage in self._stages}
        prepared = {name: value for name, value in prepared.items() if value is not None}
        prepared[DRAW] = prepare_drawing(spec, self._vocab)
        mu, adaptive = first_state(spec)
        return RowState(spec, History(spec.prompt_ids), prepared, mu=mu, adaptive=adaptive)

    def commit(self, state: RowState, token: int, observed: float | None) -> None:
        """`observed` is the row's next mu or adaptive-p sum; None, for a token that was not drawn, moves neither."""
        state.history.append(token)
        if observed is None:
            return
        drawing = state.prepared[DRAW]
        if "mirostat_1" in drawing.features or "mirostat_2" in drawing.features:
            state.mu = observed
        elif "adaptive_p" in drawing.features:
            state.adaptive = (observed, float(next_weight(drawing.decay, np.float32(state.adaptive[1]))))

    def closed(self, state: RowState) -> bool:
        if len(state.prepared) == 1:  # its Drawing: most rows use no logit stage
            return True
        for name, prepared in state.prepared.items():
            stage = self._by_name.get(name)  # none: the row's Drawing
            if stage is not None and not stage.closed(prepared):
                return False
        return True

    def memoryless(self, state: RowState) -> bool:
        return len(state.prepared) == 1 and state.prepared[DRAW].memoryless

    def fault(self, state: RowState, status: int) -> str:
        return fault_words(self._stages, state, status)

    def pack(
        self, states: Sequence[RowState], positions: Sequence[int], pending: Sequence[bool], *, closed: bool = False
    ) -> SamplingArrays:
        standing = self._standing
        if standing is None or not standing.holds_for(states):
            standing = self._standing = Standing.of(states, self._stages, self._vocab)
        params = standing.pack(positions, pending)
        for stage in standing.active:
            params |= stage.pack(states, pending)
        exact = SamplingArrays(standing.stages, params, standing.top_logprobs)
        return self._sets.superset(exact, len(states)) if closed else exact

    def stage_sets(self, rows: int) -> list[SamplingArrays]:
        return self._sets.examples(rows)

    @functools.cached_property
    def _sets(self) -> StageSets:
        idle = self.open(SequenceSpec("", np.zeros(1, np.int32), SamplingParams(temperature=0)))
        drawing = Standing.of([idle], self._stages, self._vocab).pack([0], [False])
        return StageSets(self._stages, idle, drawing, self._vocab)

    def pack_scores(self, targets: np.ndarray, top: int) -> SamplingArrays:
        return pack_scores(targets, top, self._vocab)

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        """As `Sampler.draw`. A row with a status other than 0 gets id -1; its log-probabilities mean nothing."""
        # A row's overflow, or NaN, is its own affair and in its status; it must not become a warning of the step.
        with np.errstate(all="ignore"):
            if sampling.stages == SCORING:
                return draw_scores(xp, logits, sampling)
            return self._draw(xp, logits.astype(xp.float32, copy=False), sampling, carry)

    def _draw(self, xp: Any, raw: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        zero, params = xp.float32(0), sampling.params
        status = of_logits(xp, raw)
        z = raw
        for place, stage in enumerate(self._stages):
            if stage.name in sampling.stages:
                z = stage.apply(xp, z, params, carry)
                if stage.foreign is not None:
                    status = behind_stage(xp, status, z, place)
        if z is not raw:
            status = xp.maximum(status, of_logits(xp, z))
        if ENDS in sampling.stages:  # behind the status, in which -inf is nothing to look at
            z = without_ends(xp, z, params["ends"])
        if self._named < raw.shape[-1]:
            z = xp.where(xp.arange(raw.shape[-1]) < self._named, z, xp.float32(-xp.inf))
        peak = xp.max(z, axis=-1)
        empty = peak == xp.float32(-xp.inf)
        status = xp.where((status == FINE) & empty, xp.int32(NOTHING_ALLOWED), status)
        fine = status == FINE
        # Of z as it was, so that a GPU finds maxima and their places in one pass.
        tokens = xp.where(fine, xp.argmax(z, axis=-1).astype(xp.int32), xp.int32(0))
        z, peak = select(xp, fine, z, zero), xp.where(fine, peak, zero)
        drawn_from, observed = z, None
        if DRAW in sampling.stages:
            sampled = draw_sampled(xp, z, peak, sampling, carry, self._newline_ids(sampling))
            greedy = params["greedy"]
            tokens = xp.where(greedy, tokens, sampled.tokens)
            drawn_from, observed = select(xp, ~greedy, sampled.drawn_from, z), sampled.observed
        logprobs = top_ids = top_logprobs = None
        if sampling.top_logprobs is not None:
            told = functools.partial(self._told, xp, select(xp, fine, raw, zero), drawn_from, tokens, sampling)
            if WHEN_USED in sampling.stages:
                shape = (len(tokens), sampling.top_logprobs)
                nothing = (xp.zeros(len(tokens), xp.float32), xp.zeros(shape, xp.int32), xp.zeros(shape, xp.float32))
                logprobs, top_ids, top_logprobs = when(xp, params["listed"], told, nothing)
            else:
                logprobs, top_ids, top_logprobs = told()
        return Drawn(xp.where(fine, tokens, xp.int32(-1)), status, logprobs, top_ids, top_logprobs, observed)

    def _told(self, xp: Any, raw: Any, drawn_from: Any, tokens: Any, sampling: SamplingArrays) -> tuple[Any, Any, Any]:
        """Log-probabilities of the tokens [R], and the best, [R, n] twice or None twice."""
        values = self._log_probabilities(xp, raw, drawn_from, sampling)
        logprobs = xp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]
        return logprobs, *(best(xp, values, sampling.top_logprobs) if sampling.top_logprobs else (None, None))

    def _log_probabilities(self, xp: Any, raw: Any, drawn_from: Any, sampling: SamplingArrays) -> Any:
        """float32 [R, V] of each row's mode (spec S37)."""
        if "processed_logprobs" not in sampling.stages:
            return log_softmax(xp, raw)
        processed = log_softmax(xp, drawn_from)
        if DRAW in sampling.stages:
            processed = self._compared(xp, drawn_from, processed, sampling)
        if "raw_logprobs" not in sampling.stages:
            return processed
        return select(xp, sampling.params["processed"], processed, log_softmax(xp, raw))

    def _compared(self, xp: Any, drawn_from: Any, processed: Any, sampling: SamplingArrays) -> Any:
        """`processed`, but for sampled rows that want them the scores of their draw."""
        params = sampling.params
        rows = params["compared"] & ~params["greedy"]

        def scored() -> Any:
            keys = noise.row_keys(xp, params["seed_low"], params["seed_high"], params["position"], noise.DRAW)
            return select(xp, rows, noise.scores(xp, drawn_from, keys), processed)

        return when(xp, rows, scored, processed)

    def _newline_ids(self, sampling: SamplingArrays) -> np.ndarray | None:
        """bool [V], the ids whose text is newlines only, looked for when a row first uses XTC (spec S22)."""
        return self._all_newlines() if "xtc" in sampling.stages else None

    def _all_newlines(self) -> np.ndarray:
        if self._newlines is None:
            self._newlines = np.zeros(self._vocab, bool)
            if self._tokenizer is not None:
                texts = (self._tokenizer.token_bytes(token) for token in range(self._named))
                self._newlines[: self._named] = [bool(text) and not text.strip(b"\n") for text in texts]
        return self._newlines
