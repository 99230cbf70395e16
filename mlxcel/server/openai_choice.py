"""One choice of a reply as OpenAI's clients read it, whole or piece by piece (docs/spec/clients.md 3.6)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxcel.core.events import Delta
from mlxcel.core.plan import TokenLogprobs
from mlxcel.core.request import SequenceSpec
from mlxcel.core.result import RequestResult
from mlxcel.server.openai_logprobs import LegacyLogprobs, chat_logprobs, joined, logprobs_by_id

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer

Object = dict[str, Any]


class Choice(ABC):
    """What comes before there is a token, the text of an echoed prompt, waits for it, and so do ids and
    log-probabilities for the text that they belong to. `first` is whether nothing was sent yet."""

    def __init__(self, index: int, spec: SequenceSpec, tokenizer: Tokenizer, *, ids: bool) -> None:
        self.first = True
        self.tokens = 0
        self._index, self._spec, self._tokenizer, self._ids = index, spec, tokenizer, ids
        self._scored = spec.params.logprobs is not None
        self._text = self._reasoning = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def take(self, delta: Delta) -> Object | None:
        """The chunk that a delta is, if it brings text."""
        self.tokens += len(delta.token_ids)
        self._text += delta.text
        self._reasoning += delta.reasoning
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        return self._released() if self.tokens and (self._text or self._reasoning) else None

    def end(self, result: RequestResult) -> list[Object]:
        """The last chunks: text that still waits, be it none where none was sent, and how the choice ended."""
        chunks = [self._released()] if self.first or self._text or self._reasoning else []
        return [*chunks, {**self._chunk(self._ended(), self._last_logprobs(result)), **endings(result)}]

    @abstractmethod
    def whole(self, result: RequestResult) -> Object:
        """The choice of a reply that is not streamed."""

    def _released(self) -> Object:
        text, self._text = self._text, ""
        reasoning, self._reasoning = self._reasoning, ""
        chunk = self._chunk(self._piece(text, reasoning), self._next_logprobs())
        self.first = False
        return {**chunk, "finish_reason": None}

    def _chunk(self, piece: Object, logprobs: Object | None) -> Object:
        chunk: Object = {"index": self._index, **piece, "logprobs": logprobs}
        if self._ids:
            chunk["token_ids"], self._token_ids = self._token_ids, []
        return chunk

    def _next_logprobs(self) -> Object | None:
        tokens, self._logprobs = self._logprobs, []
        return self._scores(tokens) if tokens else None

    def _scores(self, tokens: Sequence[TokenLogprobs]) -> Object:
        """In the shape of the route, and by id for clients that ask for ids: texts of tokens may be alike."""
        scores, params = self._of_tokens(tokens), self._spec.params
        if not self._ids:
            return scores
        most, linear = params.logprobs or 0, params.post_sampling_probs
        return {**scores, "by_id": logprobs_by_id(self._tokenizer, tokens, most, linear=linear)}

    def _last_logprobs(self, result: RequestResult) -> Object | None:
        return self._next_logprobs()

    @abstractmethod
    def _piece(self, text: str, reasoning: str) -> Object:
        """What of a chunk holds text."""

    @abstractmethod
    def _ended(self) -> Object:
        """The same of the last chunk, which brings none."""

    @abstractmethod
    def _of_tokens(self, tokens: Sequence[TokenLogprobs]) -> Object:
        """Log-probabilities in the shape of the route."""

    def prompt_scores(self, result: RequestResult) -> list[Object | None] | None:
        """What `prompt_logprobs` asked for."""
        most = self._spec.params.prompt_logprobs
        if most is None or not result.prompt_logprobs:
            return None
        return logprobs_by_id(self._tokenizer, result.prompt_logprobs, most)


class ChatChoice(Choice):
    def whole(self, result: RequestResult) -> Object:
        reasoning = {} if result.reasoning is None else {"reasoning_content": result.reasoning}
        return {
            "index": self._index,
            "message": {"role": "assistant", "content": result.text, **reasoning, "refusal": None},
            "logprobs": self._scores(result.logprobs) if self._scored else None,
            **endings(result),
            **({"token_ids": list(result.token_ids)} if self._ids else {}),
        }

    def _piece(self, text: str, reasoning: str) -> Object:
        delta: Object = {"role": "assistant"} if self.first else {}
        if text or not reasoning:
            delta["content"] = text
        if reasoning:
            delta["reasoning_content"] = reasoning
        return {"delta": delta}

    def _ended(self) -> Object:
        return {"delta": {}}

    def _of_tokens(self, tokens: Sequence[TokenLogprobs]) -> Object:
        linear = self._spec.params.post_sampling_probs
        return {"content": chat_logprobs(tokens, self._tokenizer, linear=linear), "refusal": None}


class TextChoice(Choice):
    """Where an echoed prompt is scored, all log-probabilities come with the end of the choice: those of the prompt are
    not among what is streamed."""

    def __init__(self, index: int, spec: SequenceSpec, tokenizer: Tokenizer, *, ids: bool) -> None:
        super().__init__(index, spec, tokenizer, ids=ids)
        self._legacy = LegacyLogprobs(tokenizer, spec.params)

    def whole(self, result: RequestResult) -> Object:
        reasoning = {} if result.reasoning is None else {"reasoning_content": result.reasoning}
        scores = self.prompt_scores(result)
        return {
            "index": self._index,
            "text": result.text,
            **reasoning,
            "logprobs": self._all_logprobs(result) if self._scored else None,
            **endings(result),
            **({} if scores is None else {"prompt_logprobs": scores}),
            **({"token_ids": list(result.token_ids), "prompt_token_ids": list(result.prompt_ids)} if self._ids else {}),
        }

    def end(self, result: RequestResult) -> list[Object]:
        chunks = super().end(result)
        if self._ids:
            chunks[-1]["prompt_token_ids"] = list(result.prompt_ids)
        if (scores := self.prompt_scores(result)) is not None:
            chunks[-1]["prompt_logprobs"] = scores
        return chunks

    def _piece(self, text: str, reasoning: str) -> Object:
        return {"text": text, **({"reasoning_content": reasoning} if reasoning else {})}

    def _ended(self) -> Object:
        return {"text": ""}

    def _next_logprobs(self) -> Object | None:
        return None if self._spec.echo else super()._next_logprobs()

    def _last_logprobs(self, result: RequestResult) -> Object | None:
        if self._spec.echo and self._scored:
            return self._all_logprobs(result)
        return super()._last_logprobs(result)

    def _all_logprobs(self, result: RequestResult) -> Object:
        reply = result.logprobs
        if not self._spec.echo:
            return self._scores(reply)
        prompt = self._legacy.prompt(result.prompt_ids, result.prompt_logprobs)
        return joined([prompt, self._of_tokens(reply)])

    def _of_tokens(self, tokens: Sequence[TokenLogprobs]) -> Object:
        return self._legacy.reply(tokens)


def endings(result: RequestResult) -> Object:
    """How a choice ended (docs/spec/clients.md 0.4)."""
    return {
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "finish_cause": result.cause,
    }
