"""The direct client with the prompt in front of the reply, scored, or cut (docs/spec/engine.md E9, T2, S40)."""

import attrs
import numpy as np
import pytest
from engine_rows import CAPS, scripted, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from real_engine import real_engine
from test_detokeniser import KINDS, tokenizer
from test_engine_interrupts import interrupted_at
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.observe import Observers
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.direct import generate
from mlxcel.errors import BackendFault, ContextTooLong, NumericFault, RequestError
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import BOS, EOS, ByteTokenizer
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import ScriptedBackend, scripted_engine

HELLO = [*b"hello", EOS]
PLANNER = ChunkedPlanner(chunk=2048, level="R2", caps=CAPS)


def run(it, request, **options):
    return generate(it.engine, request, planner=PLANNER, clock=it.clock, tokenizer=ByteTokenizer(), **options)


def asking(name="a", prompt=b"abc", echo=False, **params):
    return attrs.evolve(spec(name, prompt, **params), echo=echo)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_an_echoed_text_is_the_decode_of_prompt_and_reply(data, kind):
    """T2 with `echo`: spaces at the border and characters cut by it, for every kind of decoder."""
    tok = tokenizer(kind)
    ids = st.lists(st.integers(0, tok.size - 1), min_size=1, max_size=12)
    prompt, reply = data.draw(ids), data.draw(ids)
    keep = data.draw(st.booleans())
    it = scripted_engine({"a": reply}, tokenizer=tok)
    params = SamplingParams(temperature=0, max_tokens=len(reply), skip_special_tokens=not keep)
    request = SequenceSpec("a", np.array(prompt, np.int32), params, echo=True)
    heard = []
    result = generate(it.engine, request, planner=PLANNER, tokenizer=tok, on_text=heard.append)
    assert result.text == "".join(heard) == tok.decode([*prompt, *reply], skip_special=not keep)
    assert list(result.token_ids) == reply
    nothing = attrs.evolve(request, params=params.clone(max_tokens=0))
    alone = generate(it.engine, nothing, planner=PLANNER, tokenizer=tok)
    assert alone.text == tok.decode(prompt, skip_special=not keep)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_may_begin_in_the_prompt(cut):
    emoji = "😀".encode()
    it = scripted({"a": [*emoji[cut:], *b"!", EOS]})
    assert run(it, asking(prompt=b"x" + emoji[:cut], echo=True)).text == "x😀!"
    assert run(it, asking(prompt=b"x" + emoji[:cut])).text == "\ufffd" * (4 - cut) + "!"
    assert run(it, asking(prompt=b"x" + emoji[:cut], echo=True, max_tokens=0)).text == "x\ufffd"


def test_stop_strings_are_looked_for_in_the_reply_alone():
    it = scripted({"a": HELLO})
    assert run(it, asking(prompt=b"hel", echo=True, stop=("hel",))).text == "hel"
    assert run(it, asking(prompt=b"lo h", echo=True, stop=("hh",))).text == "lo hhello"


def test_h_h5_max_tokens_0_with_scores_runs_the_score_alone():
    """E9: cause `max_tokens`, no token; the forwards are those of the prompt's scores."""
    it = scripted({"a": HELLO})
    for request in (asking(echo=True, logprobs=1, max_tokens=0), asking(prompt_logprobs=1, max_tokens=0)):
        before = it.backend.tokens
        result = run(it, request)
        assert it.backend.tokens - before == 2
        assert (result.cause, result.finish_reason, result.token_ids) == ("max_tokens", "length", ())
        assert (result.logprobs, result.error) == ((), None)
        first, *others = result.prompt_logprobs
        assert first is None
        assert [(each.token, each.top[0][0]) for each in others] == [(98, 98), (99, 99)]
        assert result.text == ("abc" if request.echo else "")
    for request in (asking(echo=True, max_tokens=0), asking(logprobs=1, max_tokens=0)):
        before = it.backend.steps
        assert run(it, request).prompt_logprobs == ()
        assert it.backend.steps == before


@pytest.mark.on_jax(most=0)
def test_a_reply_does_not_know_that_its_prompt_was_scored(backend, tmp_path):
    """H-H8: the same ids and log-probabilities; those of the prompt are the engine's own scores, however it is run."""
    real = real_engine(SafetensorsCheckpoint(write_tiny_llama(tmp_path)), slots=1)
    ids = np.random.default_rng(2).integers(0, real.vocab, 40).astype(np.int32)
    sampled = SamplingParams(temperature=1.5, seed=4, max_tokens=6, logprobs=2)
    plain = generate(real.engine, SequenceSpec("a", ids, sampled), planner=PLANNER)
    scored = generate(real.engine, SequenceSpec("a", ids, sampled.clone(prompt_logprobs=3)), planner=PLANNER)
    assert (plain.token_ids, plain.logprobs) == (scored.token_ids, scored.logprobs)
    assert plain.prompt_logprobs == ()
    assert scored.prompt_logprobs == (None, *real.engine.score(ids, 0, 3).of_tokens(ids[1:]))
    whole = generate(
        real.engine, SequenceSpec("a", np.append(ids, plain.token_ids), sampled.clone(max_tokens=0, prompt_logprobs=2)),
        planner=PLANNER,
    )  # fmt: skip
    assert whole.prompt_logprobs[40:] == plain.logprobs


@pytest.mark.parametrize(
    ("params", "echo", "wanted"),
    [
        ({}, True, None),
        ({"logprobs": 3}, False, None),
        ({"logprobs": 0}, True, 0),
        ({"logprobs": 3}, True, 3),
        ({"prompt_logprobs": 0}, False, 0),
        ({"prompt_logprobs": 2, "logprobs": 5}, False, 2),
        ({"prompt_logprobs": 2, "logprobs": 5}, True, 5),
        ({"prompt_logprobs": -1, "logprobs": 5}, True, -1),
    ],
)
def test_what_is_wanted_of_a_prompt(params, echo, wanted):
    assert asking(echo=echo, **params).prompt_scores == wanted


@pytest.mark.parametrize(
    "request_", [asking(prompt_logprobs=21), asking(prompt=b"x" * 64, prompt_logprobs=1), asking(prompt_logprobs=-1),
                 asking(prompt_logprobs=1, stop_token_ids=(999,))],
)  # fmt: skip
def test_what_is_refused_is_refused_before_the_score(request_):
    it = scripted({"a": HELLO}, context=64)
    with pytest.raises(RequestError):
        run(it, request_)
    assert it.backend.steps == 0
    assert it.engine.open_sequences == ()
    assert run(it, asking()).text == "hello"


def test_an_echo_without_a_tokenizer_is_a_mistake_of_the_caller():
    it = scripted({"a": HELLO})
    with pytest.raises(ValueError, match="tokenizer"):
        generate(it.engine, asking(echo=True), planner=PLANNER)


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [(Fault("read", 1), BackendFault, "backend_fault"), (Fault("status", 1, "nan"), NumericFault, "numeric")],
)
def test_a_fault_of_the_score_is_the_requests_error(fault, kind, code):
    """E20 and E21: in the result, heard of once, nothing left."""
    it = scripted({"a": HELLO}, faults=FaultPlan([fault]))
    heard = []

    class Watching:
        def step_finished(self, report):
            pass

        def request_finished(self, result):
            heard.append(result)

    result = run(it, asking(prompt_logprobs=1), observers=Observers((Watching(),)))
    assert isinstance(result.error, kind)
    assert (result.cause, result.detail, result.text, result.prompt_logprobs) == ("error", code, "", ())
    assert [each.cause for each in heard] == ["error"]
    assert it.kv.stats().owned == 0
    assert run(it, asking(prompt_logprobs=1)).text == "hello"


def test_an_interrupted_score_is_cancelled(monkeypatch):
    it = scripted({"a": HELLO})
    interrupted_at(monkeypatch, ScriptedBackend, "submit", 1)
    result = run(it, asking(prompt_logprobs=1))
    assert (result.cause, result.token_ids, result.prompt_logprobs) == ("cancelled", (), ())
    assert it.kv.stats().owned == 0
    assert it.engine.open_sequences == ()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 1}, 1),
        ({"truncate_prompt_tokens": 20}, 20),
        ({"truncate_prompt_tokens": 99}, 20),
        ({"truncate_prompt_tokens": -1}, 20),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, 20),
        ({"truncate_prompt_tokens": -1, "max_tokens": 15}, 17),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1000}, 1),
        ({}, 20),
    ],
)
def test_h_i10_a_prompt_is_cut_only_where_that_is_asked_for(params, kept):
    """H-I10: its newest ids stay, and the result says how many went."""
    it = scripted({"a": HELLO}, context=32)
    prompt = bytes(range(97, 117))
    result = run(it, asking(prompt=prompt, **params), run_ahead=False)
    assert bytes(result.prompt_ids) == prompt[20 - kept :]
    assert result.truncated_tokens == 20 - kept
    assert it.backend.tokens == kept + len(HELLO) - 1


def test_h_i10_a_long_prompt_is_refused_by_default():
    """H-I10: also where a cut that was asked for leaves too much. Both numbers are in the message."""
    it = scripted({"a": HELLO}, context=32)
    for params, length in (({}, 32), ({}, 50), ({"truncate_prompt_tokens": 40}, 40)):
        with pytest.raises(ContextTooLong, match=f"{length}.*32") as caught:
            run(it, asking(prompt=b"x" * max(length, 50 if params else length), **params))
        assert caught.value.code == "context_length_exceeded"
    assert it.backend.steps == 0
    fitted = run(it, asking(prompt=b"x" * 50, truncate_prompt_tokens=-1))
    assert (len(fitted.prompt_ids), fitted.truncated_tokens, fitted.text) == (31, 19, "h")
    assert fitted.cause == "context"


def test_what_was_cut_is_neither_echoed_nor_scored():
    it = scripted({"a": HELLO})
    result = run(it, asking(prompt=b"abcdef", echo=True, logprobs=0, truncate_prompt_tokens=2))
    assert result.text == "efhello"
    assert [None if each is None else each.token for each in result.prompt_logprobs] == [None, ord("f")]


def test_h_d1_a_bos_in_the_prompt_is_scored_and_not_shown():
    """T2: special tokens are left out of the echo unless they are asked for."""
    it = scripted({"a": HELLO})
    request = attrs.evolve(asking(echo=True, logprobs=0), prompt_ids=np.array([BOS, *b"hi"], np.int32))
    result = run(it, request)
    assert result.text == "hihello"
    assert [each.token for each in result.prompt_logprobs[1:]] == [*b"hi"]
    shown = attrs.evolve(request, params=request.params.clone(skip_special_tokens=False))
    assert run(it, shown).text.startswith("<|bos|>hi")
