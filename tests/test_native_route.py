"""POST /completion (docs/spec/clients.md 3.6): llama.cpp's shape, whole and streamed."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from script_server import ScriptServer, running
from sse_rows import data
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, SamplingParams
from mlxcel.server.native_reply import STOP_TYPES, projected
from mlxcel.server.settings import ServerSettings
from mlxcel.testing.byte_tokenizer import EOS

PATHS = ("/completion", "/completions")
KEYS = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached"),
    *("timings", "finish_cause"),
}
TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms"),
    *("predicted_per_token_ms", "predicted_per_second", "queue_ms", "ttft_ms"),
}
CONTEXT = 256
CLOSE = 2e-4
"""Of log-probabilities that two programs add up in another order, as in docs/spec/clients.md 1.10."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    """Says what its prompt says."""
    with running(model, max_model_len=CONTEXT) as made:
        yield made


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[ScriptServer]:
    """Draws from a small model's own logits."""
    with running(model, backend="reference-numpy", max_model_len=CONTEXT) as made:
        yield made


def asked(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, **more}


# --- whole replies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_whole_reply(server: ScriptServer, path: str) -> None:
    """Test 2 of 3.13, on both paths."""
    reply = server.ok(path, asked("say <<a\nb>>"))
    assert set(reply) == KEYS
    assert set(reply["timings"]) == TIMINGS
    rest = {name: reply[name] for name in KEYS - {"generation_settings", "timings", "tokens_cached"}}
    assert rest == {
        "index": 0, "content": "a\nb", "tokens": [], "id_slot": -1, "stop": True, "model": "tiny",
        "tokens_predicted": 3, "tokens_evaluated": 11, "prompt": "say <<a\nb>>", "has_new_line": True,
        "truncated": False, "stop_type": "eos", "stopping_word": "", "finish_cause": "eos",
    }  # fmt: skip
    timings = reply["timings"]
    assert (timings["cache_n"] + timings["prompt_n"], timings["predicted_n"]) == (11, 3)


def test_settings_are_those_that_were_used(server: ScriptServer) -> None:
    """Rule 3 of clients.md and case H-E5: what is reported is what ran, under our names and llama.cpp's."""
    asked_for = {"repeat_penalty": 1.5, "n_predict": 2, "top_k": 7, "stop": ["x"], "temperature": 0.5, "n_keep": -1}
    settings = server.ok("/completion", {"prompt": "abc", **asked_for})["generation_settings"]
    assert {name: settings[name] for name in asked_for} == asked_for
    assert (settings["repetition_penalty"], settings["max_tokens"], settings["stream"]) == (1.5, 2, False)
    assert settings["origin"]["top_k"] == "request"
    assert settings["order"] == ["penalties", "top_k", "top_p", "min_p", "temperature"]
    drawn = settings["seed"]
    assert drawn >= 0
    again = server.ok("/completion", {"prompt": "abc", "seed": drawn})
    assert again["generation_settings"]["seed"] == drawn


def test_prompts_of_all_kinds_in_one_request(server: ScriptServer) -> None:
    """Test 21 of 3.13: a list gives a list, in the order of the prompts; ids are shown as their text."""
    prompts = ["ab", [99, 100], ["e", 102], [103, "h"]]
    replies = server.ok("/completion", asked(prompts, return_tokens=True))
    assert [reply["index"] for reply in replies] == [0, 1, 2, 3]
    assert [reply["content"] for reply in replies] == ["ab", "cd", "ef", "gh"]
    assert [reply["prompt"] for reply in replies] == ["ab", "cd", "ef", "gh"]
    assert [reply["tokens"] for reply in replies] == [[97, 98], [99, 100], [101, 102], [103, 104]]
    for prompt, reply in zip(prompts, replies, strict=True):
        alone = server.ok("/completion", asked([prompt] if isinstance(prompt, str) else prompt, return_tokens=True))
        assert without_chance(alone) == {**without_chance(reply), "index": 0}


def without_chance(reply: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in reply.items() if name not in ("timings", "tokens_cached", "generation_settings")
    }


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
def test_h_i1_choices_have_their_own_text_and_index(server: ScriptServer, name: str) -> None:
    """Choice index = prompt index times n + choice, streamed and not."""
    body = asked(["<<a|b|c>>", "<<d|e|f>>"], **{name: 3})
    replies = server.ok("/completion", body)
    assert [(reply["index"], reply["content"]) for reply in replies] == list(enumerate("abcdef"))
    streamed: dict[int, str] = dict.fromkeys(range(6), "")
    for part in data(server, "/completion", body):
        streamed[part["index"]] += part["content"]
    assert streamed == dict(enumerate("abcdef"))


def test_ids_come_when_they_are_asked_for(server: ScriptServer) -> None:
    assert server.ok("/completion", asked("ab", return_tokens=True))["tokens"] == [97, 98]
    assert server.ok("/completion", asked("ab", return_tokens=False))["tokens"] == []


def test_response_fields_leave_what_they_name(server: ScriptServer) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "not_there", "content/deeper"]
    body = asked("ab", n_predict=7, response_fields=fields)
    kept = {"content": "ab", "n_predict": 7, "predicted_n": 2}
    assert server.ok("/completion", body) == kept
    *parts, last = data(server, "/completion", body)
    assert [set(part) for part in parts] == [{"index", "content", "tokens", "stop"}] * 2
    assert last == {**kept, "content": ""}


def test_projection() -> None:
    made = {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
    assert projected(made, []) == made
    assert projected(made, ["a/b/c", "a/d", "e", "a/x", "e/b", "a/"]) == {"c": 1, "d": 2, "e": 3}
    assert projected(made, ["x"]) == {}


@pytest.mark.parametrize(
    ("cause", "stop_type"),
    [
        *(("eos", "eos"), ("stop_token", "eos"), ("stop_string", "word"), ("grammar", "eos"), ("max_tokens", "limit")),
        *(("context", "limit"), ("time_limit", "limit"), ("indent_limit", "limit"), ("loop", "limit")),
        ("a plugin's own", "limit"),
    ],
)
def test_every_cause_has_its_stop_type(cause: str, stop_type: str) -> None:
    """The table of clients.md 0.4."""
    assert STOP_TYPES.get(cause, "limit") == stop_type


@pytest.mark.parametrize(
    ("more", "ending"),
    [
        ({}, ("eos", "eos", "", False)),
        ({"stop_token_ids": [98]}, ("stop_token", "eos", "", False)),
        ({"stop": ["q", "b"]}, ("stop_string", "word", "b", False)),
        ({"stop_sequences": ["b"]}, ("stop_string", "word", "b", False)),
        ({"n_predict": 1}, ("max_tokens", "limit", "", False)),
        ({"prompt": "c" * 200}, ("context", "limit", "", True)),
        ({"prompt": "c" * 60, "loop_detection": {"min_pattern": 1, "max_pattern": 2, "min_count": 8}},
         ("loop", "limit", "", False)),
    ],
)  # fmt: skip
def test_h_i17_each_ending_has_its_own_reason(
    server: ScriptServer, more: dict[str, Any], ending: tuple[str, str, str, bool]
) -> None:
    body = {**asked("ab"), **more}
    for reply in (server.ok("/completion", body), data(server, "/completion", body)[-1]):
        assert (reply["finish_cause"], reply["stop_type"], reply["stopping_word"], reply["truncated"]) == ending


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities(real: ScriptServer, model: Path, streamed: bool) -> None:
    """`n_probs` gives each token's own value and the best ones, as the library gives them."""
    body = asked("the cat", n_predict=5, n_probs=3)
    if streamed:
        parts = data(real, "/completion", body)
        entries = [entry for part in parts for entry in part.get("completion_probabilities", ())]
    else:
        entries = real.ok("/completion", body)["completion_probabilities"]
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    with LLM(model, backend="reference-numpy", max_model_len=CONTEXT) as llm:
        [output] = llm.generate("the cat", params)
        tokenizer = llm.get_tokenizer()
    expected = output.outputs[0]
    assert expected.logprobs is not None
    assert [entry["id"] for entry in entries] == list(expected.token_ids)
    for entry, values in zip(entries, expected.logprobs, strict=True):
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        best = sorted((each for each in values.items() if each[1].rank), key=lambda each: each[1].rank or 0)
        assert [top["id"] for top in entry["top_logprobs"]] == [token for token, _ in best]
        for shown, (token, value) in zip(entry["top_logprobs"], best, strict=True):
            assert shown["logprob"] == pytest.approx(value.logprob, abs=CLOSE)
            assert bytes(shown["bytes"]) == tokenizer.token_bytes(token) or tokenizer.is_special(token)
        assert entry["logprob"] == pytest.approx(values[entry["id"]].logprob, abs=CLOSE)


def test_probabilities_after_the_chain(real: ScriptServer) -> None:
    """`post_sampling_probs`: of what is drawn from, not of logits; the chain removed all but top_k of them."""
    body = {"prompt": "the cat", "n_predict": 4, "seed": 3, "temperature": 1, "top_k": 2, "top_p": 1, "min_p": 0}
    for entry in real.ok("/completion", {**body, "n_probs": 4, "post_sampling_probs": True})[
        "completion_probabilities"
    ]:
        assert set(entry) == {"id", "token", "bytes", "prob", "top_probs"}
        probabilities = [top["prob"] for top in entry["top_probs"]]
        assert math.fsum(probabilities) == pytest.approx(1, abs=CLOSE)
        assert [value > 0 for value in probabilities] == [True, True]
        assert entry["prob"] in probabilities


def test_none_are_asked_for(server: ScriptServer) -> None:
    """`n_probs` 0 is llama-server's "off"."""
    assert set(server.ok("/completion", asked("ab", n_probs=0))) == KEYS


def test_log_probabilities_of_the_prompt(real: ScriptServer) -> None:
    """As on the other route, with the end of each reply."""
    body = asked([5, 6, 7], n_predict=2, prompt_logprobs=2)
    scores = real.ok("/completion", body)["prompt_logprobs"]
    assert (len(scores), scores[0]) == (3, None)
    assert scores == data(real, "/completion", body)[-1]["prompt_logprobs"]
    assert scores == real.ok("/v1/completions", body)["choices"][0]["prompt_logprobs"]


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "top_k": 0},
        {"temperature": 0.9, "seed": 7, "min_p": 0.01, "repetition_penalty": 1.2, "n": 2},
    ],
)
def test_ids_are_those_of_the_other_route(real: ScriptServer, sampling: dict[str, Any]) -> None:
    """Test 21 of 3.13, and parity of docs/spec/clients.md 2.2: for the same values."""
    prompts = ["the cat", [5, 6, 7, 8]]
    body = {"prompt": prompts, "max_tokens": 12, **sampling}
    choices = real.ok("/v1/completions", {**body, "return_token_ids": True})["choices"]
    replies = real.ok("/completion", {**body, "return_tokens": True})
    assert [reply["tokens"] for reply in replies] == [choice["token_ids"] for choice in choices]
    assert [reply["content"] for reply in replies] == [choice["text"] for choice in choices]
    assert any(reply["tokens"] for reply in replies)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        asked("<<hé😀llo>>"),
        asked("say <<one STOP two>>", stop=["STOP", "tw"]),
        asked("say <<one two>>", stop=["two"], include_stop_str_in_output=True),
        asked("say <<one two>>", stop=["two three"]),
        asked("ab", n_predict=0),
        asked("ab", n_predict=1),
    ],
)
def test_a_stream_is_the_whole_reply_in_pieces(server: ScriptServer, body: dict[str, Any]) -> None:
    """The rules of streams in clients.md 3.6, on this route: no [DONE], and a full object last."""
    whole = server.ok("/completion", {**body, "return_tokens": True, "n_probs": 1})
    *parts, last = data(server, "/completion", {**body, "n_probs": 1})
    assert "".join(part["content"] for part in [*parts, last]) == whole["content"]
    assert [token for part in [*parts, last] for token in part["tokens"]] == whole["tokens"]
    entries = [entry for part in [*parts, last] for entry in part.get("completion_probabilities", ())]
    assert entries == whole["completion_probabilities"]
    assert all(part["stop"] is False and part["content"] for part in parts)
    pieces = ("content", "tokens", "completion_probabilities", "generation_settings", "timings", "tokens_cached")
    kept = set(whole) - set(pieces)
    assert {name: last[name] for name in kept} == {name: whole[name] for name in kept}
    assert last["content"] == ""


def test_partial_objects(server: ScriptServer) -> None:
    *parts, _ = data(server, "/completion", asked("abc"))
    assert parts == [{"index": 0, "content": letter, "tokens": [ord(letter)], "stop": False} for letter in "abc"]


def test_timings_of_each_token(server: ScriptServer) -> None:
    *parts, last = data(server, "/completion", asked("abc", timings_per_token=True))
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3]
    for part in parts:
        timings = part["timings"]
        assert set(timings) == TIMINGS
        assert timings["cache_n"] + timings["prompt_n"] == 3
        assert min(timings[name] for name in ("prompt_ms", "predicted_ms", "queue_ms", "ttft_ms")) >= 0
    assert parts[0]["timings"]["predicted_per_second"] is None
    assert set(last["timings"]) == TIMINGS


@pytest.mark.parametrize("path", PATHS)
def test_progress_is_told_on_request(server: ScriptServer, path: str) -> None:
    """llama.cpp's `return_progress`: of each prompt, before its first text, in a piece that brings none."""
    server.serving.reset_cache()
    body = asked(["a" * 40, "b" * 60], return_progress=True, n=2)
    parts = data(server, path, body)
    for index, length in ((0, 40), (2, 60)):
        (begun, done, *_) = own = [part for part in parts if part["index"] == index]
        told = [part["prompt_progress"] for part in (begun, done)]
        assert [(each["total"], each["cache"], each["processed"]) for each in told] == [
            (length, 0, 0), (length, 0, length),
        ]  # fmt: skip
        assert 0 <= told[0]["time_ms"] <= told[1]["time_ms"]
        for part in (begun, done):
            assert (part["content"], part["tokens"], part["stop"]) == ("", [], False)
        assert not any("prompt_progress" in part for part in own[2:])
    assert not any("prompt_progress" in part for part in parts if part["index"] in (1, 3))
    assert "".join(part["content"] for part in parts if part["index"] == 2) == "b" * 60
    again = next(part["prompt_progress"] for part in data(server, path, body) if part["index"] == 2)
    assert again["cache"] == again["processed"] > 0
    assert not any("prompt_progress" in part for part in data(server, path, asked("abc")))
    status, reply, _ = server.post(path, asked("a", return_progress="yes"))
    assert (status, reply["error"]["param"]) == (400, "return_progress")


def test_a_fault_in_mid_stream_is_the_last_event(server: ScriptServer) -> None:
    """clients.md 3.6: an error in the shape of the route, and no invented end; 500 where nothing was sent yet."""
    *parts, last = data(server, "/completion", asked("ab!c"))
    assert "".join(part["content"] for part in parts) == "ab"
    assert set(last) == {"error", "request_id"}
    assert (last["error"]["code"], last["error"]["type"]) == (500, "server_error")
    status, reply, _ = server.post("/completion", asked("ab!c"))
    assert (status, reply["error"]["type"]) == (500, "server_error")
    assert server.ok("/completion", asked("ab"))["content"] == "ab"
    assert server.idle()


# --- refusals ---------------------------------------------------------------------------------------------------------

INVALID = "invalid_request_error"

FAULTS: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", [319, -1]]}, "prompt[1][1]"),
    ({"prompt": {"prompt_string": "a"}}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 16}, "prompt"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": 101}, "temperature"),
    ({"prompt": "a", "n_predict": -2}, "n_predict"),
    ({"prompt": "a", "n_predict": 1, "max_tokens": 2}, "max_tokens"),
    ({"prompt": "a", "stop": [""]}, "stop[0]"),
    ({"prompt": "a", "stop": ["a"] * 65}, "stop"),
    ({"prompt": "a", "repeat_penalty": 0}, "repeat_penalty"),
    ({"prompt": "a", "n_probs": 21}, "n_probs"),
    ({"prompt": "a", "n_probs": -1}, "n_probs"),  # all of them, which is more than the cap
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt": "a", "samplers": ["min_p", "top_k"]}, "samplers"),
    ({"prompt": "a", "grammar": "root ::= x"}, "grammar"),
    ({"prompt": "a", "json_schema": {}}, "json_schema"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "return_tokens": 1}, "return_tokens"),
    ({"prompt": "a", "response_fields": "content"}, "response_fields"),
    ({"prompt": "a", "response_fields": ["a", ""]}, "response_fields[1]"),
    ({"prompt": "a", "id_slot": 4}, "id_slot"),
    ({"prompt": "a", "id_slot": -2}, "id_slot"),
    ({"prompt": "a", "lora": [{"id": 0, "scale": 0.5}]}, "lora[0].scale"),
    ({"prompt": "a", "lora": {"id": 0}}, "lora"),
    ({"prompt": "a", "lora": [0]}, "lora[0]"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "a", "priority": "urgent"}, "priority"),
    ({"prompt": "a", "sse_ping_interval": -2}, "sse_ping_interval"),
    # H-I2 and H-P3
    *(({"prompt": "a", "n": n}, "n") for n in (0, -1, 1.5, "2", True, 17, 5_000_000)),
    # H-I14
    ({"prompt": "a", "logit_bias": {"999999": 5}}, 'logit_bias["999999"]'),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, 'logit_bias["-1"]'),
    ({"prompt": "a", "logit_bias": {"abc": 1}}, 'logit_bias["abc"]'),
    ({"prompt": "a", "logit_bias": [[999999, 5]]}, "logit_bias[0]"),
    # H-I12
    *(({"prompt": [token]}, "prompt[0]") for token in (-1, 320, 2**63, True, 1.5)),
)


@pytest.mark.parametrize(("body", "param"), FAULTS, ids=[f"{place}-{param}" for place, (_, param) in enumerate(FAULTS)])
@pytest.mark.parametrize("stream", [False, True])
def test_h_p12_a_bad_request_is_refused_by_its_field(
    server: ScriptServer, body: dict[str, Any], param: str, stream: bool
) -> None:
    """Test 3 of 3.13: 400 before any stream, in the shape of the route, with the path that the client wrote; then a
    good request. The kinds of cases H-I2, H-I12, H-I14, H-P3 and H-P5."""
    status, reply, headers = server.post("/completion", {**body, **({} if "stream" in body else {"stream": stream})})
    error = reply["error"]
    assert (status, headers["content-type"]) == (400, "application/json")
    assert (error["code"], error["type"], error["param"]) == (400, INVALID, param)
    assert "POST /completion" in error["message"]
    assert reply["request_id"] == headers["x-request-id"]
    assert server.ok("/completion", asked("ab"))["content"] == "ab"


@pytest.mark.parametrize("stream", [False, True])
def test_h_i6_h_i8_a_prompt_that_does_not_fit_is_refused_before_a_stream(server: ScriptServer, stream: bool) -> None:
    status, reply, _ = server.post("/completion", asked("a" * CONTEXT, stream=stream))
    error = reply["error"]
    assert (status, error["code"], error["type"]) == (400, 400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (CONTEXT, CONTEXT)
    assert error["message"].count(str(CONTEXT)) >= 2
    assert server.ok("/completion", asked("ab"))["content"] == "ab"


def test_h_i10_a_prompt_is_cut_only_when_that_is_asked_for(server: ScriptServer) -> None:
    reply = server.ok("/completion", asked("a" * CONTEXT + "bc", truncate_prompt_tokens=2, n_predict=4))
    assert (reply["tokens_evaluated"], reply["prompt"], reply["content"]) == (2, "bc", "bc")


@pytest.mark.parametrize(("asked_for", "tokens"), [(0, 0), (1, 1), (2, 2), (None, 3), (-1, 3), (2**40, 3)])
def test_h_i5_lengths(server: ScriptServer, asked_for: int | None, tokens: int) -> None:
    reply = server.ok("/completion", asked("abc", n_predict=asked_for))
    assert reply["tokens_predicted"] == tokens
    assert reply["finish_cause"] == ("eos" if tokens == 3 else "max_tokens")


def test_h_o9_null_is_not_given(server: ScriptServer) -> None:
    names = ["n_predict", "stop", "seed", "n_probs", "id_slot", "lora", "response_fields", "cache_prompt", "stream"]
    reply = server.ok("/completion", {"prompt": "ab", "temperature": 0, **dict.fromkeys(names)})
    assert reply["content"] == "ab"


def test_h_i16_odd_ids_with_every_log_line_on(server: ScriptServer, caplog: pytest.LogCaptureFixture) -> None:
    """Logging never fails a request, whatever it is about."""
    with caplog.at_level(logging.DEBUG):
        assert server.post("/completion", {"prompt": [-1]})[0] == 400
        assert server.post("/completion", b'{"prompt": "\xff"}')[0] == 400
        assert server.ok("/completion", asked([255, 254, EOS, 300]))["prompt"] == "\ufffd\ufffd<|eos|>"


def test_h_p7_a_salt_divides_the_cache(server: ScriptServer) -> None:
    prompt = "a prompt that is kept: " + "s" * 40
    kept = [
        server.ok("/completion", asked(prompt, n_predict=1, cache_salt=salt))["tokens_cached"]
        for salt in ("red", "red", "blue")
    ]
    assert kept[0] == kept[2] == 0 < kept[1]
    assert (
        server.ok("/completion", asked(prompt, n_predict=1, cache_salt="red", cache_prompt=False))["tokens_cached"] == 0
    )


def test_fields_that_cannot_act_are_said(server: ScriptServer, model: Path) -> None:
    """Rule 2 of clients.md: accepted with a warning, or refused under --strict."""
    body = asked("ab", n_keep=3, n_cache_reuse=256, lora=[{"id": 0, "scale": 0}], id_slot=1)
    reply = server.ok("/completion", body)
    assert [warning.split()[0] for warning in reply["warnings"]] == ["n_keep", "n_cache_reuse"]
    assert data(server, "/completion", body)[-1]["warnings"] == reply["warnings"]
    with running(model, ServerSettings(strict=True), max_model_len=CONTEXT) as strict:
        status, refused, _ = strict.post("/completion", body)
        assert (status, refused["error"]["param"]) == (400, "n_keep")
        assert strict.post("/completion", asked("ab", foo=1))[1]["error"]["param"] == "foo"
        assert strict.ok("/completion", asked("ab", n_keep=0))["content"] == "ab"


@pytest.mark.parametrize(
    ("send", "status", "kind"),
    [
        ({"body": b"{"}, 400, INVALID),
        ({"body": b"[]"}, 400, INVALID),
        ({"body": b'{"prompt": "a"}', "headers": {"Content-Type": "text/plain"}}, 415, INVALID),
        ({"body": {"prompt": "a", "model": "other"}}, 404, "not_found_error"),
    ],
)
def test_other_faults_in_the_shape_of_the_route(
    server: ScriptServer, send: dict[str, Any], status: int, kind: str
) -> None:
    """Test 3 of 3.13."""
    found, reply, _ = server.post("/completion", **send)
    assert (found, reply["error"]["code"], reply["error"]["type"]) == (status, status, kind)
    assert server.ok("/completion", asked("ab"))["content"] == "ab"
