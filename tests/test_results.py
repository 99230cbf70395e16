"""Endings as a client gets them: the record of an ended request (spec E20, E21; docs/spec/clients.md 0.4)."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from engine_rows import CAPS, scripted, spec
from piece_tokenizer import PieceTokenizer
from real_engine import real_engine
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.observe import Observers
from mlxcel.core.params import SamplingParams
from mlxcel.core.reasoning import MarkerPair, ReasoningSplit
from mlxcel.core.request import SequenceSpec
from mlxcel.core.result import NAMED_CAUSES, OPENAI_REASON, error_code
from mlxcel.direct import generate
from mlxcel.errors import ContextTooLong, RequestError
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import EOS, TURN_END
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import scripted_engine

PLANNER = ChunkedPlanner(chunk=2048, level="R2", caps=CAPS)
THINK = ReasoningSplit((MarkerPair("<think>", "</think>"),))


class Ends:
    """An observer that keeps the end records."""

    def __init__(self):
        self.heard = []

    def step_finished(self, report):
        """Not asked here."""

    def request_finished(self, result):
        self.heard.append(result)


def run(it, request, **options):
    return generate(it.engine, request, planner=PLANNER, clock=it.clock, **options)


def thinking(name, split=THINK, **params):
    base = spec(name, **params)
    return SequenceSpec(name, base.prompt_ids, base.params, base.eos_ids, reasoning=split)


@pytest.mark.parametrize(
    ("whole", "text", "reasoning"), [(False, "so", "why"), (True, "<think>why</think>so", "why"), (None, None, None)]
)
def test_reasoning_is_a_field_of_its_own(whole, text, reasoning):
    """Spec T9: joined deltas are the fields; null where nothing was split off."""
    script = [*b"<think>why</think>so", EOS]
    split = None if whole is None else ReasoningSplit(THINK.pairs, whole=whole)
    content, thoughts = [], []
    it = scripted({"a": script})
    result = run(it, thinking("a", split), on_text=content.append, on_reasoning=thoughts.append)
    assert result.text == "".join(content) == (text or "<think>why</think>so")
    assert result.reasoning == ("".join(thoughts) or None) == reasoning


def test_h_b2_streamed_and_whole_are_one_reply():
    """A long stop string over many tokens, with and without a listener."""
    script, stop = [*b"before the very long stop sequence, after", EOS], "the very long stop sequence"
    heard = []
    streamed = run(scripted({"a": script}), spec("a", stop=[stop]), on_text=heard.append)
    whole = run(scripted({"a": script}), spec("a", stop=[stop]))
    assert streamed.text == "".join(heard) == whole.text == "before "
    for result in (streamed, whole):
        assert (result.cause, result.finish_reason, result.stop_reason) == ("stop_string", "stop", stop)
        assert bytes(result.token_ids) == b"before the very long stop sequence"


def test_h_b8_a_stop_string_of_several_tokens_on_every_backend(backend, tmp_path):
    """The same ids from a model and from a script end at the same place."""
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path / "tiny"))
    pieces = [f"<{number}>" for number in range(320)]
    tokenizer = PieceTokenizer(pieces)

    def made(name, **params):
        params = SamplingParams(temperature=0, seed=0, max_tokens=12, **params)
        return SequenceSpec(name, np.array([5, 6, 7], np.int32), params)

    real = real_engine(checkpoint, tokenizer=tokenizer)
    free = generate(real.engine, made("a"), planner=PLANNER)
    stop = free.text[2:-2]  # from inside the first token to inside the last
    stopped = generate(real.engine, made("a", stop=[stop]), planner=PLANNER)
    it = scripted_engine({"a": free.token_ids}, tokenizer=tokenizer)
    for result in (stopped, run(it, made("a", stop=[stop]))):
        assert (result.text, result.cause, result.stop_reason) == (free.text[:2], "stop_string", stop)
        assert result.token_ids == free.token_ids


@pytest.mark.parametrize(("context", "cause"), [(256, "eos"), (8, "context")])
def test_h_s1_without_a_limit_a_reply_goes_on_to_its_end_or_the_context(context, cause):
    result = run(scripted({"a": [*b"hello you", EOS]}, context=context), spec("a", max_tokens=-1))
    assert result.cause == cause
    assert result.finish_reason == ("stop" if cause == "eos" else "length")
    assert result.text == ("hello you" if cause == "eos" else "hello")


ENDINGS = {
    "eos": ([*b"ab", EOS], {}, None),
    "stop_token": (b"abc", {"stop_token_ids": [ord("c")]}, ord("c")),
    "stop_string": (b"abcd", {"stop": ["bc"]}, "bc"),
    "max_tokens": (b"abc", {"max_tokens": 2}, None),
    "context": (b"a" * 300, {}, None),
    "time_limit": (b"abcdef", {"t_max_predict_ms": 1000}, None),
    "indent_limit": (b"a\n  b", {"n_indent": 4}, None),
    "loop": (b"abababab", {"loop_detection": {"min_count": 3}}, {"period": 2, "count": 3}),
}


@pytest.mark.parametrize("cause", ENDINGS)
def test_h_i17_each_ending_has_its_own_words(cause):
    """Spec F1, E21: cause and `stop_reason`; the indent that was met is in the detail alone."""
    script, params, stop_reason = ENDINGS[cause]
    result = run(scripted({"a": script}, delay=0.5), spec("a", **params))
    assert (result.cause, result.stop_reason) == (cause, stop_reason)
    assert (result.detail == 2) == (cause == "indent_limit")


def test_h_c1_h_c5_every_end_of_a_list_ends_and_none_is_printed():
    for end in (EOS, TURN_END):
        result = run(scripted({"a": [*b"hi", end, *b"never"]}), spec("a", skip_special_tokens=False))
        assert (result.text, result.cause, bytes(result.token_ids)) == ("hi", "eos", b"hi")


def test_a_refusal_is_named_by_its_code():
    """Spec E20: `rejected`, and no forward."""
    ends, it = Ends(), scripted({"a": b"x"}, context=8)
    with pytest.raises(ContextTooLong):
        run(it, spec("a", b"12345678"), observers=Observers([ends]))
    with pytest.raises(RequestError):
        run(it, spec("a", stop_token_ids=[10**6]), observers=Observers([ends]))
    assert [(end.cause, end.detail, end.stop_reason) for end in ends.heard] == [
        ("rejected", "context_length_exceeded", None),
        ("rejected", "invalid_request", None),
    ]
    assert it.backend.steps == 0


@pytest.mark.parametrize(
    ("fault", "code"), [(Fault("read", 2), "backend_fault"), (Fault("status", 2), "numeric"), (None, "row_fault")]
)
def test_an_error_is_named_by_its_code(fault, code):
    faults = [fault] if fault else [Fault("detokenise", 2)]
    ends = Ends()
    result = run(scripted({"a": b"abc"}, faults=FaultPlan(faults)), spec("a"), observers=Observers([ends]))
    assert (result.cause, result.detail, result.text) == ("error", code, "a")
    assert ends.heard == [result]
    assert error_code(result.error) == code


def test_a_mistake_of_ours_is_an_error_and_no_cancellation():
    """Spec E20: what a planner raises is not the client leaving."""

    class Broken:
        def build(self, ids, adopted=0, *, draw=True):
            raise ZeroDivisionError

    ends, it = Ends(), scripted({"a": b"abc"})
    with pytest.raises(ZeroDivisionError):
        generate(it.engine, spec("a"), planner=Broken(), clock=it.clock, observers=Observers([ends]))
    assert [(end.cause, end.detail) for end in ends.heard] == [("error", "internal")]
    assert it.engine.open_sequences == ()


def test_a_cancelled_reply_has_the_end_of_its_text():
    """Spec F13: what a stop string held and an unfinished marker come along."""

    def leave(text):
        raise KeyboardInterrupt

    it = scripted({"a": b"<think>ab</think>cdef"})
    result = run(it, thinking("a", stop=["de"]), on_text=leave)
    assert (result.cause, result.text, result.reasoning) == ("cancelled", "c", "ab")
    it = scripted({"a": b"ab"}, faults=FaultPlan([Fault("read", 3)]))
    result = run(it, spec("a", stop=["bc"]))
    assert (result.cause, result.text, bytes(result.token_ids)) == ("error", "ab", b"ab")


def test_the_record_holds_what_was_used():
    """Spec E21: effective values with their origins and warnings, level, storage, chunk."""
    it = scripted({"a": [EOS]}, level="R1")
    request = spec("a", top_k=7)
    result = run(it, request, origin={"top_k": "flag"}, warnings=("idle",))
    assert (result.params, result.origin, result.warnings) == (request.params, {"top_k": "flag"}, ("idle",))
    assert (result.level, result.kv_storage, result.prefill_chunk) == ("R1", "dense", it.engine.settings.chunk)


def test_h_k14_every_request_has_one_end():
    """Spec E20: 200 requests that finish, are cancelled, refused, or fail; starts and ends balance."""

    def leave(text):
        raise KeyboardInterrupt

    ends = Ends()
    observers = Observers([ends])
    script = [*b"hello", EOS]
    for number in range(200):
        kind = number % 5
        faults = FaultPlan([Fault("read", 3)] if kind == 3 else [])
        it = scripted({str(number): script}, context=16, faults=faults)
        options = {"on_text": leave} if kind == 1 else {}
        request = spec(str(number), b"x" * (16 if kind == 2 else 3), max_tokens=0 if kind == 4 else -1)
        if kind == 2:
            with pytest.raises(ContextTooLong):
                run(it, request, observers=observers)
        else:
            run(it, request, observers=observers, **options)
    assert Counter(end.request_id for end in ends.heard) == {str(number): 1 for number in range(200)}
    assert Counter(end.cause for end in ends.heard) == {
        "eos": 40,
        "cancelled": 40,
        "rejected": 40,
        "error": 40,
        "max_tokens": 40,
    }


def test_the_page_of_endings_is_current():
    """docs/endings.md: every cause, in the order of spec 5.1, its OpenAI reason and `stop_reason`."""
    page = (Path(__file__).parent.parent / "docs/endings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| `(stop|length)` \|$", page, re.MULTILINE)
    assert {cause: reason for cause, _, reason in rows} == {
        cause: reason for cause, reason in OPENAI_REASON.items() if reason is not None
    }
    assert [cause for cause, stop_reason, _ in rows if stop_reason != "null"] == list(NAMED_CAUSES)
    spec_page = (Path(__file__).parent.parent / "docs/spec/engine.md").read_text(encoding="utf-8")
    table = spec_page.split("### 5.1 Order and causes")[1].split("###")[0]
    ordered = [
        cause for row in re.findall(r"^\| \d+ \|.*$", table, re.MULTILINE) for cause in row.split("|")[3].split(",")
    ]
    assert [cause for cause, _, _ in rows] == [cause.strip(" `") for cause in ordered if "`" in cause]
