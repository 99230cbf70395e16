"""Replies of many tokens or scores: others do not wait for what their words cost (docs/spec/clients.md rule 4)."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.core.plan import TokenLogprobs
from mlxcel.server.openai_reply import reasoning_tokens
from mlxcel.server.results import BIG, whole
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.text.detokeniser import Detokeniser


def result(tokens: int, *, scored: int = 0, top: int = 0, prompt: int = 0) -> Any:
    score = TokenLogprobs(5, -1.0, ((5, -1.0),) * top)
    scores = {"logprobs": (score,) * scored, "prompt_logprobs": (None, score)[:prompt] + (score,) * max(0, prompt - 2)}
    return SimpleNamespace(token_ids=(5,) * tokens, **scores)


@pytest.mark.parametrize(
    ("results", "beside"),
    [
        ([[result(BIG - 1)]], False),
        ([[result(BIG)]], True),
        ([[result(BIG // 2), result(BIG // 4)], [result(BIG // 4)]], True),
        ([[result(200, scored=200, top=20)]], True),
        ([[result(200, scored=200, top=0)]], False),
        ([[result(0, prompt=BIG)]], False),  # the first token of a prompt has no score
        ([[result(0, prompt=BIG + 1)]], True),
    ],
)
def test_a_big_reply_is_put_together_beside_the_event_loop(results: Any, beside: bool) -> None:
    where: list[threading.Thread] = []

    def make(found: Any) -> Any:
        assert found is results
        where.append(threading.current_thread())
        return {"ok": True}

    reply = asyncio.run(whole(make, results))
    assert bytes(reply.body) == b'{"ok":true}'
    assert (where[0] is not threading.current_thread()) is beside


def test_what_goes_wrong_there_is_raised() -> None:
    def make(found: Any) -> Any:
        raise ValueError("a mistake")

    for tokens in (1, BIG):
        with pytest.raises(ValueError, match="a mistake"):
            asyncio.run(whole(make, [[result(tokens)]]))


TEXT = st.text("ab<é😀", max_size=12)


@given(TEXT, TEXT, TEXT)
def test_tokens_of_reasoning_are_those_up_to_its_end(before: str, reasoning: str, behind: str) -> None:
    """Against its definition: the first count of tokens whose text has all of it."""
    tokenizer, ids = ByteTokenizer(), list((before + reasoning + behind).encode())
    stream, said, wanted = Detokeniser(tokenizer, skip_special=False), "", 0
    for token in ids:
        if reasoning and reasoning in said:
            break
        said += stream.push(token)
        wanted += bool(reasoning)
    found: Any = SimpleNamespace(token_ids=tuple(ids), reasoning=reasoning)
    assert reasoning_tokens(found, tokenizer) == wanted


@pytest.mark.parametrize("reasoning", [None, "", "not in it"])
def test_reasoning_that_is_none_or_not_found(reasoning: str | None) -> None:
    found: Any = SimpleNamespace(token_ids=tuple(b"hello"), reasoning=reasoning)
    assert reasoning_tokens(found, ByteTokenizer()) == (5 if reasoning else 0)
