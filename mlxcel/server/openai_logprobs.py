"""Log-probabilities in OpenAI's two shapes, and those of the prompt in vLLM's (docs/spec/clients.md 3.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxcel.core.plan import TokenLogprobs
from mlxcel.gather import log_of
from mlxcel.text.detokeniser import Detokeniser

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.core.tokenizer import Tokenizer


def token_piece(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token says, or how it is spelled where it says nothing."""
    return tokenizer.token_bytes(token) or tokenizer.token_text(token).encode()


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, *, linear: bool) -> list[dict[str, Any]]:
    """The `content` of a chat choice's `logprobs`. With `linear` the values are probabilities. Text that is no whole
    character is U+FFFD; `bytes` are exact."""

    def entry(token: int, value: float) -> dict[str, Any]:
        piece = token_piece(tokenizer, token)
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": log_of(value) if linear else value,
            "bytes": list(piece),
        }

    return [
        {**entry(each.token, each.logprob), "top_logprobs": [entry(token, value) for token, value in each.top]}
        for each in tokens
    ]


class LegacyLogprobs:
    """The `logprobs` of one choice of /v1/completions, in as many parts as it is sent in.

    A token that is no whole text is spelled `bytes:\\xf0\\x9f`, so that two of them stay apart. `text_offset` counts
    the characters that stand before a token in the choice's text.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._linear, self._most = params.post_sampling_probs, params.logprobs or 0
        self._text = Detokeniser(tokenizer, skip_special=params.skip_special_tokens)
        self._length = 0

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of an echoed prompt: what stands before its first token is nothing, which says nothing of it."""
        return self._part(
            [
                (token, None if score is None else score.logprob, None if score is None else score.top[: self._most])
                for token, score in zip(ids, scores, strict=True)
            ],
            linear=False,
        )

    def reply(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._part([(each.token, each.logprob, each.top) for each in tokens], linear=self._linear)

    def _part(
        self, tokens: Sequence[tuple[int, float | None, Sequence[tuple[int, float]] | None]], *, linear: bool
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, value, top in tokens:
            part["tokens"].append(self._spelled(token))
            part["token_logprobs"].append(_plain(value, linear))
            part["top_logprobs"].append(None if value is None or top is None else self._best(token, value, top, linear))
            part["text_offset"].append(self._length)
            self._length += len(self._text.push(token))
        return part

    def _best(self, token: int, value: float, top: Sequence[tuple[int, float]], linear: bool) -> dict[str, Any]:
        """The best ones, best first, and the token itself. Of two that are spelled alike the better one counts."""
        found: dict[str, Any] = {}
        for each, chance in (*top, (token, value)):
            found.setdefault(self._spelled(each), _plain(chance, linear))
        return found

    def _spelled(self, token: int) -> str:
        piece = token_piece(self._tokenizer, token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Parts of one choice as one."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def logprobs_by_id(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs | None], most: int, *, linear: bool = False
) -> list[dict[str, dict[str, Any]] | None]:
    """Of each token, None where there is no score: its own id and the `most` best ones with value, rank and text. With
    `linear` the scores are probabilities."""

    def entry(token: int, value: float, rank: int | None) -> dict[str, Any]:
        text = token_piece(tokenizer, token).decode("utf-8", "replace")
        return {"logprob": _plain(value, linear), "rank": rank, "decoded_token": text}

    found: list[dict[str, dict[str, Any]] | None] = []
    for score in scores:
        if score is None:
            found.append(None)
            continue
        ranks = {token: place for place, (token, _) in enumerate(score.top, start=1)}
        values = {score.token: score.logprob, **dict(score.top[:most])}
        found.append({str(token): entry(token, value, ranks.get(token)) for token, value in values.items()})
    return found


def _plain(value: float | None, linear: bool) -> float | None:
    return log_of(value) if linear and value is not None else value
