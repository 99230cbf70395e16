"""Prompts of llama.cpp's route: which lists are one prompt, what its parts become, and what is refused where."""

import pytest

from mlxcel.asked import AskedPrompt
from mlxcel.errors import EmptyPrompt, RequestError, UnsupportedField
from mlxcel.server.native_prompts import native_prompts
from mlxcel.testing.byte_tokenizer import BOS, TURN_END, ByteTokenizer

VOCAB = 300


def read(prompt, *, adds_bos=True, added=True, most=8):
    tokenizer = ByteTokenizer(adds_bos=adds_bos)
    return native_prompts(prompt, tokenizer, vocab=VOCAB, added=added, most=most)


@pytest.mark.parametrize(
    ("prompt", "read_as"),
    [
        ("hi", [("hi", None)]),
        ("", [("", None)]),  # whether a text comes to a token is known once it is encoded
        ([1, 2], [(None, (1, 2))]),
        ([1, "a", 2], [(None, (1, ord("a"), 2))]),
        (["a", 1, "b"], [(None, (BOS, ord("a"), 1, ord("b")))]),
        ([1, "<|im_end|>"], [(None, (1, TURN_END))]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["a"], [("a", None)]),
        ([[1], [2, 3]], [(None, (1,)), (None, (2, 3))]),
        (["a", [1, "b"], [2]], [("a", None), (None, (1, ord("b"))), (None, (2,))]),
        ([["a", "b"]], [(None, (BOS, ord("a"), ord("b")))]),
    ],
)
def test_prompts_of_every_kind(prompt, read_as):
    """clients.md 3.3: a text, ids, a mixed list, a list of these."""
    found = [(one.text, None if one.ids is None else tuple(one.ids)) for one in read(prompt)]
    assert found == read_as


def test_a_mixed_list_begins_as_a_text_does():
    """The BOS is the tokenizer's to add, in front of a text that begins the prompt, unless the request says no."""
    assert list(read(["a", 1])[0].ids) == [BOS, ord("a"), 1]
    assert list(read(["a", 1], added=False)[0].ids) == [ord("a"), 1]
    assert list(read(["a", 1], adds_bos=False)[0].ids) == [ord("a"), 1]
    assert list(read([1, "a"])[0].ids) == [1, ord("a")]


@pytest.mark.parametrize(
    ("prompt", "error", "field"),
    [
        (None, RequestError, "prompt"),
        (5, RequestError, "prompt"),
        (True, RequestError, "prompt"),
        ({"prompt_string": "a"}, UnsupportedField, "prompt"),
        ([{"prompt_string": "a"}], UnsupportedField, "prompt[0]"),
        ([], EmptyPrompt, "prompt"),
        ([[1], []], EmptyPrompt, "prompt[1]"),
        (["a", ["", ""]], EmptyPrompt, "prompt[1]"),
        ([-1], RequestError, "prompt[0]"),
        ([1, VOCAB], RequestError, "prompt[1]"),
        ([2**63], RequestError, "prompt[0]"),
        ([True], RequestError, "prompt[0]"),
        ([1.5], RequestError, "prompt[0]"),
        ([None], RequestError, "prompt[0]"),
        (["a", 1.5], RequestError, "prompt[1]"),
        (["a", 1, None], RequestError, "prompt[2]"),
        ([[1], ["a", VOCAB]], RequestError, "prompt[1][1]"),
        ([[1], [2, [3]]], RequestError, "prompt[1][1]"),
        ([["a", ["b"]]], RequestError, "prompt[0][1]"),
        (["a", 1, "\ud800"], RequestError, "prompt[2]"),
        (["a", "\ud800"], RequestError, "prompt[1]"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_place(prompt, error, field):
    """clients.md 3.4: the path is the one that the client wrote. Cases H-I12 and H-P12."""
    with pytest.raises(error) as refused:
        read(prompt, adds_bos=False)
    assert refused.value.field == field


def test_the_cap_is_checked_before_a_prompt_is_looked_at():
    """clients.md 3.5: more prompts than may be."""
    with pytest.raises(RequestError, match="3 prompts, at most 2"):
        read([[-1], "a", "b"], most=2)
    assert read(["a", "b"], most=2) == [AskedPrompt(text="a"), AskedPrompt(text="b")]
