"""Replies in llama.cpp's shape (docs/spec/clients.md 3.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from mlxcel.core.plan import TokenLogprobs
from mlxcel.core.result import RequestResult
from mlxcel.report import sampling, timings
from mlxcel.server.openai_logprobs import logprobs_by_id, token_piece

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.core.tokenizer import Tokenizer

STOP_TYPES: Final[Mapping[str, str]] = {
    "eos": "eos",
    "stop_token": "eos",
    "grammar": "eos",
    "stop_string": "word",
}
"""finish_cause -> `stop_type`; the others are limits (docs/spec/clients.md 0.4)."""

NO_SLOT: Final = -1
"""`id_slot` of a reply: a row is nobody's once its reply is there."""


@attrs.frozen
class NativeReply:
    """How the replies of one request are written. `given` are the values of its own that `generation_settings` names
    beside the sampling parameters."""

    model: str
    tokenizer: Tokenizer
    vocab: int
    given: Mapping[str, Any]
    return_tokens: bool = False
    response_fields: Sequence[str] = ()

    def whole(self, index: int, prompt: str, result: RequestResult) -> dict[str, Any]:
        """The reply of choice `index`, counted over all prompts; `prompt` is the text of its own."""
        reasoning = {} if result.reasoning is None else {"reasoning_content": result.reasoning}
        tokens = result.token_ids if self.return_tokens else ()
        made = self._ended(index, prompt, result, result.text, tokens)
        scored = {} if result.params.logprobs is None else self.probabilities(result.logprobs, result.params)
        return projected({**made, **reasoning, **scored}, self.response_fields)

    def last(
        self, index: int, prompt: str, result: RequestResult, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """As `whole`, at the end of a stream: of ids and log-probabilities it has what came with no text."""
        made = self._ended(index, prompt, result, "", tokens)
        scored = self.probabilities(logprobs, result.params) if logprobs else {}
        return projected({**made, **scored}, self.response_fields)

    def probabilities(self, tokens: Sequence[TokenLogprobs], params: SamplingParams) -> dict[str, Any]:
        """`completion_probabilities`, an entry a token."""
        name = "prob" if params.post_sampling_probs else "logprob"
        entries = [
            {
                **self._token(token.token),
                name: token.logprob,
                f"top_{name}s": [{**self._token(found), name: value} for found, value in token.top],
            }
            for token in tokens
        ]
        return {"completion_probabilities": entries}

    def _ended(
        self, index: int, prompt: str, result: RequestResult, text: str, tokens: Sequence[int]
    ) -> dict[str, Any]:
        params = result.params
        made: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": list(tokens),
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(result.token_ids),
            "tokens_evaluated": len(result.prompt_ids),
            "generation_settings": generation_settings(result, self.vocab, self.given),
            "prompt": prompt,
            "has_new_line": "\n" in result.text,
            "truncated": result.cause == "context",
            "stop_type": STOP_TYPES.get(result.cause, "limit"),
            "stopping_word": result.detail if result.cause == "stop_string" else "",
            "tokens_cached": result.cached_tokens,
            "timings": timings(result),
            "finish_cause": result.cause,
        }
        if params.prompt_logprobs is not None and result.prompt_logprobs:
            scores = logprobs_by_id(self.tokenizer, result.prompt_logprobs, params.prompt_logprobs)
            made["prompt_logprobs"] = scores
        if result.warnings:
            made["warnings"] = list(result.warnings)
        return made

    def _token(self, token: int) -> dict[str, Any]:
        spelled = token_piece(self.tokenizer, token)
        return {"id": token, "token": spelled.decode("utf-8", "replace"), "bytes": list(spelled)}


def generation_settings(result: RequestResult, vocab: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that were applied, under our names and under llama.cpp's where these differ."""
    params = result.params
    return {
        **sampling(result, vocab),
        "n_predict": params.max_tokens,
        "repeat_penalty": params.repetition_penalty,
        "n_probs": params.logprobs or 0,
        **given,
    }


def projected(made: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """What `response_fields` leaves: "a/b" is `b` inside `a`, lifted, and what is not there is left out. None: all."""
    if not fields:
        return made
    kept: dict[str, Any] = {}
    for path in fields:
        found: Any = made
        for name in path.split("/"):
            if not isinstance(found, dict) or name not in found:
                break
            found = found[name]
        else:
            kept[path.rpartition("/")[2]] = found
    return kept
