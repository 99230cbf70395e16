"""Chapter 5 of docs/spec/engine.md, as far as eos, stop ids, max_tokens, context and plugins' steps go."""

import pytest
from engine_rows import opened, run_to_end, scripted

from mlxcel.testing.byte_tokenizer import EOS, TURN_END


class Vowels:
    """A plugin's step: ends at the n-th vowel and names it."""

    def __init__(self, limit):
        self._limit = limit

    def open(self, spec):
        return []

    def check(self, state, output, text):
        if chr(output[-1]) in "aeiou":
            state.append(chr(output[-1]))
        return "".join(state) if len(state) >= self._limit else None


def ended(script, *, context=256, steps=None, **params):
    it = scripted({"a": script}, context=context, finish_steps=steps)
    row, plan = opened(it.engine, "a", **params)
    output, text, outcome = run_to_end(it.engine, row, plan)
    return bytes(output), text, outcome.cause, outcome.detail


@pytest.mark.parametrize("end", [EOS, TURN_END])
def test_h_c5_no_end_id_is_printed_whatever_skip_says(end):
    """Spec F7: the whole union ends, none of it is text."""
    for skip in (True, False):
        assert ended([*b"hi", end, *b"xx"], skip_special_tokens=skip) == (b"hi", "hi", "eos", None)


def test_a_stop_id_is_named_and_wins_over_eos():
    """Spec 5.1 row 1: U before E."""
    assert ended([*b"hi", EOS], stop_token_ids=[EOS]) == (b"hi", "hi", "stop_token", EOS)
    assert ended([*b"hi", EOS], stop_token_ids=[ord("i")]) == (b"h", "h", "stop_token", ord("i"))


PAIRS = [
    ("eos before max_tokens", [*b"hi", EOS], {"max_tokens": 3}, 256, None, (b"hi", "hi", "eos", None)),
    ("max_tokens before context", [*b"hello"], {"max_tokens": 5}, 8, None, (b"hello", "hello", "max_tokens", None)),
    ("context before a plugin", [*b"hello"], {}, 5, Vowels(1), (b"he", "he", "context", None)),
    ("max_tokens before a plugin", [*b"hello"], {"max_tokens": 2}, 256, Vowels(1), (b"he", "he", "max_tokens", None)),
    ("eos before a plugin", [EOS], {}, 256, Vowels(0), (b"", "", "eos", None)),
    ("a plugin alone", [*b"hello", EOS], {}, 256, Vowels(2), (b"hello", "hello", "vowels", "eo")),
]


@pytest.mark.parametrize(
    ("script", "params", "context", "step", "expected"), [c[1:] for c in PAIRS], ids=[c[0] for c in PAIRS]
)
def test_the_earlier_cause_wins(script, params, context, step, expected):
    steps = {"vowels": step} if step else None
    assert ended(script, context=context, steps=steps, **params) == expected


def test_plugins_run_in_registered_order():
    steps = {"second": Vowels(2), "first": Vowels(2)}
    assert ended([*b"hello"], steps=steps)[2] == "second"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_h_a5_a_limit_inside_a_character_shows_what_decode_shows(cut):
    """Spec T5: streamed text at the limit equals the decode of the same ids."""
    emoji = "🏨".encode()
    output, text, cause, _ = ended([*b"a", *emoji], max_tokens=1 + cut)
    assert (text, cause) == (output.decode(errors="replace"), "max_tokens")


def test_h_i5_max_tokens_zero_one_and_huge():
    assert ended([*b"hi", EOS], max_tokens=0) == (b"", "", "max_tokens", None)
    assert ended([*b"hi", EOS], max_tokens=1) == (b"h", "h", "max_tokens", None)
    assert ended([*b"hi", EOS], max_tokens=2**40) == (b"hi", "hi", "eos", None)
