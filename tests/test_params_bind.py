"""What needs the model, the prompt or an operator's caps: one function for every client (spec S41, S46, F5, H-P3)."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from engine_rows import scripted, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.core.bind_params import Caps, bind_params
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import EOS, ByteTokenizer

TOKENIZER = ByteTokenizer()
ROWS = TOKENIZER.size + 5  # more rows in the model than tokens


def bound(
    prompt_length: int = 10,
    context: int = 100,
    vocab: int = ROWS,
    max_n: int = 16,
    max_logprobs: int = 20,
    eos_ids: tuple[int, ...] = (EOS,),
    **given: Any,
) -> SamplingParams:
    return bind_params(
        SamplingParams(**given),
        vocab=vocab,
        tokenizer=TOKENIZER,
        eos_ids=eos_ids,
        prompt_length=prompt_length,
        context=context,
        caps=Caps(max_n, max_logprobs),
    )


def refused(field: str, *words: str, **given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        bound(**given)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_needs_no_model_is_left_as_it_is() -> None:
    params = SamplingParams(temperature=0.5, stop="x", logit_bias=[[5, 1]], seed=3, max_tokens=7)
    assert bound(temperature=0.5, stop="x", logit_bias=[[5, 1]], seed=3, max_tokens=7) == params


@pytest.mark.parametrize(("asked", "applied"), [(10**6, ROWS), (ROWS, ROWS), (ROWS - 1, ROWS - 1), (0, 0), (-1, -1)])
def test_h_m5_top_k_is_at_most_the_vocabulary(asked: int, applied: int) -> None:
    assert bound(top_k=asked).top_k == applied


@pytest.mark.parametrize(
    ("cap", "vocab", "asked", "applied"),
    [
        (20, 317, 20, 20),
        (20, 317, 0, 0),
        (20, 317, None, None),
        (20, 317, 21, "21"),
        (20, 317, -1, "-1, all 317"),
        (20, 317, 317, "317"),
        (20, 317, 2**31 - 1, "at most 20"),
        (20, 7, -1, 7),
        (20, 7, 20, 7),
        (-1, 317, -1, 317),
        (-1, 317, 317, 317),
        (-1, 317, 316, 316),
        (-1, 317, 318, "at most 317"),
        (0, 317, 0, 0),
        (0, 317, 1, "at most 0"),
    ],
)
@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_h_p5_minus_one_is_the_vocabulary_under_the_same_cap(
    field: str, cap: int, vocab: int, asked: int | None, applied: int | str | None
) -> None:
    """Spec S41, H-M5."""
    given: dict[str, Any] = {field: asked, "vocab": vocab, "max_logprobs": cap}
    if isinstance(applied, str):
        refused(field, field, applied, **given)
    else:
        assert getattr(bound(**given), field) == applied


def test_h_p3_counts_are_bounded_before_anything_is_made() -> None:
    """H-I2, H-P3; docs/spec/clients.md 3.5: the cap is in the message."""
    assert bound(n=16).n == 16
    refused("n", "n is 17", "at most 16", n=17)
    refused("n", "5000000", n=5_000_000)
    refused("n", "n is 2", "at most 1 here", n=2, max_n=1)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_are_in_the_vocabulary(field: str) -> None:
    """Padding rows of the model have ids too."""
    assert getattr(bound(**{field: [0, ROWS - 1]}), field) == (0, ROWS - 1)
    refused(field, str(ROWS), f"0 to {ROWS - 1}", **{field: [0, ROWS]})


def test_h_i14_biases_are_in_the_vocabulary() -> None:
    assert bound(logit_bias={str(ROWS - 1): 1}).logit_bias == ((ROWS - 1, 1.0),)
    refused("logit_bias", 'logit_bias["999999"]', logit_bias={"999999": 5})
    refused("logit_bias", logit_bias=[[ROWS, False]])


def test_a_text_in_a_bias_stands_for_each_of_its_tokens() -> None:
    """docs/spec/clients.md 0.3. The byte tokenizer's ids are bytes."""
    params = bound(logit_bias=[["ab", 2], [ord("b"), 1], ["c", False], [ord("c"), 5], ["aa", -1]])
    assert params.logit_bias == ((ord("a"), 0.0), (ord("b"), 3.0), (ord("c"), None))
    assert bound(logit_bias=[["", 1]] * 0).logit_bias == ()
    alphabet = "".join(map(chr, range(97, 123)))
    assert len(bound(logit_bias=[[alphabet, 1]]).logit_bias) == 26


@pytest.mark.parametrize("biases", [[[5, 80], [5, 80]], [["aa", 80]], [["a", -100], [ord("a"), -100], ["ab", -1]]])
def test_entries_add_up_beyond_what_one_may_be(biases: list[Any]) -> None:
    """Engine 4.4: entries for one id add up. The range is that of an entry, so a sum stays what it is when the record
    is copied, changed or bound."""
    params = SamplingParams(logit_bias=biases)
    once = bound(logit_bias=biases)
    assert max(abs(amount or 0) for _, amount in once.logit_bias) > 100
    assert params.clone(top_k=3).logit_bias == copy.deepcopy(params).logit_bias == params.logit_bias
    assert pickle.loads(pickle.dumps(once)) == once.clone(seed=once.seed) == once
    with pytest.raises(RequestError, match="from -100 to 100"):
        SamplingParams(logit_bias=tuple(once.logit_bias))


def test_min_keep_is_at_most_the_vocabulary() -> None:
    assert bound(min_keep=ROWS).min_keep == ROWS
    refused("min_keep", str(ROWS + 1), f"at most {ROWS}", min_keep=ROWS + 1)


@pytest.mark.parametrize("asked", [-1, 89, 90, 91, 2**40])
def test_h_i5_a_reply_is_bounded_by_the_context_and_by_nothing_else(asked: int) -> None:
    """Spec F5."""
    assert bound(max_tokens=asked).max_tokens == asked
    most = 89 if asked == 89 else 90
    assert bound(max_tokens=asked, min_tokens=most).min_tokens == most
    words = f"min_tokens {most + 1} is above" if asked in (89, 90) else "min_tokens is 91, it must be at most 90"
    refused("min_tokens", words, max_tokens=asked, min_tokens=most + 1)


NOTHING = [
    {"allowed_token_ids": [ROWS - 1]},
    {"allowed_token_ids": [65, 66], "logit_bias": [[65, False], ["B", False]]},
    {"allowed_token_ids": [65, 66], "bad_words": ["A"], "logit_bias": [[66, False]]},
    {"allowed_token_ids": [EOS], "ignore_eos": True},
    {"allowed_token_ids": [EOS], "min_tokens": 1},
    {"allowed_token_ids": [EOS, 65], "min_tokens": 1, "stop_token_ids": [65]},
]


@pytest.mark.parametrize("given", NOTHING, ids=str)
def test_masks_that_leave_nothing_are_refused(given: dict[str, Any]) -> None:
    """Spec S46."""
    refused("allowed_token_ids", "leaves no token", **given)
    assert bound(**{**given, "allowed_token_ids": [*given["allowed_token_ids"], 67]})
    assert bound(**{**given, "allowed_token_ids": None})


def test_biases_can_remove_a_small_vocabulary_whole() -> None:
    never = [[token, False] for token in range(7)]
    assert bound(vocab=7, eos_ids=(6,), logit_bias=never[:6]).logit_bias
    refused("logit_bias", "leaves no token", vocab=7, eos_ids=(6,), logit_bias=never)
    refused("logit_bias", "leaves no token", vocab=7, eos_ids=(6,), logit_bias=never[:6], ignore_eos=True)
    assert bound(vocab=7, eos_ids=(6,), logit_bias=never[:6], ignore_eos=True, stop_token_ids=[6])
    refused("bad_words", "leaves no token", vocab=1, eos_ids=(), bad_words=["\x00"])


IDS = st.lists(st.integers(0, 4), max_size=5, unique=True)
SMALL = ChainSampler(vocab=5, tokenizer=TOKENIZER)


@settings(max_examples=300, deadline=None)
@given(
    allowed=st.none() | IDS.filter(bool),
    never=IDS,
    words=IDS,
    stops=IDS,
    ends=IDS,
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 1),
)
def test_masks_are_refused_where_the_first_draw_would_fail(
    allowed: list[int] | None,
    never: list[int],
    words: list[int],
    stops: list[int],
    ends: list[int],
    ignore_eos: bool,
    min_tokens: int,
) -> None:
    """Spec S46: what is refused at once is what the sampler itself would have no token for."""
    params = SamplingParams(
        temperature=0,
        seed=0,
        allowed_token_ids=allowed,
        logit_bias=[[token, False] for token in never],
        bad_words=[chr(token) for token in words],
        stop_token_ids=stops,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
    )
    row = SMALL.open(SequenceSpec("row", np.zeros(3, np.int32), params, frozenset(ends)))
    packed = SMALL.pack([row], [3], [False])
    carry = Carry(np.zeros(1, np.int32), np.zeros(1, np.float32))
    status = int(SMALL.draw(np, np.zeros((1, 5), np.float32), packed, carry).status[0])
    assert status in (0, 2)
    with pytest.raises(RequestError, match="leaves no token") if status else nullcontext():
        bind_params(params, vocab=5, tokenizer=TOKENIZER, eos_ids=ends, prompt_length=3, context=9)


def test_what_is_bound_can_be_bound_again() -> None:
    once = bound(logit_bias=[["ab", 2]], top_k=10**6, logprobs=5)
    again = bind_params(once, vocab=ROWS, tokenizer=TOKENIZER, eos_ids=(), prompt_length=10, context=100)
    assert again == once


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stop_token_ids": [TOKENIZER.size]}, "stop_token_ids"),
        ({"allowed_token_ids": [TOKENIZER.size]}, "allowed_token_ids"),
        ({"logit_bias": [[TOKENIZER.size, 1]]}, "logit_bias"),
        ({"logit_bias": [["text", 1]]}, "logit_bias"),
        ({"min_tokens": 10**6}, "min_tokens"),
    ],
)
def test_the_engine_refuses_what_nobody_bound(given: dict[str, Any], field: str) -> None:
    """Spec E6: before any forward, and nothing stays open."""
    engine = scripted({"a": [65]}, context=64).engine
    with pytest.raises(RequestError) as caught:
        engine.open(spec("a", **given))
    assert caught.value.field == field
    assert engine.open_sequences == ()
    assert engine.kv_stats.owned == 0
