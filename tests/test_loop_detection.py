"""Spec 5.5: the incremental detector is the definition; honest repetition is not cut by the defaults."""

import base64
import json

import pytest
from finish_rows import reply
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.core.params import LoopDetection, SamplingParams
from mlxcel.errors import RequestError
from mlxcel.plugins.finish.loop_detection import LoopDetector
from mlxcel.testing.byte_tokenizer import ByteTokenizer

ON = LoopDetection(1, 20, 12)


def by_definition(tokens, low, high, count):
    """The smallest period whose `count` last blocks are equal, or None (F17)."""
    for period in range(low, high + 1):
        window = tokens[-period * count :]
        if len(window) == period * count and window == window[:period] * count:
            return period
    return None


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.integers(0, 2), max_size=120),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(2, 5),
)
def test_incremental_is_the_definition(tokens, low, more, count):
    """F17, at each token of a sequence, also past the first that fires."""
    detector = LoopDetector(LoopDetection(low, low + more, count))
    for end in range(1, len(tokens) + 1):
        assert detector.push(tokens[end - 1]) == by_definition(tokens[:end], low, low + more, count)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=80), st.integers(1, 4), st.integers(2, 3))
def test_no_block_with_a_forced_token_fires(tokens, high, count):
    """F18."""
    detector = LoopDetector(LoopDetection(1, high, count))
    free = []
    for token, forced in tokens:
        fired = detector.push(token, forced=forced)
        free = [] if forced else [*free, token]
        assert fired == by_definition(free, 1, high, count)


def test_the_longest_period_and_count():
    """F16: the caps work."""
    detector = LoopDetector(LoopDetection(64, 64, 1000))
    fired = [place for place in range(64 * 1000) if detector.push(place % 64)]
    assert fired == [64 * 1000 - 1]


@pytest.mark.parametrize(
    "settings",
    [None, {"max_pattern": 0}, {"min_count": 1}, {"min_count": 0}, LoopDetection(1, 0, 0), LoopDetection(1, 20, 1)],
)
def test_off_is_off(settings):
    """F16: on iff max_pattern >= 1 and min_count >= 2."""
    assert reply(ByteTokenizer(), b"x" * 3000, loop_detection=settings).cause is None


@pytest.mark.parametrize("settings", [{"max_pattern": 65}, {"min_count": 1001}, {"max_pattern": -1}, "on", [1, 20, 12]])
def test_beyond_the_caps_is_refused(settings):
    with pytest.raises(RequestError, match="loop_detection"):
        SamplingParams(loop_detection=settings)


def test_the_ending_names_period_and_count_and_keeps_the_token():
    """F20: the completing token is appended, shown, counted. The smallest period is named."""
    got = reply(ByteTokenizer(), b"go abababababab", loop_detection=LoopDetection(1, 4, 3))
    assert (got.cause, got.detail) == ("loop", {"period": 2, "count": 3})
    assert (got.text, got.tokens) == ("go ababab", 9)


def test_only_the_output_counts():
    """F18: nothing of a prompt is compared, so twelve tokens are needed whatever came before."""
    assert reply(ByteTokenizer(), b"0" * 11, loop_detection=ON).cause is None
    assert reply(ByteTokenizer(), b"0" * 12, loop_detection=ON).tokens == 12


def table(rows, cells, cell):
    return "\n".join("|" + "|".join([cell] * cells) + "|" for _ in range(rows))


HONEST = {
    "markdown table of yes": table(30, 4, " yes "),
    "markdown table of dashes": "| a | b | c |\n|---|---|---|\n" + table(20, 3, " - "),
    "markdown table, numbered": "\n".join(f"| {n} | ok | ok | ok |" for n in range(60)),
    "wide separator": "|" + "---|" * 30,
    "list of zeros": "[" + ", ".join(["0"] * 200) + "]",
    "zeros without spaces": "0" * 300,
    "ones and zeros": "01" * 100,
    "ascii rule of dashes": "-" * 120,
    "ascii rule of equals": "Title\n" + "=" * 80 + "\n",
    "ascii rule of stars": "*" * 100,
    "dots of a contents page": "Chapter one " + "." * 70 + " 7",
    "underscores of a form": "Name: " + "_" * 60,
    "spaces": " " * 200 + "x",
    "blank lines": "a" + "\n" * 60 + "b",
    "base64 of zeros": base64.b64encode(bytes(300)).decode(),
    "base64 of text": base64.b64encode(b"the same words again, " * 20).decode(),
    "json array of equal numbers": json.dumps([1.5] * 100),
    "json array of nulls": json.dumps([None] * 100),
    "json array of objects": json.dumps([{"ok": True}] * 60),
    "json array of empty strings": json.dumps([""] * 150),
    "nested brackets": "[" * 60 + "]" * 60,
    "csv": "0,0,0,0\n" * 50,
    "hex dump": "00000000: " + "00 " * 160,
    "identity matrix": "\n".join(" ".join("1" if i == j else "0" for j in range(24)) for i in range(24)),
    "bullet list": "- todo\n" * 40,
    "checkboxes": "- [ ] \n" * 40,
    "laughter": "ha" * 60 + "!",
    "a verse": "row, row, row your boat\n" * 20,
    "repeat after me": "I will not talk in class.\n" * 100,
    "bar chart": "\n".join("#" * n for n in range(40, 60)),
    "dna": "ACGT" * 80,
    "progress bar": "█" * 50 + "░" * 30,
    "html": "<td></td>" * 60,
    "assembly": "  nop\n" * 60,
}


def test_the_corpus_is_large_enough():
    assert len(HONEST) >= 30


@pytest.mark.parametrize("name", HONEST)
def test_h_r1_the_defaults_do_not_cut_honest_repetition(name):
    """F19, D15: off unless somebody asks."""
    got = reply(ByteTokenizer(), HONEST[name].encode())
    assert (got.cause, got.text) == (None, HONEST[name])


UNCUT_WHEN_ON = {
    "markdown table of numbers": "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(40)),
    "short rule": "Title\n" + "-" * 11 + "\n",
    "eleven equal rows": "0,1\n" * 11,
    "rows longer than a period": ("the quick brown fox jumps\n") * 30,
    "counting": " ".join(map(str, range(200))),
    "prose": "It was the best of times, it was the worst of times, it was the age of wisdom, " * 3,
}


@pytest.mark.parametrize("name", UNCUT_WHEN_ON)
def test_on_cuts_only_twelve_equal_blocks(name):
    """With (1, 20, 12): eleven repeats, blocks that differ, and blocks of more than 20 tokens go on."""
    text = UNCUT_WHEN_ON[name]
    by_blocks = any(by_definition(text[:end], 1, 20, 12) for end in range(1, len(text) + 1))
    got = reply(ByteTokenizer(), text.encode(), loop_detection=ON)
    assert (got.cause, by_blocks) == (None, False)


@pytest.mark.parametrize(
    ("text", "period", "tokens"),
    [("0" * 40, 1, 12), ("ha" * 40, 2, 24), ("- todo\n" * 40, 7, 84), ("I will not cheat. \n" * 40, 19, 228)],
)
def test_on_cuts_a_loop_at_its_twelfth_block(text, period, tokens):
    got = reply(ByteTokenizer(), text.encode(), loop_detection=ON)
    assert (got.detail, got.tokens) == ({"period": period, "count": 12}, tokens)
