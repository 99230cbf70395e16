"""Bodies of requests: what is taken, what is ignored, what is refused, and where (docs/spec/clients.md 3.3 to 3.5)."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from mlxcel.core.param_table import FIELDS
from mlxcel.server.bodies import read_body
from mlxcel.server.faults import EXCEPTION_HANDLERS
from mlxcel.server.fields import Chat, Completion, Detokenize, Tokenize
from mlxcel.server.json_in import parse_json
from mlxcel.server.json_out import Json
from mlxcel.server.settings import ServerSettings
from mlxcel.server.unknown_fields import MOST_NAMES, UnknownFields

MESSAGES = [{"role": "user", "content": "hi"}]


class Ignored:
    def __init__(self) -> None:
        self.names: list[str] = []

    def ignored(self, name: str, route: str) -> None:
        self.names.append(name)


class State:
    """As much of the server's state as bodies look at."""

    def __init__(self, strict: bool) -> None:
        self.settings = ServerSettings(strict=strict)
        self.unknown = Ignored()
        self.long_bodies = asyncio.Semaphore()


def reading(kind: type[Any], strict: bool = False) -> tuple[TestClient, State]:
    """A client of an application that reads one kind of body and answers with its sampling fields."""

    async def route(request: Request) -> Json:
        request.state.request_id = "r"
        body = await read_body(request, kind)
        return Json({"sampling": body.sampling, "stream": getattr(body, "stream", None)})

    app = Starlette(routes=[Route("/read", route, methods=["POST"])], exception_handlers=EXCEPTION_HANDLERS)
    app.state.server = State(strict)
    return TestClient(app), app.state.server


def refusal(kind: type[Any], body: Any, *, strict: bool = False, **headers: str) -> tuple[int, dict[str, Any]]:
    client, _ = reading(kind, strict)
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = client.post("/read", **sent, headers={"Content-Type": "application/json", **headers})
    error = reply.json()["error"]
    assert "this is POST /read" in error["message"] or reply.status_code != 400
    return reply.status_code, error


@pytest.mark.parametrize(
    ("body", "byte"),
    [
        (b"", 0),
        (b'{"prompt":', 10),
        (b'{"prompt":"abc', 14),
        (b'{"prompt":tru', 13),
        (b'{"prompt":"a",}', 14),
        (b'{"prompt":NaN}', 10),
        (b'{"prompt":"\xff"}', 11),
        (b'{"prompt":"a"} x', 15),
        (b"\xef\xbb\xbf{}", 0),
    ],
)
def test_no_json_names_the_byte(body: bytes, byte: int) -> None:
    """3.4: the byte offset; of a body cut short its length."""
    status, error = refusal(Completion, body)
    assert (status, error["param"], error["code"]) == (400, None, None)
    assert f"(byte {byte})" in error["message"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"n":' + b"9" * 5000 + b"}"])
def test_json_beyond_all_bounds_is_refused(body: bytes) -> None:
    status, error = refusal(Completion, body)
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("body", [b"[]", b'"a"', b"1", b"null", b"true"])
def test_a_body_is_an_object(body: bytes) -> None:
    status, error = refusal(Completion, body)
    assert status == 400
    assert "a JSON object is needed" in error["message"]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": 1, "stream": 1}, "stream"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": 101, "top_p": 2}, "temperature"),
        ({"prompt": "a", "top_p": 2, "temperature": 101}, "top_p"),
        ({"prompt": "a", "temperature": 101, "stream": 1}, "temperature"),
        ({"prompt": "a", "stream": 1, "temperature": 101}, "stream"),
        ({"prompt": "a", "max_completion_tokens": -2}, "max_completion_tokens"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop[1]"),
        ({"prompt": "a", "stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"prompt": "a", "logit_bias": {"abc": 1}}, 'logit_bias["abc"]'),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, 'logit_bias["-1"]'),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "a", "stream_options": True}, "stream_options"),
        ({"prompt": "a", "priority": "urgent"}, "priority"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": "a", "request_id": "a b"}, "request_id"),
        ({"prompt": "a", "user": "x" * 70_000}, "user"),
        ({"prompt": "a", "metadata": {"a": ["x" * 70_000]}}, "metadata.a[0]"),
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"temperature": 101}, "temperature"),
    ],
)
def test_a_fault_is_named_by_its_path_and_the_first_one_counts(body: dict[str, Any], path: str) -> None:
    status, error = refusal(Completion, body)
    assert (status, error["param"]) == (400, path)
    assert path in error["message"]


def test_numbers_and_characters_that_json_can_spell_alone() -> None:
    """What no reader of ours holds is refused by the path of its field."""
    assert refusal(Completion, b'{"prompt":"a","temperature":1e999}')[1]["param"] == "temperature"
    assert refusal(Completion, b'{"prompt":"a","stop":["\\ud800"]}')[1]["param"] == "stop[0]"
    assert refusal(Completion, b'{"prompt":"\\udc00"}')[1]["param"] == "prompt"
    assert parse_json(b'{"prompt":"\\ud83d\\ude00"}') == {"prompt": "😀"}


def test_h_o9_null_is_not_given() -> None:
    """H-O9: every field but the prompt may be null, and says nothing then."""
    names = [name for field in FIELDS for name in (field.name, *field.other)]
    extras = [
        "stream",
        "stream_options",
        "model",
        "priority",
        "cache_salt",
        "user",
        "suffix",
        "best_of",
        "tools",
        "audio",
    ]
    client, _ = reading(Chat, strict=True)
    reply = client.post("/read", json={"messages": MESSAGES, **dict.fromkeys(names + extras)})
    assert reply.status_code == 200, reply.json()
    assert set(reply.json()["sampling"].values()) == {None}
    assert reply.json()["stream"] is False


def test_h_o10_an_unknown_field_is_ignored_or_refused_with_its_neighbour() -> None:
    """H-O10: ignored and told; under --strict 400 `unknown_field` with the nearest known name."""
    client, state = reading(Chat)
    body = {"messages": MESSAGES, "foo": 1, "stream_options": {"include_usage": True, "bar": 1}}
    assert client.post("/read", json=body).status_code == 200
    assert state.unknown.names == ["foo", "stream_options.bar"]
    for body, path, near in [
        ({"temperatur": 1}, "temperatur", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"message": 1}, "message", "messages"),
        ({"stream_options": {"include_usag": True}}, "stream_options.include_usag", "stream_options.include_usage"),
    ]:
        status, error = refusal(Chat, {"messages": MESSAGES, **body}, strict=True)
        assert (status, error["code"], error["param"]) == (400, "unknown_field", path)
        assert f"did you mean {near}?" in error["message"]


IDLE = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True,
    "safety_identifier": "x", "prompt_cache_key": "x", "prompt_cache_retention": "24h", "verbosity": "low",
    "modalities": ["text"], "prediction": None,
}  # fmt: skip


def test_only_prompts_and_contents_may_be_long() -> None:
    """3.5: any other string is 64 KiB at most, wherever it stands."""
    long = "x" * 70_000
    client, _ = reading(Chat)
    parts = [{"type": "text", "text": long}]
    taken = [{"role": "user", "content": long}, {"role": "user", "content": parts}]
    assert client.post("/read", json={"messages": taken}).status_code == 200
    for body, path in [
        ({"messages": [*MESSAGES, {"role": long, "content": "a"}]}, "messages[1].role"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": [long]}}, "chat_template_kwargs.a[0]"),
        ({"messages": MESSAGES, long: 1}, None),
    ]:
        status, error = refusal(Chat, body)
        assert (status, error["param"]) == (400, path)


@pytest.mark.parametrize("strict", [False, True])
def test_h_o10_known_fields_without_effect_are_accepted(strict: bool) -> None:
    client, state = reading(Chat, strict)
    assert client.post("/read", json={"messages": MESSAGES, **IDLE}).status_code == 200
    assert state.unknown.names == []


@pytest.mark.parametrize("field", [{"store": True}, {"service_tier": "priority"}])
def test_strict_refuses_values_that_would_matter(field: dict[str, Any]) -> None:
    assert reading(Chat)[0].post("/read", json={"messages": MESSAGES, **field}).status_code == 200
    status, error = refusal(Chat, {"messages": MESSAGES, **field}, strict=True)
    assert (status, [error["param"]]) == (400, list(field))


UNSUPPORTED = {
    "audio": {"voice": "alloy"}, "modalities": ["text", "audio"], "functions": [{"name": "f"}],
    "function_call": {"name": "f"}, "tools": [{"type": "function"}], "tool_choice": "required",
    "web_search_options": {}, "prediction": {"type": "content"}, "suffix": "end", "best_of": 3,
    "response_format": {"type": "json_object"}, "grammar": "root ::= x", "json_schema": {},
    "structured_outputs": {"regex": "("}, "guided_regex": "[a", "use_beam_search": True,
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("strict", [False, True])
def test_what_would_change_the_answer_is_refused_by_name(name: str, strict: bool) -> None:
    """3.4; H-N1 to H-N9, H-O3, H-O5: structured output and tools until they are there."""
    body = {"messages": MESSAGES, name: UNSUPPORTED[name]}
    status, error = refusal(Chat, body, strict=strict)
    assert (status, error["code"], error["param"]) == (400, "unsupported_field", name)
    assert name in error["message"]


@pytest.mark.parametrize(
    "idle",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"suffix": ""},
        {"n": 2, "best_of": 2},
    ],
)
def test_values_that_ask_for_nothing_are_taken(idle: dict[str, Any]) -> None:
    assert reading(Chat, strict=True)[0].post("/read", json={"messages": MESSAGES, **idle}).status_code == 200


def test_true_is_not_one_among_values_that_ask_for_nothing() -> None:
    status, error = refusal(Chat, {"messages": MESSAGES, "tools": 0})
    assert (status, error["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("media", "status"),
    [("application/json", 200), ("APPLICATION/JSON; charset=utf-8", 200), ("text/plain", 415), ("", 415),
     ("application/x-www-form-urlencoded", 415)],
)  # fmt: skip
def test_another_kind_of_body_is_415(media: str, status: int) -> None:
    client, _ = reading(Completion)
    reply = client.post("/read", content=b'{"prompt":"a"}', headers={"Content-Type": media})
    assert reply.status_code == status
    if status == 415:
        assert reply.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("encoding", "status"), [("identity", 200), ("gzip", 415), ("br, gzip", 415), ("", 415)])
def test_a_body_that_is_encoded_is_415(encoding: str, status: int) -> None:
    """A small one could be as large as anybody likes."""
    client, _ = reading(Completion)
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    assert client.post("/read", content=b'{"prompt":"a"}', headers=headers).status_code == status


def test_an_absent_type_is_json() -> None:
    client, _ = reading(Completion)
    request = client.build_request("POST", "/read", content=b'{"prompt":"a"}')
    assert "content-type" not in request.headers
    assert client.send(request).status_code == 200


def test_a_route_without_sampling_knows_no_sampling_fields() -> None:
    _, error = refusal(Detokenize, {"tokens": [1], "temperature": 1}, strict=True)
    assert (error["code"], error["param"]) == ("unknown_field", "temperature")
    assert refusal(Tokenize, {"content": 1})[1]["param"] == "content"


def test_h_o10_a_name_is_logged_once_and_a_hundred_of_them_at_most(caplog: pytest.LogCaptureFixture) -> None:
    """3.4: one line a name, escaped; every occurrence counts."""
    fields = UnknownFields()
    for name in ["foo", "foo", "\x1b[2J\n", *(f"name-{number}" for number in range(200)), "foo"]:
        fields.ignored(name, "POST /v1/completions")
    assert fields.count == 204
    assert len(caplog.messages) == MOST_NAMES
    assert caplog.messages[0].startswith("POST /v1/completions: the field 'foo' is not known")
    assert "\\x1b[2J\\n" in caplog.messages[1]
