"""One choice of a native stream, piece by piece."""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.events import Delta, Started
from mlxcel.core.plan import TokenLogprobs
from mlxcel.core.request import SequenceSpec
from mlxcel.core.result import RequestResult, Timings
from mlxcel.report import timings_of
from mlxcel.server.native_reply import NativeReply


@attrs.define
class NativeChoice:
    """Ids and log-probabilities whose text waits go with the text that releases them, or with the end.

    `spec` is the choice's as it is fed. `accepted` and the times of events are seconds on one clock. With `timed` every
    piece has the timings so far, by when its tokens were read here; the last one has those of the engine in any case.
    """

    index: int
    spec: SequenceSpec
    reply: NativeReply
    timed: bool
    accepted: float
    _tokens: list[int] = attrs.field(factory=list, init=False)
    _logprobs: list[TokenLogprobs] = attrs.field(factory=list, init=False)
    _started: float | None = attrs.field(default=None, init=False)
    _first: float | None = attrs.field(default=None, init=False)
    _cached: int = attrs.field(default=0, init=False)
    _predicted: int = attrs.field(default=0, init=False)

    def take(self, event: Started | Delta, now: float) -> dict[str, Any] | None:
        """The object that an event is, if it brings text."""
        if isinstance(event, Started):
            self._started, self._cached = now, event.cached_tokens
            return None
        self._tokens += event.token_ids
        self._logprobs += event.logprobs
        self._predicted += len(event.token_ids)
        if event.token_ids and self._first is None:
            self._first = now
        return self._piece(event, now) if event.text or event.reasoning else None

    def end(self, prompt: str, result: RequestResult) -> dict[str, Any]:
        return self.reply.last(self.index, prompt, result, self._tokens, self._logprobs)

    def _piece(self, delta: Delta, now: float) -> dict[str, Any]:
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        made: dict[str, Any] = {"index": self.index, "content": delta.text, "tokens": tokens, "stop": False}
        if delta.reasoning:
            made["reasoning_content"] = delta.reasoning
        if self.timed:
            made["timings"] = self._timings(now)
        return {**made, **(self.reply.probabilities(logprobs, self.spec.params) if logprobs else {})}

    def _timings(self, now: float) -> dict[str, Any]:
        started = now if self._started is None else self._started
        times = Timings(self.accepted, started, self._first, None if self._first is None else now, now)
        evaluated = len(self.spec.prompt_ids) - self._cached
        return timings_of(times, cached=self._cached, evaluated=evaluated, predicted=self._predicted)
