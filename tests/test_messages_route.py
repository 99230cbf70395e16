"""POST /v1/messages and /v1/messages/count_tokens (docs/spec/clients.md 3.6)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from other_threads import PATIENCE
from script_plugin import GATE
from script_server import ScriptServer, running
from sse_rows import events, events_of
from tiny_checkpoint import CHATML, write_json, write_tiny_llama

from mlxcel.server.message_reply import STOP_REASONS
from mlxcel.server.settings import ServerSettings

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CONTEXT = 512
KEYS = {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage", "finish_cause"}
THINKING = "{% if enable_thinking %}THINK{% else %}PLAIN{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": THINKING + CHATML})
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    """Says what its prompt says."""
    with running(model, ServerSettings(max_body_size=100_000), max_model_len=CONTEXT) as made:
        yield made


def turn(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def asked(text: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [turn(text)], "max_tokens": 100, "temperature": 0, **more}


# --- whole replies ----------------------------------------------------------------------------------------------------


def test_a_whole_reply(server: ScriptServer) -> None:
    """Test 2 of 3.13."""
    reply = server.ok(PATH, {**asked("<<Good day>>"), "model": "tiny", "metadata": {"user_id": "u"}})
    assert set(reply) == KEYS
    assert reply["id"].startswith("msg_")
    assert {name: reply[name] for name in KEYS - {"id", "usage"}} == {
        "type": "message", "role": "assistant", "content": [{"type": "text", "text": "Good day"}], "model": "tiny",
        "stop_reason": "end_turn", "stop_sequence": None, "finish_cause": "eos",
    }  # fmt: skip
    assert set(reply["usage"]) == {
        *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"),
    }
    assert reply["usage"]["output_tokens"] == len("Good day")


@pytest.mark.parametrize(
    "text", ["<<one>>", [{"type": "text", "text": "<<one>>", "cache_control": {"type": "ephemeral"}}]]
)
@pytest.mark.parametrize("system", [None, "Be brief", [{"type": "text", "text": "Be brief"}]])
def test_counts_add_up_to_the_prompt(server: ScriptServer, text: Any, system: Any) -> None:
    """Test 19 of 3.13: the three counts of the input are the prompt, which count_tokens and the chat's usage agree
    with, cold and from the cache."""
    body = asked(text, system=system)
    [counted] = server.ok(COUNT, {"messages": body["messages"], "system": system}).values()
    spoken = [] if system is None else [turn("Be brief", "system")]
    chat = server.ok("/v1/chat/completions", {"messages": [*spoken, turn("<<one>>")], "max_tokens": 5})
    assert counted == chat["usage"]["prompt_tokens"]
    for reply in (server.ok(PATH, body), server.ok(PATH, body)):
        usage = reply["usage"]
        inputs = [usage[name] for name in usage if name != "output_tokens"]
        assert sum(inputs) == counted
        assert reply["content"][0]["text"] == chat["choices"][0]["message"]["content"] == "one"
    assert usage["cache_read_input_tokens"] > 0


def test_a_prompt_longer_than_the_context_is_counted(server: ScriptServer) -> None:
    [counted] = server.ok(COUNT, {"messages": [turn("a" * 2000)]}).values()
    assert counted > 2000


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        *(("eos", "end_turn"), ("stop_token", "end_turn"), ("stop_string", "stop_sequence"), ("grammar", "end_turn")),
        *(("max_tokens", "max_tokens"), ("context", "max_tokens"), ("time_limit", "max_tokens")),
        *(("indent_limit", "end_turn"), ("loop", "end_turn"), ("a plugin's own", "end_turn")),
    ],
)
def test_every_cause_has_its_stop_reason(cause: str, reason: str) -> None:
    """The table of clients.md 0.4."""
    assert STOP_REASONS.get(cause, "end_turn") == reason


@pytest.mark.parametrize(
    ("text", "more", "ending"),
    [
        ("<<ab>>", {}, ("eos", "end_turn", None)),
        ("<<ab>>", {"stop_sequences": ["x", "b"]}, ("stop_string", "stop_sequence", "b")),
        ("<<ab>>", {"stop_token_ids": [98]}, ("stop_token", "end_turn", None)),
        ("<<ab>>", {"max_tokens": 1}, ("max_tokens", "max_tokens", None)),
        ("<<ab>>", {"max_tokens": 0}, ("max_tokens", "max_tokens", None)),
        ("<<" + "ab" * 210 + ">>", {"max_tokens": 2**40}, ("context", "max_tokens", None)),
    ],
)
def test_h_i17_each_ending_has_its_own_reason(
    server: ScriptServer, text: str, more: dict[str, Any], ending: tuple[str, str, str | None]
) -> None:
    body = {**asked(text), **more}
    reply = server.ok(PATH, body)
    assert (reply["finish_cause"], reply["stop_reason"], reply["stop_sequence"]) == ending
    [*_, (_, last), _] = events(server, PATH, body)
    assert last["delta"] == {"stop_reason": ending[1], "stop_sequence": ending[2], "finish_cause": ending[0]}


# --- conversations ----------------------------------------------------------------------------------------------------


def test_the_prompt_is_the_chats(server: ScriptServer) -> None:
    """The system first, then every message, in the model's own template."""
    body = {
        "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}],
        "messages": [turn("Hi"), turn("Ho", "assistant"), turn([{"type": "text", "text": "Go on"}])],
    }
    chat = [turn("Be\nbrief", "system"), *body["messages"]]
    rendered = server.ok("/apply-template", {"messages": chat})["prompt"]
    ids = server.ok("/tokenize", {"content": rendered})["count"]
    assert server.ok(COUNT, body) == {"input_tokens": ids}


@pytest.mark.parametrize("prefix", ["<<1, 2,", [{"type": "text", "text": "<<1, 2,"}]])
def test_h_d5_a_last_message_of_the_assistant_is_gone_on_with(server: ScriptServer, prefix: Any) -> None:
    """It is left open: no end of turn and no new turn behind it, and the reply does not repeat it."""
    messages = [turn(">> count"), turn(prefix, "assistant")]
    [open_tokens] = server.ok(COUNT, {"messages": messages}).values()
    chat = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    rendered = server.ok("/apply-template", chat)["prompt"]
    assert rendered.endswith("<|im_start|>assistant\n<<1, 2,")
    assert open_tokens == server.ok("/tokenize", {"content": rendered})["count"]
    spoken = server.ok(PATH, {"messages": messages, "max_tokens": 5})["content"][0]["text"]
    assert spoken == server.ok("/v1/chat/completions", {**chat, "max_tokens": 5})["choices"][0]["message"]["content"]


def test_h_d3_only_the_assistant_has_spoken(server: ScriptServer) -> None:
    assert server.ok(PATH, {"messages": [turn("<<x>>", "assistant")], "max_tokens": 9})["content"][0]["text"] == "x"


def test_h_d7_no_messages_and_then_some(server: ScriptServer) -> None:
    for path in (PATH, COUNT):
        status, reply, _ = server.post(path, {"messages": [], "max_tokens": 5})
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert "messages is empty" in reply["error"]["message"]
    assert server.ok(PATH, asked("<<ok>>"))["content"][0]["text"] == "ok"


def test_h_d8_a_system_message_among_the_others_is_refused_by_name(server: ScriptServer) -> None:
    status, reply, _ = server.post(PATH, {"messages": [turn("a"), turn("b", "system"), turn("c")], "max_tokens": 5})
    assert status == 400
    assert "messages[1].role is 'system'" in reply["error"]["message"]
    assert "`system`" in reply["error"]["message"]


def test_a_message_that_the_template_drops_is_named_as_the_client_counts(tmp_path: Path) -> None:
    """clients.md 3.3: none may vanish; the system that was given apart is not one of the messages."""
    folder = write_tiny_llama(tmp_path / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{% if message['content'] != 'lost' %}{{ message['content'] }}{% endif %}"
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": template + "{% endfor %}"})
    with running(folder, max_model_len=CONTEXT) as made:
        for more, named in (({}, "messages[1]"), ({"system": "seen"}, "messages[1]"), ({"system": "lost"}, "system")):
            texts = ["seen", "seen" if named == "system" else "lost"]
            status, reply, _ = made.post(PATH, {"messages": [turn(text) for text in texts], "max_tokens": 5, **more})
            assert status == 400
            assert reply["error"]["message"].startswith(f"{named} (")


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_disabled_thinking_reaches_the_template(server: ScriptServer, path: str) -> None:
    """clients.md 3.6: thinking can only be disabled; the template of this model says which it is."""
    body = asked("a", max_tokens=5)
    plain = server.ok(path, {**body, "thinking": {"type": "disabled"}})
    assert server.ok(path, {**body, "thinking": None}) is not None
    if path == PATH:
        assert plain["content"][0]["text"] == "PLAIN"
        assert server.ok(path, body)["content"][0]["text"] == "THINK"


def test_h_d10_the_template_hears_its_variables(server: ScriptServer) -> None:
    """Unknown ones are harmless; those of the request itself are refused."""
    spoken = [
        server.ok(PATH, asked("a", max_tokens=5, chat_template_kwargs=given))["content"][0]["text"]
        for given in ({"enable_thinking": False}, {"enable_thinking": True, "odd": 1})
    ]
    assert spoken == ["PLAIN", "THINK"]
    status, reply, _ = server.post(PATH, asked("a", chat_template_kwargs={"messages": []}))
    assert status == 400
    assert "chat_template_kwargs" in reply["error"]["message"]


def test_h_d1_one_bos(tmp_path: Path) -> None:
    """The template writes it, the tokenizer adds none: what is counted is what is used."""
    folder = write_tiny_llama(tmp_path / "tiny", add_bos=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": "{{ bos_token }}" + CHATML})
    with running(folder, backend="reference-numpy", max_model_len=CONTEXT) as made:
        ids = made.ok("/apply-template", {"messages": [turn("Hello")], "explain": True})["token_ids"]
        assert ids.count(0) == 1
        assert made.ok(COUNT, {"messages": [turn("Hello")]}) == {"input_tokens": len(ids)}
        assert made.ok(PATH, asked("Hello", max_tokens=1))["usage"]["input_tokens"] == len(ids)


def test_what_a_model_thinks_stays_in_the_text(server: ScriptServer) -> None:
    """A message is one text: nothing of a reply is split off it, and nothing is lost."""
    text = "<think>hm</think>yes"
    for more in ({}, {"reasoning_format": "auto"}, {"reasoning_format": "none"}):
        reply = server.ok(PATH, asked(f"<<{text}>>", **more))
        assert reply["content"] == [{"type": "text", "text": text}]


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (asked("<<hé😀llo>>"), "hé😀llo"),
        (asked("<<one STOP two>>", stop_sequences=["STOP"]), "one "),
        (asked("<<abc>>", max_tokens=2), "ab"),
        (asked("<<abc>>", max_tokens=0), ""),
    ],
)
def test_h_o20_events_in_their_order(server: ScriptServer, body: dict[str, Any], text: str) -> None:
    """Test 19 of 3.13: each `event:` is its type, the one block has index 0, and the pieces are the whole reply."""
    whole = server.ok(PATH, body)
    found = events(server, PATH, body)
    assert all(name == value["type"] for name, value in found)
    names = [name for name, _ in found]
    pieces = names.count("content_block_delta")
    assert names == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * pieces,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    values = [value for _, value in found]
    assert [value["index"] for value in values if value["type"].startswith("content_block")] == [0] * (pieces + 2)
    assert values[1]["content_block"] == {"type": "text", "text": ""}
    deltas = [value["delta"] for value in values if value["type"] == "content_block_delta"]
    assert all(delta["type"] == "text_delta" and delta["text"] for delta in deltas)
    assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"] == text
    begun = values[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    counts = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (begun["usage"], whole["usage"])]
    assert counts[0] == counts[1]
    assert values[-2]["usage"] == {"output_tokens": whole["usage"]["output_tokens"]}


def test_pings_keep_a_stream_alive(server: ScriptServer) -> None:
    """clients.md 3.6: headers leave before prefill; while nothing is sent there are pings, as events."""
    GATE.shut()
    body = {**asked("<<ab>>"), "stream": True, "sse_ping_interval": 0.01}
    request = urllib.request.Request(server.url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        heard = b""
        while b"event: ping\n" not in heard:
            heard += reply.readline()
        assert b"content_block_start" not in heard
        GATE.open.set()
        heard += reply.read()
    found = events_of(heard.decode())
    assert ("ping", {"type": "ping"}) in found
    assert [name for name, _ in found if name != "ping"][-1] == "message_stop"


def test_a_fault_in_mid_stream_is_an_error_event(server: ScriptServer) -> None:
    """clients.md 3.6: `event: error`, the last one, and no invented end. Whole replies are 500."""
    found = events(server, PATH, asked("<<ab!c>>"))
    assert [name for name, _ in found][-1] == "error"
    last = found[-1][1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] in last["error"]["message"]
    assert not any(name in ("content_block_stop", "message_delta", "message_stop") for name, _ in found)
    status, reply, _ = server.post(PATH, asked("<<ab!c>>"))
    assert (status, reply["error"]["type"]) == (500, "api_error")
    assert server.ok(PATH, asked("<<ok>>"))["content"][0]["text"] == "ok"
    assert server.idle()


# --- refusals ---------------------------------------------------------------------------------------------------------

FAULTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"messages": None}, "messages is missing"),
    ({"messages": "a"}, "messages is 'a'"),
    ({"messages": [turn(None)]}, "messages[0].content is missing"),
    ({"messages": [turn("a", "tool")]}, "messages[0].role is 'tool'"),
    *(
        ({"messages": [turn("a"), turn([{"type": kind}])]}, f"messages[1].content[0].type is '{kind}'")
        for kind in ("image", "document", "tool_use", "tool_result", "thinking")
    ),
    ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": "5"}, "max_tokens must be"),
    ({"max_tokens": -2}, "max_tokens must be"),
    ({"max_tokens": 1.5}, "max_tokens must be"),
    ({"temperature": 1.01}, "temperature must be a number from 0 to 1"),
    ({"temperature": -0.1}, "temperature must be"),
    ({"top_p": 1.1}, "top_p must be"),
    ({"top_k": -2}, "top_k must be"),
    ({"stop_sequences": [""]}, "stop_sequences[0] must be"),
    ({"stop_sequences": "a", "stop": "b"}, "are one field"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type is 'enabled'"),
    ({"tools": [{"name": "f"}]}, "tools is not supported"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is not supported"),
    ({"container": "c"}, "container is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"context_management": {"edits": [{}]}}, "context_management is not supported"),
    ({"output_config": {"effort": "low"}}, "output_config is not supported"),
    ({"output_format": {"type": "json_schema"}}, "output_format is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"n": 2}, "n is not supported here"),
    ({"logprobs": True}, "logprobs is not supported here"),
    ({"n_probs": 2}, "n_probs is not supported here"),
    ({"prompt_logprobs": 0}, "prompt_logprobs is not supported here"),
    ({"reasoning_format": "deepseek"}, "reasoning_format is not supported here"),
    ({"stream": 1}, "stream must be"),
    ({"priority": "urgent"}, "priority"),
    ({"messages": [turn("a" * 600)]}, "the context holds 512"),
)


@pytest.mark.parametrize(
    ("more", "words"), FAULTS, ids=[f"{place}-{next(iter(more))}" for place, (more, _) in enumerate(FAULTS)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_h_p12_a_bad_request_is_refused_by_name(
    server: ScriptServer, more: dict[str, Any], words: str, stream: bool
) -> None:
    """Test 3 of 3.13: 400 before any stream, in Anthropic's shape; then a good request."""
    status, reply, headers = server.post(PATH, {**asked("a"), "stream": stream, **more})
    assert (status, headers["content-type"]) == (400, "application/json")
    assert set(reply) == {"type", "error", "request_id"}
    assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")
    assert words in reply["error"]["message"]
    assert server.ok(PATH, asked("<<ok>>"))["content"][0]["text"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
def test_h_i6_h_i8_a_prompt_that_does_not_fit_has_both_numbers(server: ScriptServer, stream: bool) -> None:
    body = asked("a" * 600)
    [counted] = server.ok(COUNT, {"messages": body["messages"]}).values()
    status, reply, _ = server.post(PATH, {**body, "stream": stream})
    error = reply["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (counted, CONTEXT)
    assert f"{counted} tokens" in error["message"]
    assert str(CONTEXT) in error["message"]


def test_what_has_no_effect_is_accepted(server: ScriptServer) -> None:
    """clients.md 3.4 and case H-O9."""
    more = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "tools": [],
        "tool_choice": {"type": "auto"}, "n": 1, "logprobs": False, "thinking": None, "system": None,
        "top_p": None, "foo": 1,
    }  # fmt: skip
    headers = {"anthropic-version": "a version", "anthropic-beta": "x"}
    status, reply, _ = server.post(PATH, {**asked("<<ok>>"), **more}, headers)
    assert (status, reply["content"][0]["text"]) == (200, "ok")


def test_strict_names_what_is_not_known(model: Path) -> None:
    with running(model, ServerSettings(strict=True), max_model_len=CONTEXT) as strict:
        status, reply, _ = strict.post(PATH, asked("<<a>>", stop_sequence=["b"]))
        assert status == 400
        assert "did you mean stop_sequences" in reply["error"]["message"]
        assert strict.ok(PATH, asked("<<a>>", cache_control={"type": "ephemeral"}))["content"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("path", "sent", "status", "kind"),
    [
        (PATH, b"{", 400, "invalid_request_error"),
        (COUNT, b"[]", 400, "invalid_request_error"),
        (COUNT, {"messages": [turn([{"type": "image"}])]}, 400, "invalid_request_error"),
        (COUNT, {"messages": [turn("a")], "model": "other"}, 404, "not_found_error"),
        (COUNT, {"messages": [turn("a")], "tools": [{"name": "f"}]}, 400, "invalid_request_error"),
        ("/v1/messages/batches", {"requests": []}, 404, "not_found_error"),
    ],
)
def test_other_faults_in_anthropics_shape(server: ScriptServer, path: str, sent: Any, status: int, kind: str) -> None:
    found, reply, _ = server.post(path, sent)
    assert (found, reply["type"], reply["error"]["type"]) == (status, "error", kind)


def test_warnings_are_of_the_reply(server: ScriptServer) -> None:
    """clients.md 3.6: any route says which values could not act."""
    body = asked("<<ab>>", seed=3)
    warnings = server.ok(PATH, body)["warnings"]
    assert [warning.split()[0] for warning in warnings] == ["seed"]
    assert events(server, PATH, body)[-2][1]["delta"]["warnings"] == warnings


def test_h_p7_a_salt_divides_the_cache(server: ScriptServer) -> None:
    body = asked("a conversation that is kept " + "s" * 40, max_tokens=1)
    kept = [
        server.ok(PATH, {**body, "cache_salt": salt})["usage"]["cache_read_input_tokens"]
        for salt in ("red", "red", "blue")
    ]
    assert kept[0] == kept[2] == 0 < kept[1]
