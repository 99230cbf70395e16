"""Errors by class and by route: status, type, code, param (docs/spec/clients.md 3.5)."""

import asyncio
import errno
import json
from collections.abc import Iterator
from typing import Any

import pytest
from script_server import ScriptServer, running
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send
from tiny_checkpoint import write_tiny_llama

from mlxcel import errors
from mlxcel.server import refusals
from mlxcel.server.errors import UnknownField, error_body, error_response, retry_after, shape_of, status_of
from mlxcel.server.faults import Faults
from mlxcel.server.request_id import RequestIds
from mlxcel.server.settings import ServerSettings
from mlxcel.server.state import ServerState

CASES: list[tuple[Exception, int, str, str | None, str, str]] = [
    # error, status, OpenAI type, OpenAI code, native type, Anthropic type
    (errors.RequestError("x", field="f"), 400, "invalid_request_error", None, "invalid_request_error",
     "invalid_request_error"),
    (errors.UnsupportedField("x"), 400, "invalid_request_error", "unsupported_field", "invalid_request_error",
     "invalid_request_error"),
    (UnknownField("x"), 400, "invalid_request_error", "unknown_field", "invalid_request_error",
     "invalid_request_error"),
    (errors.EmptyPrompt("x"), 400, "invalid_request_error", "empty_prompt", "invalid_request_error",
     "invalid_request_error"),
    (errors.TemplateError("x"), 400, "invalid_request_error", "template_error", "invalid_request_error",
     "invalid_request_error"),
    (errors.ContextTooLong(9, 8), 400, "invalid_request_error", "context_length_exceeded", "exceed_context_size_error",
     "invalid_request_error"),
    (refusals.InvalidKey(), 401, "authentication_error", "invalid_api_key", "authentication_error",
     "authentication_error"),
    (refusals.Forbidden("x"), 403, "permission_error", "forbidden", "permission_error", "permission_error"),
    (refusals.ModelNotFound("x", ["y"]), 404, "not_found_error", "model_not_found", "not_found_error",
     "not_found_error"),
    (refusals.NotFound("x"), 404, "not_found_error", "not_found", "not_found_error", "not_found_error"),
    (refusals.MethodNotAllowed("GET", "/", ["POST"]), 405, "invalid_request_error", "method_not_allowed",
     "invalid_request_error", "invalid_request_error"),
    (refusals.UnsupportedMediaType("x"), 415, "invalid_request_error", "unsupported_media_type",
     "invalid_request_error", "invalid_request_error"),
    (refusals.BodyTooSlow(8, 30.0), 408, "invalid_request_error", "request_timeout", "invalid_request_error",
     "invalid_request_error"),
    (refusals.BodyTooLarge(8), 413, "invalid_request_error", "body_too_large", "invalid_request_error",
     "request_too_large"),
    (ValueError("secret"), 500, "server_error", "internal_error", "server_error", "api_error"),
    (errors.RowFault("secret"), 500, "server_error", "internal_error", "server_error", "api_error"),
    (errors.NumericFault("secret"), 500, "server_error", "numeric", "server_error", "api_error"),
    (errors.NoTokenAllowed("secret"), 500, "server_error", "no_token_allowed", "server_error", "api_error"),
    (errors.TrimError("secret"), 500, "server_error", "trim", "server_error", "api_error"),
    (errors.RewindError("secret"), 500, "server_error", "rewind", "server_error", "api_error"),
    (errors.BackendFault("secret"), 500, "server_error", "backend_fault", "server_error", "api_error"),
    (errors.BatchShapeError("secret"), 500, "server_error", "internal_error", "server_error", "api_error"),
    (refusals.SwitchedOff("x"), 501, "not_supported_error", "not_supported", "not_supported_error", "api_error"),
    (refusals.ModelLoading(), 503, "server_busy", "model_loading", "unavailable_error", "overloaded_error"),
    (errors.QueueFull(3, 7), 503, "server_busy", "queue_full", "unavailable_error", "overloaded_error"),
    (errors.CapacityError("x"), 503, "server_busy", "kv_exhausted", "unavailable_error", "overloaded_error"),
    (errors.ShuttingDown("x"), 503, "server_busy", "shutting_down", "unavailable_error", "overloaded_error"),
    (errors.EngineUnhealthy("x"), 503, "server_busy", "engine_unhealthy", "unavailable_error", "overloaded_error"),
    (errors.RequestTimeout("x"), 504, "server_timeout", "timeout", "server_timeout", "api_error"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "status", "kind", "code", "native", "anthropic"), CASES)
def test_each_error_in_each_shape(
    error: Exception, status: int, kind: str, code: str | None, native: str, anthropic: str
) -> None:
    """3.5: the table, and the keys of the three shapes; a fault of ours tells its request's id and no internals."""
    assert status_of(error) == status
    openai, llama, claude = (error_body(error, shape, "req-1") for shape in ("openai", "native", "anthropic"))
    field = getattr(error, "field", None)
    numbers = {"n_prompt_tokens": 9, "n_ctx": 8} if isinstance(error, errors.ContextTooLong) else {}
    message = openai["error"].pop("message")
    assert openai == {"error": {"type": kind, "param": field, "code": code, **numbers}, "request_id": "req-1"}
    assert llama["error"].pop("message") == claude["error"].pop("message") == message
    param = {} if field is None else {"param": field}
    assert llama == {"error": {"code": status, "type": native, **param, **numbers}, "request_id": "req-1"}
    assert claude == {"type": "error", "error": {"type": anthropic, **numbers}, "request_id": "req-1"}
    if status == 500:
        assert "req-1" in message
        assert "secret" not in message


@pytest.mark.parametrize(("error", "status"), [(error, status) for error, status, *_ in CASES])
def test_503_says_when_to_come_back(error: Exception, status: int) -> None:
    headers = error_response(error, "openai", "r").headers
    assert ("retry-after" in headers) is (status == 503)
    if status == 503:
        wanted = 7 if isinstance(error, errors.QueueFull) else 5
        assert (int(headers["retry-after"]), retry_after(error)) == (wanted, wanted)
    assert ("www-authenticate" in headers) is (status == 401)
    assert ("allow" in headers) is (status == 405)


def test_times_to_wait_are_1_to_60_seconds() -> None:
    assert [retry_after(errors.QueueFull(1, wait)) for wait in (0, 1, 60, 1000)] == [1, 1, 60, 60]


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages", "anthropic"), ("/v1/messages/count_tokens", "anthropic"), ("/v1/messages/x", "anthropic"),
        ("/v1/messagesx", "openai"), ("/completion", "native"), ("/completions", "native"), ("/tokenize", "native"),
        ("/slots", "native"), ("/props", "native"), ("/health", "native"), ("/v1/completions", "openai"),
        ("/chat/completions", "openai"), ("/nothing", "openai"), ("/", "openai"),
    ],
)  # fmt: skip
def test_paths_have_the_shape_of_their_family(path: str, shape: str) -> None:
    assert shape_of(path) == shape


# --- over the wire ----------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "<<ok>>"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "<<ok>>"},
    "/tokenize": {"content": "ok"},
    "/detokenize": {"tokens": [111, 107]},
    "/apply-template": {"messages": MESSAGES},
}
GENERATING = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    settings = ServerSettings(strict=True, max_body_size=1 << 20)
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), settings) as made:
        yield made


def error_of(server: ScriptServer, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and error. Behind each one the server still answers."""
    status, reply, found = server.post(path, body, headers)
    assert found["x-request-id"] == reply["request_id"]
    assert server.post(path, GOOD[path])[0] == 200
    native = shape_of(path) == "native"
    error = dict(reply["error"])
    assert set(error) >= ({"code", "message", "type"} if native else {"message", "type", "param", "code"})
    if native:
        assert error["code"] == status
    return status, error


FAULTS: list[tuple[Any, dict[str, str], int, str, str | None]] = [
    (b'{"a":', {}, 400, "invalid_request_error", None),
    (b"[1]", {}, 400, "invalid_request_error", None),
    (b"", {}, 400, "invalid_request_error", None),
    (b"\xff", {}, 400, "invalid_request_error", None),
    ({"foo": 1}, {}, 400, "invalid_request_error", "foo"),
    ({"model": 5}, {}, 400, "invalid_request_error", "model"),
    ({"model": "other"}, {}, 404, "not_found_error", "model"),
    (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "invalid_request_error", None),
    (b'"' + b"x" * (1 << 20) + b'"', {}, 413, "invalid_request_error", None),
]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(("body", "headers", "status", "kind", "param"), FAULTS)
def test_h_o7_each_fault_on_each_route(
    server: ScriptServer, path: str, body: Any, headers: dict[str, str], status: int, kind: str, param: str | None
) -> None:
    """H-O7, H-P12: the same fault has the same answer wherever it is made."""
    sent = {**GOOD[path], **body} if isinstance(body, dict) else body
    found, error = error_of(server, path, sent, **headers)
    assert (found, error["type"], error.get("param")) == (status, kind, param)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temperature": -1}, None, "temperature"),
        ({"temperature": "0.5"}, None, "temperature"),
        ({"top_p": 2}, None, "top_p"),
        ({"repetition_penalty": 100}, None, "repetition_penalty"),
        ({"repeat_penalty": 0}, None, "repeat_penalty"),
        ({"top_k": 1.5}, None, "top_k"),
        ({"seed": "x"}, None, "seed"),
        ({"stop": [1]}, None, "stop[0]"),
        ({"samplers": ["top_k", "penalties"]}, None, "samplers"),
        ({"min_tokens": 5, "max_tokens": 3}, None, "min_tokens"),
        ({"min_tokens": 5000}, None, "min_tokens"),
        ({"logits_processors": [{"name": "nobody"}]}, None, "logits_processors[0].name"),
        ({"tools": [{"type": "function"}]}, "unsupported_field", "tools"),
        ({"response_format": {"type": "json_object"}}, "unsupported_field", "response_format"),
        ({"temperatur": 1}, "unknown_field", "temperatur"),
        ({"mirostat": 2, "top_p": 0.5}, None, "top_p"),
    ],
)
def test_h_m7_bad_values_are_refused_alike_before_a_stream(
    server: ScriptServer, path: str, stream: bool, fields: dict[str, Any], code: str | None, param: str
) -> None:
    """H-M7, S9: one layer for all routes; with --strict a value that cannot act is refused too."""
    status, error = error_of(server, path, {**GOOD[path], **fields, "stream": stream})
    assert (status, error["code"], error["param"]) == (400, code, param)
    assert f"POST {path}" in error["message"]


def test_a_row_that_fails_is_500_and_its_neighbours_go_on(server: ScriptServer) -> None:
    """3.11: the code of a failed row, its request's id, and nothing of the inside."""
    for path in GENERATING:
        body = json.loads(json.dumps(GOOD[path]).replace("ok", "ab!"))
        status, error = error_of(server, path, body)
        assert (status, error["type"], error["code"]) == (500, "server_error", "internal_error")
        assert "tripped" not in error["message"]


@pytest.mark.parametrize("place", range(3))
def test_a_send_that_fails_is_a_client_that_left_and_no_fault(place: int, caplog: pytest.LogCaptureFixture) -> None:
    """3.9, 3.11: one that took nothing for long, say; the system tells that while a stream is being sent. The error of
    a file of ours is a fault all the same."""
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})
        raise OSError(errno.EIO, "a file of ours")

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == place + 1:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    async def receive() -> Message:
        raise AssertionError("nobody reads here")

    async def ask() -> ServerState:
        state = ServerState(ServerSettings(), write=lambda line: None)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "app": Starlette()}
        await RequestIds(Faults(app), state)(scope, receive, send)
        return state

    assert asyncio.run(ask()).metrics.disconnects == 1
    assert (len(sent), caplog.records) == (place + 1, [])
    sent.clear()
    place = 5
    assert asyncio.run(ask()).metrics.disconnects == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_what_the_template_says_comes_back_in_its_own_words(server: ScriptServer) -> None:
    for path in ("/v1/chat/completions", "/apply-template"):
        status, error = error_of(server, path, {**GOOD[path], "chat_template": "{{ x }}"})
        assert (status, error.get("param")) == (400, "chat_template")
        assert "--allow-request-templates" in error["message"]


def test_h_i16_odd_names_and_bytes_break_nothing(server: ScriptServer, caplog: pytest.LogCaptureFixture) -> None:
    """H-I16: with everything logged, odd ids, invalid UTF-8 and control characters."""
    caplog.set_level("DEBUG", logger="mlxcel")
    for body in ({"prompt": [-1]}, {"prompt": "\x00\x1b[31m\u2028\ufeff"}, {"prompt": "x", "\x1b[2J": 1}, b"\xff\xfe"):
        status, _, _ = server.post("/v1/completions", body, {"X-Request-Id": "\x7f odd", "User-Agent": "\xff"})
        assert status in (200, 400)
    assert not any(record.exc_info for record in caplog.records)
