"""What the choices of a reply stand in: its identity, and what it used (docs/spec/clients.md 3.6)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.core.result import RequestResult
from mlxcel.text.detokeniser import Detokeniser

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer


@attrs.frozen
class Head:
    """The same in every chunk of a reply. `created` is Unix time; `fingerprint` names whose numbers these are: two
    replies with the same one came from the same weights, backend, level and version."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object of the reply."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
            **more,
        }


class Usage:
    """Tokens of one reply, added up over its prompts and choices."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompt = self._completion = self._cached = self._truncated = self._reasoning = 0

    def prompt(self, tokens: int) -> None:
        self._prompt += tokens

    def cached(self, tokens: int) -> None:
        self._cached += tokens

    def drawn(self, tokens: int) -> None:
        self._completion += tokens

    def ended(self, result: RequestResult, *, first: bool) -> None:
        """What is known at the end of a choice, of which `first` is the first of its prompt."""
        if first:
            self._truncated += result.truncated_tokens
        self._reasoning += reasoning_tokens(result, self._tokenizer)

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached, "truncated_tokens": self._truncated},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }


def usage_of(prompts: Sequence[Sequence[RequestResult]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Of a reply that is whole: the results of its choices, prompt by prompt."""
    usage = Usage(tokenizer)
    for choices in prompts:
        usage.prompt(len(choices[0].prompt_ids))
        usage.cached(choices[0].cached_tokens)
        for place, result in enumerate(choices):
            usage.drawn(len(result.token_ids))
            usage.ended(result, first=place == 0)
    return usage.report()


def reasoning_tokens(result: RequestResult, tokenizer: Tokenizer) -> int:
    """Tokens up to the end of what was split off as reasoning, its markers not counted behind it."""
    if not result.reasoning:
        return 0
    stream = Detokeniser(tokenizer, skip_special=False)
    pieces = [stream.push(token) for token in result.token_ids]
    found = "".join(pieces).find(result.reasoning)
    if found < 0:
        return len(pieces)
    ends = accumulate(len(piece) for piece in pieces)
    return next(count for count, end in enumerate(ends, start=1) if end >= found + len(result.reasoning))
