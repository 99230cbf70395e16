"""Structured output and tools, which this version does not have: refused by name wherever and however they are asked
for, never a reply that only looks as if (docs/spec/clients.md 3.4, 3.10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from cli_runs import Cli
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.request_names import canonical
from mlxcel.errors import UnsupportedField

TURN = {"role": "user", "content": "<<[1, 1, 1]>>"}
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TURN["content"]},
    "/completion": {"prompt": TURN["content"]},
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/messages": {"messages": [TURN], "max_tokens": 64},
}
TELLING: dict[str, dict[str, Any]] = {
    "/apply-template": {"messages": [TURN]},
    "/v1/messages/count_tokens": {"messages": [TURN]},
}
ANYTHING: dict[str, Any] = {"type": "object"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), max_num_seqs=2) as made:
        yield made
        assert made.idle()


def refused(server: ScriptServer, fields: dict[str, Any], *, by: str) -> None:
    """By every route, streamed or not, before a row is taken; and the reply behind it is as if nothing had been."""
    started = server.serving.stats()["scheduler"]["request_started_total"]
    bodies = [*GENERATING.items(), *TELLING.items()]
    bodies += [(path, {**body, "stream": True}) for path, body in GENERATING.items()]
    for path, body in bodies:
        status, reply, headers = server.post(path, {**body, **fields})
        assert (status, headers["x-error-code"]) == (400, "unsupported_field"), (path, reply)
        assert headers["content-type"] == "application/json"
        assert reply["error"]["message"].startswith(f"{by} is not supported: "), (path, reply)
        assert "in this version" in reply["error"]["message"]
    assert server.serving.stats()["scheduler"]["request_started_total"] == started
    assert said(server, {}) == TURN["content"][2:-2]


def said(server: ScriptServer, fields: dict[str, Any]) -> str:
    return str(server.ok("/v1/chat/completions", {"messages": [TURN], **fields})["choices"][0]["message"]["content"])


SPELLINGS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ANYTHING}}),
    "json_schema": (ANYTHING, {}),
    "grammar": ('root ::= "a"',),
    "structured_outputs": ({"json": ANYTHING}, {"choice": ["a", "b"]}, {"json_object": True}, {"grammar": "x"}),
    "guided_json": (ANYTHING,),
    "guided_json_object": (True,),
    "guided_regex": ("[a-z]+",),
    "guided_choice": (["a"],),
    "guided_grammar": ("root ::= x",),
    "regex": ("[a-z]+",),
    "ebnf": ("root ::= x",),
    "structural_tag": ({"structures": []},),
    "output_format": ({"type": "json_schema", "schema": ANYTHING},),
}
"""The names that clients of several servers know."""


@pytest.mark.parametrize("name", SPELLINGS)
def test_h_n1_no_spelling_of_a_schema_is_ignored(server: ScriptServer, name: str) -> None:
    """H-N1: blanks up to the limit would be the least that comes of a schema that is not kept."""
    for value in SPELLINGS[name]:
        refused(server, {name: value}, by=name)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2.0},
        {"temperature": 2.0, "seed": 7, "n": 1, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0, "max_tokens": 1},
        {"ignore_eos": True, "max_tokens": 8},
        {"stop": ["}"], "skip_special_tokens": False},
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_h_n3_no_reply_passes_for_json_that_is_none(server: ScriptServer, fields: dict[str, Any], first: bool) -> None:
    """H-N3: whatever else is asked, in whichever order; and sampling alone is refused for nothing."""
    asked = {"response_format": {"type": "json_object"}}
    refused(server, {**asked, **fields} if first else {**fields, **asked}, by="response_format")
    if "ignore_eos" not in fields:
        said(server, fields)


def test_h_n4_what_asks_for_plain_text_is_taken(server: ScriptServer) -> None:
    """H-N4: nothing legal is banned, a carriage return neither; null and text are no structure."""
    nothing: list[dict[str, Any]] = [
        {"response_format": None}, {"response_format": {"type": "text"}}, {"grammar": ""}, {"tools": []},
    ]  # fmt: skip
    for idle in nothing:
        assert said(server, idle) == TURN["content"][2:-2]
    turn = {"role": "user", "content": '<<{"a":\r\n"\u2028"}>>'}
    reply = server.ok("/v1/chat/completions", {"messages": [turn]})
    assert reply["choices"][0]["message"]["content"] == '{"a":\r\n"\u2028"}'


DEEP: dict[str, Any] = {"items": 1}
for _ in range(100):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "nothing"}, {}, {"type": None}, {"type": ["text"]}, {"type": "TEXT"}, [], "json_object", 5, True,
        {"type": "text", "schema": ANYTHING}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 5},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://example.org/x"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "file:///etc/passwd"}}},
        {"type": "json_schema", "json_schema": {"schema": DEEP}}, {"type": "structural_tag"}, {"type": "regex"},
    ],
)  # fmt: skip
def test_h_n5_no_form_of_a_reply_is_a_fault_of_ours(server: ScriptServer, form: Any) -> None:
    """H-N5: bad schemas, unknown types, references to elsewhere, depth."""
    refused(server, {"response_format": form}, by="response_format")


@pytest.mark.parametrize(
    "guards",
    [
        {"loop_detection": {"min_pattern": 1, "max_pattern": 4, "min_count": 3}},
        {"repetition_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1, "dry_multiplier": 1},
        {"bad_words": ["1"], "logit_bias": {"5": -100}, "allowed_token_ids": [5, 6]},
        {"cache_salt": "a", "cache_prompt": True},
    ],
)
def test_h_n8_nothing_of_a_schema_reaches_another_request(server: ScriptServer, guards: dict[str, Any]) -> None:
    """H-N8: refused beside guards and penalties too, on one connection or several; a long list of equal items that no
    grammar asked for is the loop guard's business as before."""
    items = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}}
    loop = {"loop_detection": {"min_pattern": 1, "max_pattern": 4, "min_count": 3}}
    turn = {"role": "user", "content": "<<[1,1,1,1,1,1,1,1]>>"}

    def cut() -> tuple[str, str]:
        (choice,) = server.ok("/v1/chat/completions", {"messages": [turn], **loop})["choices"]
        return choice["message"]["content"], choice["finish_cause"]

    before = cut()
    assert before[1] == "loop"
    refused(server, {**guards, **items}, by="response_format")
    assert cut() == before


@pytest.mark.parametrize("regex", ["(", "[a", "(?<=x)y", "\\p{Nope}", "(a+)+$", "a{1,100000}", "", "\x00", "[a-z]+"])
@pytest.mark.parametrize("name", ["guided_regex", "regex", "structured_outputs"])
def test_h_n9_no_regex_of_a_client_is_compiled(server: ScriptServer, name: str, regex: str) -> None:
    """H-N9: the good ones look like the bad ones."""
    refused(server, {name: {"regex": regex} if name == "structured_outputs" else regex}, by=name)


TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": ANYTHING, "strict": True}}
TOOLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tools", {"tools": [TOOL]}),
    ("tools", {"tools": [TOOL], "tool_choice": "none"}),
    ("tools", {"tools": [{"name": "f", "input_schema": ANYTHING}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
)


@pytest.mark.parametrize(("by", "fields"), TOOLS)
def test_h_o3_tools_are_refused_by_name(server: ScriptServer, by: str, fields: dict[str, Any]) -> None:
    """H-O3: there is no delta of a call that could lack its index; the count of a prompt with tools is none either."""
    refused(server, fields, by=by)
    status, reply, headers = server.post("/tokenize", {"messages": [TURN], **fields})
    assert (status, headers["x-error-code"]) == (400, "unsupported_field"), reply


def test_h_o5_a_clients_streaming_helper_hears_that_there_are_no_tools(server: ScriptServer) -> None:
    """H-O5: as an error of its own class, before a stream; without tools the helper works."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": [TURN]}
        with pytest.raises(openai.BadRequestError) as caught, client.chat.completions.stream(**asked, tools=[TOOL]):
            pass
        assert (caught.value.code, caught.value.param) == ("unsupported_field", "tools")
        with client.chat.completions.stream(**asked) as stream:
            assert not [event for event in stream if "tool" in event.type]
            message = stream.get_final_completion().choices[0]
    assert (message.message.content, message.message.tool_calls, message.finish_reason) == ("[1, 1, 1]", None, "stop")


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "output_format"])
def test_h_n5_the_library_refuses_what_the_server_does(name: str) -> None:
    """docs/spec/clients.md, rule 1: one validation."""
    for value in SPELLINGS[name]:
        with pytest.raises(UnsupportedField, match=f"^{name} is not supported: "):
            canonical({name: value})


@pytest.mark.parametrize("command", ["generate", "run", "serve"])
@pytest.mark.parametrize("flag", ["--grammar", "--json-schema", "--grammar-file", "-j"])
def test_h_n9_no_command_takes_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
    command: str,
    flag: str,
) -> None:
    """docs/spec/clients.md 0.3: of wave 2."""
    ran = Cli(monkeypatch, capfdbinary)(command, tmp_path / "nowhere", flag, "(")
    assert (ran.code, flag in ran.err) == (2, True), ran.err
