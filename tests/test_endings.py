"""Chapter 5 through the whole engine: alone, in company, with a step in flight, and over a preemption."""

from itertools import combinations

import pytest
from ending_rows import MODES, drive
from finish_rows import reply
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from piece_tokenizer import PieceTokenizer
from test_stop_strings import ids_for, stop_sets, tokens_of_a_text

from mlxcel.core.reasoning import MarkerPair, ReasoningSplit
from mlxcel.errors import BackendFault, NumericFault, RequestError, RowFault
from mlxcel.testing.byte_tokenizer import EOS, TURN_END, ByteTokenizer
from mlxcel.testing.faults import Fault

THINK = ReasoningSplit((MarkerPair("<think>", "</think>"),))
in_every_mode = pytest.mark.parametrize("mode", MODES)


class AtToken:
    """A plugin's step: ends at the n-th token."""

    def __init__(self, number):
        self._number = number

    def open(self, spec):
        return None

    def check(self, state, output, text):
        return "here" if len(output) == self._number else None


def at_third_token(cause, last):
    """Options with which `last`, the third token behind "x" and a newline, ends a row by `cause`."""
    return {
        "stop_token": {"stop_token_ids": [ord(last)]},
        "eos": {"eos_ids": frozenset({ord(last)})},
        "stop_string": {"stop": ["x\n" + last]},
        "time_limit": {"t_max_predict_ms": 1000},
        "indent_limit": {"n_indent": 1},
        "max_tokens": {"max_tokens": 3},
        "context": {"context": 6},
        "plugin": {"steps": {"plugin": AtToken(3)}},
        "loop": {"loop_detection": {"max_pattern": 1, "min_count": 2}},
    }[cause]


ORDER = ("stop_token", "eos", "stop_string", "time_limit", "indent_limit", "max_tokens", "context", "plugin", "loop")
DETAIL = {"stop_string": "x\n\n", "indent_limit": 0, "plugin": "here", "loop": {"period": 1, "count": 2}}
TEXT = {"stop_token": "x\n", "eos": "x\n", "stop_string": "", "indent_limit": "x\n"}
BEFORE = ("stop_token", "eos")


def coinciding():
    """A loop needs its token twice, and an end id ends at the first: these two cannot meet."""
    return [pair for pair in combinations(ORDER, 2) if not (pair[0] in BEFORE and pair[1] == "loop")]


@in_every_mode
@pytest.mark.parametrize("pair", coinciding(), ids="-".join)
def test_of_two_causes_the_earlier_wins(pair, mode):
    """Spec 5.1, C52: one token triggers both."""
    last = "z" if pair[0] in BEFORE else "\n"
    options = {}
    for cause in reversed(pair):
        options |= at_third_token(cause, last)
    seen = drive(mode, [*b"x\n", ord(last), *b"never"], **options)
    first = pair[0]
    detail = ord("z") if first == "stop_token" else DETAIL.get(first)
    assert (seen.cause, seen.detail) == (first, detail)
    assert len(seen.output) == (2 if first in BEFORE else 3)
    assert seen.text == TEXT.get(first, "x\n\n")


@in_every_mode
@pytest.mark.parametrize("cause", ORDER)
def test_each_cause_alone(cause, mode):
    last = "z" if cause in BEFORE else "\n"
    seen = drive(mode, [*b"x\n", ord(last), *b"never"], **at_third_token(cause, last))
    assert seen.cause == cause
    assert seen.text == TEXT.get(cause, "x\n\n")


@in_every_mode
@pytest.mark.parametrize("stream", ["hi€", "€"])
def test_h_a5_a_limit_inside_a_character(stream, mode):
    """Spec T5: what decode shows, streamed or not."""
    for cut in range(1, len(stream.encode())):
        seen = drive(mode, [*stream.encode(), EOS], max_tokens=cut)
        assert seen.text == ByteTokenizer().decode(seen.output, skip_special=True)
        assert (seen.cause, len(seen.output)) == ("max_tokens", cut)


@in_every_mode
def test_h_a1_a_character_of_several_tokens(mode):
    for text in ("😀", "a😀b", "😀😀"):
        seen = drive(mode, [*text.encode(), EOS])
        assert (seen.text, seen.cause) == (text, "eos")
        assert "�" not in "".join(text for text, _ in seen.deltas)


@in_every_mode
def test_h_b1_stop_string_is_held_back(mode):
    tokenizer = PieceTokenizer(["AB", "C DE", "FG", "HI"])
    seen = drive(mode, [0, 1, 2, 3, 3], tokenizer=tokenizer, prompt=(3,), stop=["DEFG"])
    assert [text for text, _ in seen.deltas] == ["AB", "C ", ""]
    assert (seen.cause, seen.detail, seen.output) == ("stop_string", "DEFG", (0, 1, 2))


@in_every_mode
def test_h_b9_the_prompt_takes_no_part(mode):
    """F9: not even the beginning of a stop string that the reply goes on with."""
    prompt = tuple(b"stop")
    assert drive(mode, [*b"stop it", EOS], prompt=prompt, stop=["it"]).text == "stop "
    assert drive(mode, [*b"other", EOS], prompt=prompt, stop=["stop", "pot"]).text == "other"
    assert drive(mode, [*b"stop it", EOS], prompt=prompt, stop=["stop"]).text == ""


def test_h_b9_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="stop"):
        drive("alone", [EOS], stop=[""])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(tokens_of_a_text(), stop_sets(), st.integers(0, 3), st.integers(1, 6))
def test_stop_strings_do_not_know_their_company(said, stops, min_tokens, after):
    """F14, C52: over a preemption at any token, beside other rows, with a step ahead: as the finish step alone."""
    tokenizer, ids = ids_for(said)
    options = {"tokenizer": tokenizer, "prompt": (0,), "eos_ids": frozenset(), "after": after}
    if not ids:
        return
    alone = reply(tokenizer, ids, stop=stops, min_tokens=min(min_tokens, len(ids)))
    for mode in MODES:
        seen = drive(mode, ids, stop=stops, min_tokens=min(min_tokens, len(ids)), max_tokens=len(ids), **options)
        expected = "max_tokens" if alone.cause is None else alone.cause
        assert (seen.text, seen.cause, len(seen.output)) == (alone.text, expected, alone.tokens)


@in_every_mode
def test_reasoning_and_content_come_apart(mode):
    """T8, F13: the same deltas in any company; joined they are the fields."""
    script = [*b"<think>why</think>so", EOS]
    seen = drive(mode, script, reasoning=THINK, stop=["sow"])
    assert (seen.text, seen.reasoning, seen.cause) == ("so", "why", "eos")
    assert seen.deltas == drive("alone", script, reasoning=THINK, stop=["sow"]).deltas
    never = drive(mode, [*b"<think>why</thi", EOS], reasoning=THINK)
    assert (never.text, never.reasoning, never.cause) == ("", "why</thi", "eos")


@in_every_mode
@pytest.mark.parametrize("end", [EOS, TURN_END])
def test_h_c5_no_end_id_is_printed(end, mode):
    """F7, H-C1: each of the set ends, none is text."""
    for skip in (True, False):
        seen = drive(mode, [*b"hi", end, *b"xx"], skip_special_tokens=skip)
        assert (seen.text, seen.cause, bytes(seen.output)) == ("hi", "eos", b"hi")


@in_every_mode
def test_h_c3_ignore_eos_goes_on(mode):
    """F6, F7: every end id is ignored; the request's own stop ids work."""
    script = [*b"ab", EOS, TURN_END, *b"cdefghij"]
    seen = drive(mode, script, ignore_eos=True, max_tokens=10)
    assert (seen.cause, len(seen.output)) == ("max_tokens", 10)
    stopped = drive(mode, script, ignore_eos=True, stop_token_ids=[ord("c")], max_tokens=10)
    assert (stopped.cause, stopped.detail, len(stopped.output)) == ("stop_token", ord("c"), 4)
    own = drive(mode, script, ignore_eos=True, stop_token_ids=[EOS], max_tokens=10)
    assert (own.cause, own.detail, len(own.output)) == ("stop_token", EOS, 2)


@in_every_mode
def test_h_i5_counts_of_tokens(mode):
    for asked, expected in ((1, 1), (2, 2), (-1, 5), (2**40, 5)):
        seen = drive(mode, [*b"hello", EOS], max_tokens=asked)
        assert (len(seen.output), seen.cause) == (expected, "eos" if expected == 5 else "max_tokens")


@in_every_mode
def test_the_context_is_filled_to_its_last_position(mode):
    """F5: P + G = N is reached; an asked value beyond it reads as `context`, one that fits exactly as `max_tokens`."""
    for asked, cause in ((-1, "context"), (6, "context"), (5, "max_tokens")):
        seen = drive(mode, [*b"hello!!", EOS], context=8, max_tokens=asked)
        assert (bytes(seen.output), seen.text, seen.cause) == (b"hello", "hello", cause)


def test_time_preempted_does_not_count():
    """F15: a hundred seconds of replay; the bound is what it would have been."""
    usual = drive("alone", [*b"abcdefgh"], t_max_predict_ms=2000)
    slow = [Fault("slow", 5, seconds=100.0)]  # the read that replays
    seen = drive("preempted", [*b"abcdefgh"], t_max_predict_ms=2500, faults=slow)
    assert (usual.text, usual.cause) == ("abcde", "time_limit")
    assert (seen.text, seen.cause) == ("abcde", "time_limit")


def test_the_time_bound_starts_with_the_first_token():
    """F15: a slow prefill is no part of it; a slow step is."""
    slow_prefill = drive("alone", [*b"abcdefgh"], t_max_predict_ms=2000, faults=[Fault("slow", 1, seconds=100.0)])
    assert slow_prefill.text == "abcde"
    slow_step = drive("alone", [*b"abcdefgh"], t_max_predict_ms=2000, faults=[Fault("slow", 2, seconds=100.0)])
    assert slow_step.text == "ab"


@pytest.mark.parametrize(("fault", "kind"), [(Fault("read", 4), BackendFault), (Fault("status", 4), NumericFault)])
def test_an_error_lets_go_what_was_held(fault, kind):
    """F13, F2: ids and text of a row that failed describe the same tokens."""
    seen = drive("alone", [*"ab€".encode()], stop=["b€"], faults=[fault])
    assert isinstance(seen.error, kind)
    assert (bytes(seen.output), seen.text) == ("ab€".encode()[:3], "ab�")


class Raises:
    """A plugin's step that fails at the n-th token."""

    def __init__(self, number):
        self._number = number

    def open(self, spec):
        return None

    def check(self, state, output, text):
        if len(output) == self._number:
            raise ZeroDivisionError


@pytest.mark.parametrize("fault", ["detokeniser", "plugin"])
def test_a_token_that_fails_takes_no_text_with_it(fault):
    """F2, F13: what was held of the tokens before it goes out, nothing of its own."""
    options = {"faults": [Fault("detokenise", 4)]} if fault == "detokeniser" else {"steps": {"raises": Raises(4)}}
    seen = drive("alone", [*b"abc", *"€".encode()], stop=["bcde"], **options)
    assert isinstance(seen.error, RowFault)
    assert (bytes(seen.output), seen.text) == (b"abc", "abc")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 258), min_size=1, max_size=16), st.booleans(), st.sampled_from(MODES))
def test_text_is_the_decode_of_the_ids(ids, skip, mode):
    """T2, F2: whatever the ids, special ones and broken characters included."""
    seen = drive(mode, ids, eos_ids=frozenset(), max_tokens=len(ids), skip_special_tokens=skip)
    assert seen.output == tuple(ids)
    assert seen.text == ByteTokenizer().decode(ids, skip_special=skip)
