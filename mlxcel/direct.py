"""The direct client: one sequence through the engine, for `generate` and for tools."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mlxcel.core.engine import Engine
from mlxcel.core.lone_row import LoneRow
from mlxcel.core.observe import Observers
from mlxcel.core.piecework import Planner
from mlxcel.core.plan import PrefillPlan, RowOutcome, Span, TokenLogprobs
from mlxcel.core.prompt_ids import truncate_prompt
from mlxcel.core.request import SequenceSpec
from mlxcel.core.result import RequestResult, Timings, error_code
from mlxcel.core.source import NoProgress, Progress
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import BackendFault, RowError
from mlxcel.text.echo import echoed

Clock = Callable[[], float]
Listener = Callable[[str], None]


def generate(
    engine: Engine,
    spec: SequenceSpec,
    *,
    planner: Planner,
    clock: Clock = time.monotonic,
    on_text: Listener = lambda text: None,
    on_reasoning: Listener = lambda text: None,
    origin: Mapping[str, str] | None = None,
    warnings: tuple[str, ...] = (),
    progress: Progress | None = None,
    observers: Observers | None = None,
    tokenizer: Tokenizer | None = None,
    run_ahead: bool = True,
) -> RequestResult:
    """Run one sequence to its end and close it, whatever happens.

    `on_text` gets text as it becomes final, `on_reasoning` what is split off it. KeyboardInterrupt ends the row with
    cause `cancelled` and returns what was produced. A fault of the row is in `result.error` with cause `error`; what is
    wrong with the request raises from `Engine.open`, before any forward. However it ends, observers hear of it exactly
    once (spec E20). `origin` and `warnings` of the parameters come back in the result. A prompt is cut if
    `truncate_prompt_tokens` says so, and scored first where its log-probabilities are wanted; nothing else runs when
    `max_tokens` is 0 (spec E9). `tokenizer` is needed for `spec.echo` alone. `run_ahead` starts a step before the one
    before it is read, where the backend and the row's sampling allow it (spec C51); it changes no result.
    """
    if spec.echo and tokenizer is None:
        raise ValueError("a spec with echo needs the tokenizer, which turns the prompt into text")
    run = _Run(engine, spec, clock, on_text, on_reasoning, origin or {}, warnings, progress or NoProgress())
    try:
        return run.to_end(planner, tokenizer, run_ahead)
    finally:
        if observers is not None:
            observers.request_finished(run.result())


class _Run:
    """One sequence on its way."""

    def __init__(
        self,
        engine: Engine,
        spec: SequenceSpec,
        clock: Clock,
        on_text: Listener,
        on_reasoning: Listener,
        origin: Mapping[str, str],
        warnings: tuple[str, ...],
        progress: Progress,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._spec, self._truncated = truncate_prompt(spec, engine.settings.context)
        self._on_text, self._on_reasoning, self._progress = on_text, on_reasoning, progress
        self._origin, self._warnings = origin, warnings
        self._accepted = self._started = clock()
        self._outcome = RowOutcome(0, cause="cancelled")
        self._left = False  # whether a listener raised
        self._first: float | None = None
        self._last: float | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self._pieces: list[Span] = []

    def to_end(self, planner: Planner, tokenizer: Tokenizer | None, run_ahead: bool) -> RequestResult:
        try:
            sequence_id = self._engine.open(self._spec)
            if self._spec.prompt_scores is not None:
                self._engine.close(sequence_id)  # it was refused or not, before any forward; the score needs its place
                ended = self._score_prompt(self._spec.prompt_scores)
                if ended is not None:
                    self._outcome = ended
                    return self.result()
                sequence_id = self._engine.open(self._spec)
        except Exception as error:
            self._outcome = RowOutcome(0, cause="rejected", detail=error_code(error))
            raise
        self._started = self._clock()
        self._outcome = RowOutcome(sequence_id, cause="cancelled")  # holds if a listener raises
        row: LoneRow | None = None
        try:
            try:
                plan = planner.build(self._spec.prompt_ids)
                self._prepare(sequence_id, plan, run_ahead)
                if tokenizer is not None:
                    before = echoed(tokenizer, self._spec, whole=self._engine.view(sequence_id).max_new == 0)
                    self._hear(before, self._text, self._on_text)
                outcome = self._prefill(sequence_id, plan)
                row = LoneRow(self._engine, sequence_id, run_ahead=run_ahead)
                while outcome.cause is None and outcome.error is None:
                    outcome = row.step()
                    self._take(outcome)
            except KeyboardInterrupt:
                self._progress.finish()
                outcome = self._engine.cancel(sequence_id)
                self._take(outcome)
            except Exception as error:
                if not self._left:
                    self._outcome = RowOutcome(sequence_id, error=error)
                raise
            self._outcome = outcome
        finally:
            self._engine.close(sequence_id)
            if row is not None:
                row.drop()
        return self.result()

    def result(self) -> RequestResult:
        """The request as far as it came."""
        outcome, engine = self._outcome, self._engine
        return RequestResult(
            request_id=self._spec.request_id,
            prompt_ids=tuple(int(token) for token in self._spec.prompt_ids),
            token_ids=tuple(self._tokens),
            text="".join(self._text),
            cause="error" if outcome.error is not None else outcome.cause or "error",
            detail=outcome.detail if outcome.error is None else error_code(outcome.error),
            timings=Timings(self._accepted, self._started, self._first, self._last, self._clock()),
            pieces=tuple(self._pieces),
            params=self._spec.params,
            level=engine.level,
            kv_storage=engine.kv_storage,
            prefill_chunk=engine.settings.chunk,
            reasoning="".join(self._reasoning) or None,
            origin=self._origin,
            warnings=self._warnings,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            truncated_tokens=self._truncated,
            error=outcome.error,
        )

    def _score_prompt(self, top: int) -> RowOutcome | None:
        """What ends the request before its row begins, None for nothing."""
        prompt = self._spec.prompt_ids
        try:
            scores = self._engine.score(prompt, 0, top)
        except KeyboardInterrupt:
            return RowOutcome(0, cause="cancelled")
        except (BackendFault, RowError) as error:
            return RowOutcome(0, error=error)
        self._prompt_logprobs = (None, *scores.of_tokens(prompt[1:]))
        return None

    def _prepare(self, sequence_id: int, plan: PrefillPlan, run_ahead: bool) -> None:
        """What is compiled before the first step is no part of the request's times."""
        began = self._clock()
        self._engine.prepare(sequence_id, plan, self._progress, ahead=run_ahead)
        self._started = self._clock()
        self._accepted += self._started - began

    def _prefill(self, sequence_id: int, plan: PrefillPlan) -> RowOutcome:
        self._progress.start("prefill", plan.length, "tokens")
        outcome = self._engine.prefill(sequence_id, plan, self._piece_ran)
        self._progress.finish()
        self._take(outcome)
        return outcome

    def _piece_ran(self, span: Span) -> None:
        self._pieces.append(span)
        self._progress.advance(span.end)

    def _take(self, outcome: RowOutcome) -> None:
        now = self._clock()
        if outcome.token is not None and self._first is None:
            self._first = now
        if outcome.appended and outcome.token is not None:
            self._last = now
            self._tokens.append(outcome.token)
            if outcome.logprobs is not None:
                self._logprobs.append(outcome.logprobs)
        self._hear(outcome.reasoning, self._reasoning, self._on_reasoning)
        self._hear(outcome.text, self._text, self._on_text)

    def _hear(self, text: str, so_far: list[str], listener: Listener) -> None:
        if not text:
            return
        so_far.append(text)
        try:
            listener(text)
        except Exception:
            self._left = True
            raise
