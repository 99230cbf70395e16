"""From the events of a request to the outputs of the Python API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from mlxcel.core.events import Delta, Ended, Event, Progressed, Started
from mlxcel.core.plan import NO_CHANCE, TokenLogprobs
from mlxcel.core.prompt_ids import truncate_prompt
from mlxcel.core.request import Request
from mlxcel.core.result import RequestResult
from mlxcel.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput, StreamDelta
from mlxcel.report import timings

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer


@attrs.frozen(eq=False)
class Prepared:
    """A request that was checked, and the text of its prompt."""

    request: Request
    prompt: str | None

    @property
    def choices(self) -> int:
        return len(self.request.choices)


@attrs.define
class _Choice:
    """What came so far."""

    text: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[Logprobs] = attrs.field(factory=list)
    cumulative: float = 0.0
    result: RequestResult | None = None


class Gathered:
    """One request as far as it came. `growing` keeps what deltas bring, for outputs before the end."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer, context: int, *, growing: bool = False) -> None:
        self._prepared, self._tokenizer, self._growing = prepared, tokenizer, growing
        self._spec, _ = truncate_prompt(prepared.request.choices[0], context)
        self._choices = [_Choice() for _ in prepared.request.choices]
        self._cached = 0
        self._dropped = False
        self._linear = self._spec.params.post_sampling_probs

    @property
    def finished(self) -> bool:
        return self._dropped or all(choice.result is not None for choice in self._choices)

    def take(self, event: Event) -> StreamDelta | None:
        """Take an event in; what a reader of deltas hears of it."""
        choice = self._choices[event.choice]
        if isinstance(event, Started):
            if event.choice == 0:
                self._cached = event.cached_tokens
            return None
        if isinstance(event, Progressed):
            return None
        if isinstance(event, Ended):
            choice.result = event.result
            return StreamDelta(
                event.choice,
                finish_reason=event.result.finish_reason,
                finish_cause=event.result.cause,
                output=self.output() if self.finished else None,
            )
        logprobs = self._logprobs(event.logprobs)
        if self._growing:
            self._grow(choice, event, logprobs)
        return StreamDelta(event.choice, event.text, event.reasoning, event.token_ids, logprobs)

    def output(self) -> RequestOutput:
        """All of it as it is now."""
        if self._dropped:
            return self._unrun("cancelled", None)
        first = self._choices[0].result
        errors = [choice.result.error for choice in self._choices if choice.result is not None]
        finished = self.finished
        return RequestOutput(
            request_id=self._spec.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=tuple(self._spec.prompt_ids.tolist()) if first is None else first.prompt_ids,
            prompt_logprobs=None if first is None else self._prompt_logprobs(first),
            outputs=tuple(self._output(index, choice) for index, choice in enumerate(self._choices)),
            finished=finished,
            num_cached_tokens=self._cached,
            metrics=timings(first) if finished and first is not None else None,
            warnings=self._prepared.request.warnings,
            error=next((error for error in errors if error is not None), None),
            sampling_params=self._spec.params,
        )

    def refused(self, error: Exception) -> RequestOutput:
        """Of a request that was not taken."""
        return self._unrun("rejected", error)

    def drop(self) -> list[StreamDelta]:
        """End a request that nobody took. The deltas of its end."""
        self._dropped = True
        output, last = self._unrun("cancelled", None), len(self._choices) - 1
        return [
            StreamDelta(index, finish_cause="cancelled", output=output if index == last else None)
            for index in range(len(self._choices))
        ]

    def _unrun(self, cause: str, error: Exception | None) -> RequestOutput:
        outputs = tuple(CompletionOutput(index, finish_cause=cause) for index in range(len(self._choices)))
        return RequestOutput(
            request_id=self._spec.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=tuple(self._spec.prompt_ids.tolist()),
            outputs=outputs,
            finished=True,
            warnings=self._prepared.request.warnings,
            error=error,
            sampling_params=self._spec.params,
        )

    def _grow(self, choice: _Choice, delta: Delta, logprobs: tuple[Logprobs, ...] | None) -> None:
        choice.text.append(delta.text)
        choice.reasoning.append(delta.reasoning)
        choice.token_ids += delta.token_ids
        choice.logprobs += logprobs or ()
        choice.cumulative += sum(self._log(token.logprob) for token in delta.logprobs)

    def _output(self, index: int, choice: _Choice) -> CompletionOutput:
        wanted = self._spec.params.logprobs is not None
        result = choice.result
        if result is None:
            return CompletionOutput(
                index,
                text="".join(choice.text),
                reasoning_content="".join(choice.reasoning) or None,
                token_ids=tuple(choice.token_ids),
                cumulative_logprob=choice.cumulative if wanted else None,
                logprobs=tuple(choice.logprobs) if wanted else None,
            )
        return CompletionOutput(
            index,
            text=result.text,
            reasoning_content=result.reasoning,
            token_ids=result.token_ids,
            cumulative_logprob=sum(self._log(token.logprob) for token in result.logprobs) if wanted else None,
            logprobs=self._logprobs(result.logprobs),
            finish_reason=result.finish_reason,
            finish_cause=result.cause,
            stop_reason=result.stop_reason,
        )

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> tuple[Logprobs, ...] | None:
        if self._spec.params.logprobs is None:
            return None
        return tuple(self._of_place(token, self._linear) for token in tokens)

    def _prompt_logprobs(self, result: RequestResult) -> tuple[Logprobs | None, ...] | None:
        if self._spec.params.prompt_logprobs is None or not result.prompt_logprobs:
            return None
        return tuple(None if token is None else self._of_place(token, False) for token in result.prompt_logprobs)

    def _of_place(self, token: TokenLogprobs, linear: bool) -> Logprobs:
        ranks = {found: place for place, (found, _) in enumerate(token.top, start=1)}
        values = {token.token: token.logprob, **dict(token.top)}
        return {
            found: Logprob(log_of(value) if linear else value, ranks.get(found), self._text(found))
            for found, value in values.items()
        }

    def _log(self, value: float) -> float:
        return log_of(value) if self._linear else value

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace") or self._tokenizer.token_text(token)


def log_of(probability: float) -> float:
    """Its natural logarithm, finite."""
    return math.log(probability) if probability > 0 else NO_CHANCE
