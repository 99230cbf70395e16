"""From what a server sends to the outputs of the Python API."""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.outputs import CompletionOutput, Logprobs, RequestOutput, StreamDelta
from mlxcel.remote_request import About, Came, Finish, Piece, RemoteRequest, scored


@attrs.define
class _Choice:
    """What came so far."""

    text: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[Logprobs] = attrs.field(factory=list)
    finish: Finish | None = None


class RemoteReply:
    """One request as far as it came."""

    def __init__(self, request: RemoteRequest) -> None:
        self._request = request
        self._choices = [_Choice() for _ in range(request.choices)]
        self._facts: dict[str, Any] = {}
        self._scored = request.params.logprobs is not None

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    def take(self, event: Came) -> StreamDelta | None:
        """Take an event in; what a reader of deltas hears of it."""
        if isinstance(event, About):
            self._facts.update(event.facts)
            return None
        choice = self._choices[event.choice]
        if isinstance(event, Piece):
            choice.text.append(event.text)
            choice.reasoning.append(event.reasoning)
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs
            logprobs = event.logprobs if self._scored else None
            return StreamDelta(event.choice, event.text, event.reasoning, event.token_ids, logprobs)
        choice.finish = event
        output = self.output() if self.finished else None
        return StreamDelta(event.choice, finish_reason=event.reason, finish_cause=event.cause, output=output)

    def output(self) -> RequestOutput:
        """All of it as it is now."""
        facts, request = self._facts, self._request
        scores = facts.get("prompt_logprobs")
        finishes = [choice.finish for choice in self._choices if choice.finish is not None]
        details = (facts.get("usage") or {}).get("prompt_tokens_details") or {}
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=tuple(facts.get("prompt_token_ids") or request.prompt_ids),
            prompt_logprobs=None if scores is None else scored(scores),
            outputs=tuple(self._output(index, choice) for index, choice in enumerate(self._choices)),
            finished=self.finished,
            num_cached_tokens=details.get("cached_tokens", 0),
            warnings=tuple(facts.get("warnings") or ()),
            error=next((finish.error for finish in finishes if finish.error is not None), None),
            sampling_params=request.params,
        )

    def refused(self, error: Exception) -> RequestOutput:
        """Of a request that was not sent."""
        for index, choice in enumerate(self._choices):
            choice.finish = Finish(index, "rejected", error=error)
        return self.output()

    def drop(self) -> list[StreamDelta]:
        """End a request that was not sent. The deltas of its end."""
        ends = [self.take(Finish(index, "cancelled")) for index in range(len(self._choices))]
        return [delta for delta in ends if delta is not None]

    def _output(self, index: int, choice: _Choice) -> CompletionOutput:
        finish = choice.finish
        return CompletionOutput(
            index,
            text="".join(choice.text),
            reasoning_content="".join(choice.reasoning) or None,
            token_ids=tuple(choice.token_ids),
            cumulative_logprob=sum(_drawn(entry) for entry in choice.logprobs) if self._scored else None,
            logprobs=tuple(choice.logprobs) if self._scored else None,
            finish_reason=None if finish is None else finish.reason,
            finish_cause=None if finish is None else finish.cause,
            stop_reason=None if finish is None else finish.stop_reason,
        )


def _drawn(entry: Logprobs) -> float:
    """The token that stands there comes first."""
    return next(iter(entry.values())).logprob
