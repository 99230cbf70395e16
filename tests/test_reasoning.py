"""Spec 6.2: reasoning and content, from one parser for every client."""

from itertools import pairwise

import pytest
from finish_rows import finish_row, reply
from hypothesis import given, settings
from hypothesis import strategies as st
from piece_tokenizer import PieceTokenizer

from mlxcel.core.finish import Released
from mlxcel.core.reasoning import MarkerPair, ReasoningSplit
from mlxcel.text.held_text import Run
from mlxcel.text.reasoning import KNOWN_PAIRS, MOST_SPACE, ReasoningParser, marker_pairs, reasoning_split

THINK = MarkerPair("<think>", "</think>")
TEMPLATE = "{% if thinking %}<think>{% endif %}{{ messages }}"
USER = [{"role": "user", "content": "Why?"}]
FORMATS = ("none", "deepseek", "deepseek-legacy", "auto")


def split_for(wanted, *, inside=None):
    prompt = f"Why?\n{inside.open}\n" if inside else "Why?\n"
    return reasoning_split(wanted, template=TEMPLATE, prompt=prompt, messages=USER)


def said(text, split, cuts=None):
    """(content, reasoning) of a text that comes in the pieces `cuts` makes, a character each by default."""
    edges = [0, *(range(1, len(text)) if cuts is None else cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    got = reply(PieceTokenizer(pieces), range(len(pieces)), reasoning=split)
    return got.text, got.reasoning


THOUGHT = "<think>2 < 3, so </thin> is no end.</think>Yes: <think> is a marker.</think>"
SPLIT = ("Yes: <think> is a marker.</think>", "2 < 3, so </thin> is no end.")
EXPECTED = {"none": (THOUGHT, ""), "deepseek": SPLIT, "auto": SPLIT, "deepseek-legacy": (THOUGHT, SPLIT[1])}


@pytest.mark.parametrize("wanted", FORMATS)
def test_each_format_cut_at_every_character(wanted):
    """T8, T9: one cut anywhere, every character alone, and all at once."""
    split = split_for(wanted)
    for cuts in ([], None, *([place] for place in range(1, len(THOUGHT)))):
        assert said(THOUGHT, split, cuts) == EXPECTED[wanted]


CASES = [
    # what the model says, where the prompt stands, content, reasoning
    ("plain answer", None, "plain answer", ""),
    ("<think></think>answer", None, "answer", ""),
    ("\n\n<think>a</think>b", None, "b", "a"),
    ("<think>\na\n</think>\n\nb", None, "\n\nb", "\na\n"),
    ("<think>never closed", None, "", "never closed"),
    ("<think>never closed </thi", None, "", "never closed </thi"),
    ("<thin", None, "<thin", ""),
    ("  ", None, "  ", ""),
    ("<thinly veiled", None, "<thinly veiled", ""),
    ("Use <think>a</think> tags", None, "Use <think>a</think> tags", ""),
    ("stray </think> is text", None, "stray </think> is text", ""),
    ("<think>a</think>b<think>c</think>", None, "b<think>c</think>", "a"),
    ("opened before</think>b", THINK, "b", "opened before"),
    ("opened and never closed", THINK, "", "opened and never closed"),
    ("</think>b", THINK, "b", ""),
    ("<think>a</think>b", THINK, "b", "<think>a"),
    ("", THINK, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "content", "reasoning"), CASES)
def test_where_a_block_begins_and_ends(text, inside, content, reasoning):
    """T9, T10; a block is at the beginning of a reply and there is one, so that an answer may name the markers."""
    split = split_for("deepseek", inside=inside)
    assert split is not None
    assert split.inside == inside
    for cuts in ([], None):
        assert said(text, split, cuts) == (content, reasoning)
    whole = split_for("deepseek-legacy", inside=inside)
    for cuts in ([], None):
        assert said(text, whole, cuts) == (text, reasoning)


def at_once(text, inside):
    """The split by its definition, of a whole text."""
    if not inside:
        if not text.lstrip().startswith("<think>"):
            return text, ""
        text = text.lstrip().removeprefix("<think>")
    reasoning, _, content = text.partition("</think>")
    return content, reasoning


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<think", "</", "a", " ", "\n", ">", "é"]), max_size=10).map(
        "".join
    ),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_streamed_is_not_streamed(text, inside, whole, data):
    """T8, T9: whatever the cut; nothing is lost but the markers, and what waits begins a marker."""
    split = ReasoningSplit((THINK,), THINK if inside else None, whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    content, reasoning = at_once(text, inside)
    assert said(text, split, cuts) == (text if whole else content, reasoning)
    parser = ReasoningParser(split)
    parser.push([Run(text, True)])
    rest = parser.flush()
    waited = rest.text + rest.reasoning
    assert not waited.strip() or any(mark.startswith(waited.lstrip()) for mark in ("<think>", "</think>"))


def test_white_space_alone_is_not_held_for_ever():
    """Beyond 64 characters no block begins any more."""
    step, state = finish_row(PieceTokenizer([" "]), reasoning=ReasoningSplit((THINK,)))
    deltas = [step.resolve(state, 0).released.text for _ in range(MOST_SPACE + 2)]
    assert deltas == [*[""] * MOST_SPACE, " " * (MOST_SPACE + 1), " "]


def test_markers_that_are_special_tokens_split_and_are_not_shown():
    """T7: decoded for the parser, hidden last, whatever the format."""
    tokenizer = PieceTokenizer(["hm", "so"], ["<think>", "</think>"])
    ids = [tokenizer.special("<think>"), 0, tokenizer.special("</think>"), 1]
    for wanted, expected in (("deepseek", ("so", "hm")), ("deepseek-legacy", ("hmso", "hm")), ("none", ("hmso", ""))):
        got = reply(tokenizer, ids, reasoning=split_for(wanted))
        assert (got.text, got.reasoning) == expected
    shown = reply(tokenizer, ids, reasoning=split_for("none"), skip_special_tokens=False)
    assert shown.text == "<think>hm</think>so"
    shown = reply(tokenizer, ids, reasoning=split_for("deepseek"), skip_special_tokens=False)
    assert (shown.text, shown.reasoning) == ("so", "hm")


def test_the_parser_stands_behind_the_matcher():
    """T8, F9, F13: a stop string is found in reasoning; what it held and what the parser held both go out at an end."""
    tokenizer = PieceTokenizer(["<think>ab", "c</thi", "nk>de", "f"])
    stopped = reply(tokenizer, range(4), stop=["bc"], reasoning=split_for("deepseek"))
    assert (stopped.text, stopped.reasoning, stopped.cause) == ("", "a", "stop_string")
    across = reply(tokenizer, range(4), stop=["</think>d"], reasoning=split_for("deepseek"))
    assert (across.text, across.reasoning, across.detail) == ("", "abc", "</think>d")
    cut = reply(tokenizer, range(2), stop=["</think>d"], reasoning=split_for("deepseek"))
    assert (cut.text, cut.reasoning, cut.cause) == ("", "abc</thi", None)


@pytest.mark.parametrize("pair", KNOWN_PAIRS, ids=lambda pair: pair.open)
def test_known_markers_are_found_in_a_template(pair):
    """T8: data. A template that only removes the blocks of earlier turns knows them too."""
    for source in (f"x {pair.open} y", f"{{{{ content.split('{pair.close}')[-1] }}}}"):
        assert pair in marker_pairs(source)
    split = reasoning_split("auto", template=pair.open, prompt="Why?", messages=USER)
    assert said(f"{pair.open}a{pair.close}b", split) == ("b", "a")


def test_no_marker_begins_another():
    """What ReasoningSplit asks of its pairs."""
    opens = [pair.open for pair in KNOWN_PAIRS]
    assert not [(a, b) for a in opens for b in opens if a != b and b.startswith(a)]


def test_auto_splits_where_the_template_has_markers_and_a_chat_was_rendered():
    """T9, T10: raw completion is not split unless asked; without markers the usual ones are looked for when asked."""
    assert reasoning_split("auto", template=TEMPLATE, prompt="Why?", messages=USER) == ReasoningSplit((THINK,))
    assert reasoning_split("auto", template="{{ messages }}", prompt="Why?", messages=USER) is None
    assert reasoning_split("auto", template=None, prompt="Why?", messages=None) is None
    assert reasoning_split("auto", template=TEMPLATE, prompt="Why?", messages=None) is None
    assert reasoning_split("none", template=TEMPLATE, prompt="Why?", messages=USER) is None
    assert reasoning_split("deepseek", template=None, prompt="Why?", messages=None) == ReasoningSplit((THINK,))
    raw = reasoning_split("deepseek", template=TEMPLATE, prompt="Why?<think>\n", messages=None)
    assert raw == ReasoningSplit((THINK,), inside=THINK)
    assert reasoning_split("deepseek", template=None, prompt=None, messages=None) == ReasoningSplit((THINK,))


OPENED = [
    # what the template made, the messages, whether the block is open
    ("U: Why?\nA: <think>\n", USER, True),
    ("U: Why?\nA: <think>", USER, True),
    ("U: Why?\nA: <think>\n\n</think>\n\n", USER, False),
    ("U: Why?\nA: ", USER, False),
    ("U: what is <think>?\nA: ", [{"role": "user", "content": "what is <think>?"}], False),
    ("U: what is <think>\nA: ", [{"role": "user", "content": "  what is <think>\n"}], False),
    ("U: Why?\nA: <think>one, two", [*USER, {"role": "assistant", "content": "<think>one, two"}], True),
    ("U: Why?\nA: <think>one</think>two", [*USER, {"role": "assistant", "content": "<think>one</think>two"}], False),
    ("U: Why?\nA: <think>\nOkay, ", USER, True),
    ("U: hi\nA: <think>\n", [{"role": "user", "content": "hi"}], True),  # a word that the marker contains
    ("U: k\nA: <think>\nOkay, ", [{"role": "user", "content": "k"}], True),
    ("U: <think>\nA: <think>\n", [{"role": "user", "content": "<think>"}], True),
    ("U: <think>\nA: ", [{"role": "user", "content": "<think>"}], False),
    ("U: <think> a <think>\nA: ", [{"role": "user", "content": "<think> a <think>"}], False),
    ("U: <think>\nA: ok\nU: go\nA: ", [{"role": "user", "content": "<think>"}, *USER], False),
    (
        "U: a\nwhat is <think>?\nA: ",
        [{"role": "user", "content": [{"type": "text", "text": "what is <think>?"}]}],
        False,
    ),
    ("A: <think>one\nU: Why?\nA: ", [{"role": "assistant", "content": "<think>one"}, *USER], False),
    ("A: <think>one\nA: ", [{"role": "assistant", "content": "<think>one"}], False),
    ("A: ", [{"role": "assistant", "content": None}], False),
]


@pytest.mark.parametrize(("prompt", "messages", "is_open"), OPENED)
def test_a_block_that_the_template_opened(prompt, messages, is_open):
    """T10: by what stands behind the last message, never by what a user wrote about markers."""
    split = reasoning_split("auto", template=TEMPLATE, prompt=prompt, messages=messages)
    assert split is not None
    assert split.inside == (THINK if is_open else None)


def test_a_raw_prompt_opens_a_block_at_its_very_end_alone():
    """T10. Nobody wrote a template here, so a marker further in front is a word of the text."""
    for prompt in ("<think> is a marker. Why?", "<think>one", "Why? <think>\nOkay"):
        assert reasoning_split("deepseek", template=TEMPLATE, prompt=prompt) == ReasoningSplit((THINK,))


def test_a_users_last_words_open_no_block():
    """T10: only the assistant's message is gone on with, also where no generation prompt follows the user's."""
    for role, is_open in (("assistant", True), ("user", False), ("system", False)):
        messages = [{"role": role, "content": "I mean <think>one"}]
        split = reasoning_split("auto", template=TEMPLATE, prompt="I mean <think>one", messages=messages)
        assert split == ReasoningSplit((THINK,), inside=THINK if is_open else None), role


def test_of_several_pairs_the_one_that_is_opened_last_is_open():
    """T8: a template may know more than one; the reply is inside the block that was left open, whatever their order."""
    pairs = KNOWN_PAIRS[:3]
    template = " ".join(pair.open for pair in pairs)
    for opened in pairs:
        for closed in pairs:
            prompt = f"U: Why?\nA: {closed.open}one{closed.close}\n{opened.open}\n"
            split = reasoning_split("auto", template=template, prompt=prompt, messages=USER)
            assert split == ReasoningSplit(pairs, inside=opened)


def test_nothing_said_is_nothing_split():
    assert ReasoningParser(ReasoningSplit((THINK,))).flush() == Released()
