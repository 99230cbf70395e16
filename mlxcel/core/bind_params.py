"""What of the parameters needs the model, the prompt or the server's caps to be checked: once, for every client, before
anything is queued or allocated (spec S46)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs

from mlxcel.core.param_records import MOST_BIASES, LogitBias, added_up
from mlxcel.core.params import SamplingParams
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import RequestError


@attrs.frozen
class Caps:
    """What an operator allows a request. `max_logprobs` -1: as many as the vocabulary has."""

    max_n: int = 16
    max_logprobs: int = 20


def bind_params(
    params: SamplingParams,
    *,
    vocab: int,
    tokenizer: Tokenizer,
    eos_ids: Collection[int],
    prompt_length: int,
    context: int,
    caps: Caps = Caps(),
) -> SamplingParams:
    """The parameters as they apply to one prompt of P = `prompt_length` tokens, V = `vocab`, N = `context`: texts of
    `logit_bias` are ids, `top_k` is at most V, a number of log-probabilities of -1 is V.

    Raises RequestError with the field, the value and the bound it breaks. P < N is the caller's to check.
    """
    if params.n > caps.max_n:
        raise _over("n", params.n, f"at most {caps.max_n} here")
    lists = {
        field: cap_logprobs(field, asked, vocab, caps.max_logprobs)
        for field in ("logprobs", "prompt_logprobs")
        if (asked := getattr(params, field)) is not None
    }
    bound = params.clone(
        top_k=min(params.top_k, vocab),
        logit_bias=_biases_by_id(params.logit_bias, tokenizer),
        **lists,
    )
    check_bounds(bound, vocab=vocab, max_new=reply_bound(bound, prompt_length, context))
    _require_a_token(bound, min(vocab, tokenizer.size), frozenset(eos_ids), tokenizer)
    return bound


def reply_bound(params: SamplingParams, prompt_length: int, context: int) -> int:
    """Tokens that a reply may have: what was asked for, and what the context leaves (spec F5)."""
    room = context - prompt_length
    return room if params.max_tokens == -1 else min(params.max_tokens, room)


def check_bounds(params: SamplingParams, *, vocab: int, max_new: int) -> None:
    """RequestError for ids outside the vocabulary, and for minima that the reply cannot reach."""
    for field in ("stop_token_ids", "allowed_token_ids"):
        for token in getattr(params, field) or ():
            _check_id(field, token, vocab)
    for token, _ in params.logit_bias:
        if isinstance(token, str):
            raise RequestError(
                "logit_bias holds a text that nobody encoded", field="logit_bias", hint="take it from bind_params"
            )
        _check_id(f'logit_bias["{token}"]', token, vocab)
    if params.min_keep > vocab:
        raise _over("min_keep", params.min_keep, f"at most {vocab}, the size of the vocabulary")
    if params.min_tokens > max_new:
        words = f"at most {max_new}, which max_tokens and the context leave"
        raise _over("min_tokens", params.min_tokens, words)


def _over(field: str, value: int, words: str) -> RequestError:
    return RequestError(f"{field} is {value}, it must be {words}", field=field)


def _check_id(field: str, token: int, vocab: int) -> None:
    if token >= vocab:
        raise RequestError(
            f"{field}: {token} is not in the vocabulary, whose ids are 0 to {vocab - 1}", field=field.split("[")[0]
        )


def cap_logprobs(field: str, asked: int, vocab: int, cap: int) -> int:
    """A number of log-probabilities: -1 means V and is under the same cap, as is V spelled out; a cap of -1 is V (spec
    S41). RequestError above it."""
    most = vocab if cap == -1 else cap
    count = vocab if asked == -1 else asked
    if count > most:
        said = f"-1, all {vocab}" if asked == -1 else str(asked)
        raise RequestError(f"{field} is {said}, it must be at most {most}", field=field)
    return min(count, vocab)


def _biases_by_id(biases: LogitBias, tokenizer: Tokenizer) -> LogitBias:
    """Each text becomes an entry for each of its tokens, special tokens read as plain text."""

    def ids(token: int | str) -> Iterable[int]:
        return tokenizer.encode(token, add_special=False, parse_special=False) if isinstance(token, str) else (token,)

    found = added_up((each, amount) for token, amount in biases for each in ids(token))
    if len(found) > MOST_BIASES:
        raise _over("logit_bias", len(found), f"at most {MOST_BIASES} tokens, those of its texts included")
    return found


def _require_a_token(params: SamplingParams, size: int, eos_ids: frozenset[int], tokenizer: Tokenizer) -> None:
    """RequestError when what always holds removes every one of the ids below `size` (spec S46)."""
    removed = {token for token, amount in params.logit_bias if amount is None}
    for word in params.bad_words:
        for text in (word, f" {word}"):
            ids = tokenizer.encode(text, add_special=False, parse_special=False)
            removed.update(ids if len(ids) == 1 else ())
    if params.ignore_eos:
        removed.update(eos_ids.difference(params.stop_token_ids))
    if params.min_tokens and params.max_tokens != 0:
        removed.update(eos_ids.union(params.stop_token_ids))
    allowed = params.allowed_token_ids
    if allowed is None:
        left = sum(1 for token in removed if isinstance(token, int) and token < size) < size
    else:
        left = any(token < size and token not in removed for token in allowed)
    if not left:
        field = "allowed_token_ids" if allowed is not None else "logit_bias" if params.logit_bias else "bad_words"
        raise RequestError(
            f"{field} leaves no token that could be drawn",
            field=field,
            hint="biases of false, bad_words, ignore_eos and min_tokens remove tokens as well: leave one of them out",
        )
