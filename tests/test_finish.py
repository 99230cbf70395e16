"""Chapter 5 of docs/spec/engine.md, by the finish step alone; through the engine: test_endings.py."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from finish_rows import finish_row, reply
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_tokenizer import PieceTokenizer

from mlxcel.core.result import NAMED_CAUSES, OPENAI_REASON
from mlxcel.plugins.finish.bounds import IndentBound, TimeBound
from mlxcel.testing.byte_tokenizer import EOS, TURN_END, ByteTokenizer
from mlxcel.testing.clock import ManualClock

TOKENIZER = ByteTokenizer()
ENDS = frozenset({EOS, TURN_END})


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


class AtToken(Vowels):
    """Ends at the n-th token."""

    def check(self, state, output, text):
        return "here" if len(output) >= self._limit else None


class Hears:
    """A plugin's step that remembers what it is told."""

    def __init__(self):
        self.heard = []

    def open(self, spec):
        return None

    def check(self, state, output, text):
        self.heard.append((tuple(output), text))


def ended(script, *, max_new=10**6, context=10**6, clock=None, **options):
    """(ids, text, cause, detail) of a script of bytes; half a second passes before each token."""
    clock = clock or ManualClock()
    step, state = finish_row(TOKENIZER, clock=clock, eos_ids=options.pop("eos_ids", ENDS), **options)
    state.max_new, state.context = max_new, context
    state.budget_asked = max_new < 10**6
    text = ""
    for token in script:
        clock.advance(0.5)
        resolution = step.resolve(state, token)
        text += resolution.released.text
        if resolution.ending is not None:
            return bytes(state.output), text, resolution.ending.cause, resolution.ending.detail
    return bytes(state.output), text + step.flush(state).text, None, None


AT_THIRD = {  # each alone ends "x", "\n", "\n" at its third token, whose prompt is one token
    "stop_token": {"stop_token_ids": [10]},
    "eos": {"eos_ids": frozenset({10})},
    "stop_string": {"stop": ["\n\n"]},
    "time_limit": {"t_max_predict_ms": 1000},
    "indent_limit": {"n_indent": 1},
    "max_tokens": {"max_new": 3},
    "context": {"context": 4},
    "plugin": {"steps": {"plugin": AtToken(3)}},
    "loop": {"loop_detection": {"max_pattern": 1, "min_count": 2}},
}


@pytest.mark.parametrize("pair", list(combinations(AT_THIRD, 2)), ids="-".join)
def test_of_two_causes_the_earlier_wins(pair):
    """Spec 5.1, all pairs but the grammar's: one token triggers both. End ids wait for two tokens (F6)."""
    options = {"min_tokens": 2}
    for cause in pair:
        options |= AT_THIRD[cause]
    output, text, cause, _ = ended(b"x\n\nnever", **options)
    assert cause == pair[0]
    assert output == (b"x\n" if cause in ("stop_token", "eos") else b"x\n\n")
    assert text == {"stop_token": "x\n", "eos": "x\n", "stop_string": "x", "indent_limit": "x\n"}.get(cause, "x\n\n")


@pytest.mark.parametrize("end", [EOS, TURN_END])
def test_h_c5_no_end_id_is_printed_whatever_skip_says(end):
    """Spec F7: the whole union ends, none of it is text."""
    for skip in (True, False):
        assert ended([*b"hi", end, *b"xx"], skip_special_tokens=skip) == (b"hi", "hi", "eos", None)


def test_a_stop_id_is_named_and_wins_over_eos():
    """Spec 5.1 row 1: U before E."""
    assert ended([*b"hi", EOS], stop_token_ids=[EOS]) == (b"hi", "hi", "stop_token", EOS)
    assert ended([*b"hi", EOS], stop_token_ids=[ord("i")]) == (b"h", "h", "stop_token", ord("i"))


def test_an_ignored_end_is_an_ordinary_token():
    """Spec F6, F7: forced all the same it is appended, counted, and shown as special tokens are; U still ends."""
    ids = [ord("a"), EOS, ord("b"), TURN_END]
    for skip, text in ((True, "ab"), (False, "a<|eos|>b<|im_end|>")):
        got = reply(TOKENIZER, ids, eos_ids=ENDS, ignore_eos=True, skip_special_tokens=skip)
        assert (got.text, got.tokens, got.cause) == (text, 4, None)
    got = reply(TOKENIZER, ids, eos_ids=ENDS, ignore_eos=True, stop_token_ids=[TURN_END])
    assert (got.text, got.tokens, got.cause, got.detail) == ("ab", 3, "stop_token", TURN_END)


@pytest.mark.parametrize(("least", "tokens"), [(0, 1), (1, 1), (2, 3), (3, 3), (4, 4)])
def test_no_id_ends_before_min_tokens(least, tokens):
    """Spec F6: U and E alike."""
    ids = [ord("a"), EOS, ord("b"), TURN_END, EOS]
    for options in ({"eos_ids": ENDS}, {"stop_token_ids": [EOS, TURN_END]}):
        assert reply(TOKENIZER, ids, min_tokens=least, **options).tokens == tokens


def test_plugins_run_in_registered_order():
    steps = {"second": Vowels(2), "first": Vowels(2)}
    assert ended(b"hello", steps=steps)[2:] == ("second", "eo")


def test_a_plugin_hears_each_token_and_what_it_let_go():
    """After every other check but the loop's: what a stop string may still take is not released."""
    hears = Hears()
    ended(b"abxc", steps={"hears": hears}, stop=["bc"])
    assert hears.heard == [
        (tuple(b"a"), "a"),
        (tuple(b"ab"), ""),
        (tuple(b"abx"), "bx"),
        (tuple(b"abxc"), "c"),
    ]


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "least", "shown", "blanks"),
    [
        ("no line", 4, "no line", None),
        ("first\n    ok\n  no", 4, "first\n    ok\n  ", 2),
        ("first\n\n    ok", 4, "first\n", 0),  # an empty line has none
        ("a\n\tb", 1, "a\n\tb", None),
        ("a\n \t b", 3, "a\n \t b", None),
        ("a\n \tb", 3, "a\n \t", 2),
        ("\n x", 1, "\n x", None),
        ("\nx", 1, "\n", 0),
        ("a\n  \n  b", 2, "a\n  \n  b", None),  # blanks enough, then the newline is allowed
        ("a\n   ", 4, "a\n   ", None),  # undecided at the end
        ("a\r\nb", 1, "a\r\n", 0),
        ("a\n  b  c\n  d", 2, "a\n  b  c\n  d", None),
    ],
)
def test_each_line_behind_the_first_is_indented(text, least, shown, blanks):
    """Spec F21, in one token, cut at each place, and a character each."""
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in cuts:
        got = reply(PieceTokenizer(pieces), range(len(pieces)), n_indent=least)
        assert got.text == shown
        assert (got.cause, got.detail) == ((None, None) if blanks is None else ("indent_limit", blanks))


def by_lines(text, least):
    """Where F21 cuts, line by line; None where it does not."""
    at = 0
    for number, line in enumerate(text.splitlines(keepends=True)):
        blanks = len(line) - len(line.lstrip(" \t"))
        if number and blanks < least and blanks < len(line):
            return at + blanks
        at += len(line)
    return None


@settings(deadline=None, max_examples=300)
@given(st.lists(st.text("a \t\n", max_size=5), max_size=8), st.integers(1, 4))
def test_the_indent_bound_is_its_definition(pieces, least):
    bound, place = IndentBound(least), 0
    cut = None
    for piece in pieces:
        if cut is None and (kept := bound.push(piece)) is not None:
            cut = place + kept
        place += len(piece)
    assert cut == by_lines("".join(pieces), least)


def test_the_indent_bound_sees_special_tokens():
    """Spec F21, F9: the characters of the text with special tokens written out, the hidden ones too."""
    ids = [ord("a"), ord("\n"), TURN_END, ord("b")]
    for skip in (True, False):
        got = reply(TOKENIZER, ids, n_indent=1, skip_special_tokens=skip)
        assert (got.text, got.cause, got.tokens) == ("a\n", "indent_limit", 3)


def test_the_indent_cut_keeps_what_a_stop_string_held():
    """Spec F13, F21."""
    assert ended(b"a\n b\nc", n_indent=1, stop=["\nd"])[1:3] == ("a\n b\n", "indent_limit")


@pytest.mark.parametrize(("limit", "tokens"), [(0, 8), (1, 2), (500, 2), (501, 3), (1000, 3), (10**9, 8)])
def test_the_time_bound_counts_from_the_first_token(limit, tokens):
    """Spec F15: half a second a token; the first one that is at least that late ends the row."""
    output, text, cause, detail = ended(b"abcdefgh", t_max_predict_ms=limit)
    assert (len(output), text, detail) == (tokens, "abcdefgh"[:tokens], None)
    assert cause == ("time_limit" if tokens < 8 else None)


def test_the_time_bound_waits_for_no_newline():
    """Spec F15."""
    assert ended(b"a\nb", t_max_predict_ms=100)[1] == "a\n"
    assert ended(b"abc", t_max_predict_ms=100)[1] == "ab"


def test_paused_time_does_not_count():
    """Spec F15, whenever the pause: before the first token, twice, told twice."""
    clock = ManualClock()
    bound = TimeBound(1000, clock)
    bound.resume()
    bound.pause()
    clock.advance(5)
    bound.resume()
    assert not bound.passed()
    for _ in range(2):
        clock.advance(0.25)
        bound.pause()
        clock.advance(7)
        bound.pause()
        clock.advance(7)
        bound.resume()
        bound.resume()
        assert not bound.passed()
    clock.advance(0.25)
    assert not bound.passed()
    clock.advance(0.25)
    assert bound.passed()


# --- what clients read ------------------------------------------------------------------------------------------------


def table_of_endings():
    """(cause, OpenAI reason) of docs/spec/clients.md 0.4."""
    page = (Path(__file__).parent.parent / "docs/spec/clients.md").read_text()
    chapter = page.split("### 0.4 Endings")[1].split("###")[0]
    return re.findall(r"^\| `(\w+)` \|.*?\| (`\w+`|none[^|]*) \|", chapter, re.MULTILINE)


def test_h_i17_every_cause_has_its_openai_reason():
    """Spec F1: a loop or an indent bound is no `length`."""
    rows = dict(table_of_endings())
    assert len(rows) == 11
    for cause, reason in rows.items():
        assert OPENAI_REASON[cause] == (None if reason.startswith("none") else reason.strip("`"))
    assert set(OPENAI_REASON) == {*rows, "rejected"}
    assert [cause for cause, reason in OPENAI_REASON.items() if reason == "length"] == [
        "max_tokens",
        "context",
        "time_limit",
    ]
    assert set(NAMED_CAUSES) < set(rows)
