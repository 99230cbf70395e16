"""What the OpenAPI document says of replies, against replies (docs/spec/clients.md 3.13: 2)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from other_threads import PATIENCE
from script_server import ScriptServer, running
from starlette.routing import Route
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.openapi import BODIES, openapi
from mlxcel.server.reply_schemas import PREFIX, REPLIES, SCHEMAS

TURNS = {"messages": [{"role": "user", "content": "in the"}], "max_tokens": 3}
PROMPT = {"prompt": "in the", "max_tokens": 3}
SCORED = {"return_token_ids": True, "prompt_logprobs": 1, "min_p": 0.5, "ignore_eos": True}
NO_EFFECT = {"xtc_threshold": 0.9, "xtc_probability": 0.5}
"""Draws a warning."""

POSTED: list[tuple[str, dict[str, Any], str]] = [
    # path, body, the schema of the reply
    ("/v1/chat/completions", TURNS, "ChatReply"),
    ("/v1/chat/completions", {**TURNS, **SCORED, "logprobs": True, "top_logprobs": 2, "n": 2}, "ChatReply"),
    ("/v1/chat/completions", {**TURNS, **NO_EFFECT}, "ChatReply"),
    ("/v1/completions", PROMPT, "CompletionReply"),
    ("/v1/completions", {**PROMPT, **SCORED, "logprobs": 2, "echo": True}, "CompletionReply"),
    ("/v1/completions", {**PROMPT, **NO_EFFECT, "stop": ["e"]}, "CompletionReply"),
    ("/completion", PROMPT, "NativeReply"),
    ("/completion", {**PROMPT, "n_probs": 2, "return_tokens": True, "prompt_logprobs": 1}, "NativeReply"),
    ("/completion", {**PROMPT, **NO_EFFECT, "n_probs": 2, "post_sampling_probs": True}, "NativeReply"),
    ("/completion", {**PROMPT, "prompt": ["a", "b"], "response_fields": ["content"]}, "NativeReplies"),
    ("/v1/messages", TURNS, "MessageReply"),
    ("/v1/messages", {**TURNS, "stop_sequences": ["e"], **NO_EFFECT}, "MessageReply"),
    ("/v1/messages/count_tokens", TURNS, "TokenCount"),
    ("/tokenize", {"content": "héllo"}, "Tokenized"),
    ("/tokenize", {"content": "héllo", "with_pieces": True}, "Tokenized"),
    ("/detokenize", {"tokens": [70, 71]}, "Detokenized"),
    ("/apply-template", TURNS, "Rendered"),
    ("/apply-template", {**TURNS, **NO_EFFECT, "explain": True}, "Rendered"),
    ("/v1/cache/reset", {}, "CacheReset"),
]
GOT = ["/v1/models", "/v1/models/tiny", "/props", "/slots", "/health", "/version", "/v1/cache/stats"]
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,),
    "number": (int, float), "null": (type(None),),
}  # fmt: skip


def faults(schema: dict[str, Any], value: Any, place: str = "$") -> Iterator[str]:
    """Where a value is not what a schema says, or has a key of which it says nothing."""
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].removeprefix(PREFIX)]
    if "anyOf" in schema:
        found = [list(faults(each, value, place)) for each in schema["anyOf"]]
        if all(found):
            yield f"{place}: {value!r} is none of {len(found)}: {min(found, key=len)}"
        return
    if "const" in schema or "enum" in schema:
        if value not in schema.get("enum", [schema.get("const")]):
            yield f"{place}: {value!r} is not of {schema}"
        return
    kinds = TYPES[schema["type"]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        yield f"{place}: {value!r} is no {schema['type']}"
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from faults(schema["items"], each, f"{place}[{at}]")
    elif isinstance(value, dict):
        yield from (f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        told, others = schema.get("properties"), schema.get("additionalProperties")
        for name, each in value.items():
            if told is not None and name in told:
                yield from faults(told[name], each, f"{place}.{name}")
            elif others is not None:
                yield from faults(others, each, f"{place}.{name}")
            elif told is not None:
                yield f"{place}: nothing is said of {name}"
    elif isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{place}: {value} is outside of {schema}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    with running(model, backend="reference-numpy", max_num_seqs=2, max_model_len=128) as made:
        yield made


@pytest.mark.parametrize(("path", "body", "name"), POSTED)
def test_a_reply_is_what_the_document_says(server: ScriptServer, path: str, body: dict[str, Any], name: str) -> None:
    reply = server.ok(path, body)
    assert list(faults(SCHEMAS[name], reply)) == []
    if NO_EFFECT.keys() <= body.keys():
        assert reply["warnings"]


@pytest.mark.parametrize("path", GOT)
def test_what_is_read_is_what_the_document_says(server: ScriptServer, path: str) -> None:
    with urllib.request.urlopen(server.url + path, timeout=PATIENCE) as reply:
        told = json.loads(reply.read())
    name = REPLIES["GET", path.replace("/tiny", "/{name}")]
    assert list(faults(SCHEMAS[name], told)) == []


@pytest.mark.parametrize("path", BODIES)
def test_what_a_body_needs_is_what_the_document_says(server: ScriptServer, path: str) -> None:
    """Enough where all of it is there, and refused by name where one is missing or null."""
    given = {"messages": TURNS["messages"], "prompt": "in the", "max_tokens": 3, "tokens": [70]}
    schema = openapi(server.app.routes)["components"]["schemas"][BODIES[path].rpartition(":")[2]]
    needed = [name for part in schema.get("allOf", [schema]) for name in part.get("required", ())]
    if path == "/tokenize":
        assert needed == [], "one of three, which the field at fault then says"
        return
    server.ok(path, {name: given[name] for name in needed})
    for name in needed:
        for body in ({}, {name: None}):
            status, reply, _ = server.post(path, {**{other: given[other] for other in needed if other != name}, **body})
            assert status == 400
            assert name in reply["error"]["message"]


def test_every_route_with_a_json_reply_has_its_schema(server: ScriptServer) -> None:
    document = openapi(server.app.routes)
    without = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if operation["responses"]["200"]["content"].get("application/json", {"schema": True})["schema"] == {}
    }
    assert without == {("POST", "/props"), ("GET", "/openapi.json")}, "the first is always refused"
    there = {(method, route.path.replace(":path", "")) for route in server.app.routes if isinstance(route, Route)
             for method in route.methods or ()}  # fmt: skip
    assert set(REPLIES) <= there
    assert {name for _, _, name in POSTED} | {REPLIES["GET", path.replace("/tiny", "/{name}")] for path in GOT} | {
        "Model", "Event"
    } == set(SCHEMAS)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"id": 5}, "$.id"), ({"object": "chat"}, "$.object"), ({"extra": 1}, "nothing is said of extra"),
        ({"usage": {}}, "prompt_tokens is missing"), ({"choices": [{}]}, "$.choices[0]"),
        ({"created": True}, "no integer"),
    ],
)  # fmt: skip
def test_the_comparison_finds_what_is_wrong(server: ScriptServer, value: dict[str, Any], fault: str) -> None:
    reply = server.ok("/v1/completions", PROMPT)
    assert any(fault in each for each in faults(SCHEMAS["CompletionReply"], {**reply, **value}))
