"""LLM with base_url (docs/spec/clients.md 2.1): addresses and answers that are none, errors, fields."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from closed_port import closed_port
from llm_rows import GREEDY

from mlxcel import LLM, SamplingParams
from mlxcel.core.param_records import LoopDetection
from mlxcel.core.request_names import canonical
from mlxcel.core.resolve_sampling import resolve_sampling
from mlxcel.errors import (
    BackendFault,
    CapacityError,
    ContextTooLong,
    EmptyPrompt,
    EngineUnhealthy,
    MlxcelError,
    NoTokenAllowed,
    NumericFault,
    QueueFull,
    RequestError,
    RequestTimeout,
    ServerError,
    ShuttingDown,
    TemplateError,
    UnsupportedField,
    UsageError,
)
from mlxcel.remote_errors import CODE_HEADER, error_of_reply
from mlxcel.remote_fields import request_fields
from mlxcel.remote_http import Address
from mlxcel.server import errors as server_errors


@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"tokenizer": "here"}, {"no_such": 1}])
def test_engine_options_are_the_servers(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="beside base_url"):
        LLM(base_url="http://127.0.0.1:1", **options)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8080", "ftp://a", "http://", "http://a:99999", "http://u:p@a", "http://a?b=c", 5]
)
def test_addresses_that_are_none(url: Any) -> None:
    with pytest.raises(UsageError, match="base_url"):
        LLM(base_url=url)


def test_addresses() -> None:
    assert Address.parse("https://[::1]/x/v1/", None).url == "https://[::1]:443/x"
    assert Address.parse("http://host:80", None).url == "http://host:80"
    for key in ("a\nb", "é", " a"):
        with pytest.raises(UsageError, match="api_key"):
            Address.parse("http://a", key)


def test_nobody_there() -> None:
    with closed_port() as port, pytest.raises(ServerError, match="cannot be asked") as raised:
        LLM(base_url=f"http://127.0.0.1:{port}")
    assert raised.value.hint is not None


MODELS = {"data": [{"id": "m", "meta": {"n_ctx": 99, "n_vocab": 300}}]}
CHUNK = b'data: {"choices": [{"index": 0, "text": "hi", "token_ids": [1], "finish_reason": null}]}\n\n'


@pytest.fixture
def strange() -> Iterator[Callable[[bytes, bytes], str]]:
    """A server that answers these bytes to GET, and those to every POST for a reply."""
    served: list[http.server.HTTPServer] = []

    def serve(got: bytes, posted: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(got)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(b'{"tokens": [1, 2]}' if self.path == "/tokenize" else posted)

            def _answer(self, data: bytes) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                return None

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        served.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), name="strange").start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield serve
    for server in served:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("got", [b"hello", b"{}", b"[]", b'{"data": []}', b'{"data": [{"id": "m"}]}', b"null"])
def test_something_else_answers(strange: Callable[[bytes, bytes], str], got: bytes) -> None:
    with pytest.raises(ServerError) as raised:
        LLM(base_url=strange(got, b""))
    assert raised.value.hint == "is it `mlxcel serve`?"


@pytest.mark.parametrize(
    ("posted", "words"),
    [
        (CHUNK, "the connection ended before the reply did"),
        (b"", "the connection ended before the reply did"),
        (CHUNK + b"data: {nonsense\n\n", "a reply that is none"),
        (CHUNK + b'data: {"choices": [{}]}\n\n', "a reply that is none"),
        (CHUNK + b"data: 5\n\n", "a reply that is none"),
        (CHUNK + b'data: {"error": {"message": "gone", "code": "shutting_down"}}\n\n', "gone"),
    ],
)
def test_a_reply_that_breaks_off(strange: Callable[[bytes, bytes], str], posted: bytes, words: str) -> None:
    """What came is there, and so is the error: never an invented finish."""
    with LLM(base_url=strange(json.dumps(MODELS).encode(), posted)) as llm:
        [output] = llm.generate("a", GREEDY, on_error="return")
        assert words in str(output.error)
        assert (output.outputs[0].finish_cause, output.outputs[0].finish_reason) == ("error", None)
        assert output.outputs[0].text == ("hi" if posted else "")
        with pytest.raises(MlxcelError, match=words):
            llm.generate("a", GREEDY)


# --- tables -----------------------------------------------------------------------------------------------------------

ERRORS = (
    RequestError("a", field="top_k"),
    UnsupportedField("a", field="tools"),
    TemplateError("a", field="messages"),
    EmptyPrompt("a"),
    ContextTooLong(9, 5),
    QueueFull(3, 7),
    CapacityError("a"),
    ShuttingDown("a"),
    EngineUnhealthy("a"),
    RequestTimeout("a"),
    NumericFault("a"),
    NoTokenAllowed("a"),
    BackendFault("a"),
)


@pytest.mark.parametrize("shape", ["openai", "native"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_as_itself(error: MlxcelError, shape: server_errors.Shape) -> None:
    sent = server_errors.error_response(error, shape, "req-1", "POST /v1/completions")
    headers = {name.decode(): value.decode() for name, value in sent.raw_headers}
    assert CODE_HEADER.lower() in headers
    back = error_of_reply(sent.status_code, headers, bytes(sent.body))
    assert type(back) is type(error)
    assert getattr(back, "field", None) == getattr(error, "field", None)
    if isinstance(error, QueueFull):
        assert back.values["retry_after"] == 7
    if isinstance(error, ContextTooLong):
        assert back.values == error.values


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {}}', b"\xff" * 10])
def test_an_error_of_whatever_answers(body: bytes) -> None:
    error = error_of_reply(502, {}, body)
    assert isinstance(error, ServerError)
    assert error.status == 502


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_k=5),
        SamplingParams(mirostat=2, temperature=0.8),
        SamplingParams(dry_multiplier=0.8, repetition_penalty=1.1, stop=("a",), logit_bias=((3, None), ("x", 2.0))),
        SamplingParams(post_sampling_probs=True, logprobs=2),
        SamplingParams(logprobs=5, prompt_logprobs=1),
        SamplingParams(loop_detection=LoopDetection(1, 9, 3)),
        SamplingParams(samplers=("top_k", "temperature"), top_k=3),
    ],
    ids=lambda params: "-".join(sorted(params.given)),
)
def test_fields_are_read_as_the_library_means_them(params: SamplingParams, chat: bool) -> None:
    """By the server's own reader, over its own defaults: the same record, and no more warnings than here."""
    drawn = params.clone(seed=5)
    sent = json.loads(json.dumps(request_fields(drawn, params.given, chat=chat)))
    read = resolve_sampling("srv", ("request", canonical(sent)), fresh_seed=lambda: 5)
    here = resolve_sampling(
        "lib", ("request", {name: getattr(params, name) for name in params.given}), fresh_seed=lambda: 5
    )
    assert read.params.clone(loop_detection=None) == here.params.clone(loop_detection=None)
    assert "loop_detection" not in params.given or read.params.loop_detection == here.params.loop_detection
    assert read.warnings == here.warnings
