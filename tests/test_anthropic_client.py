"""Anthropic's own client against a loopback server (docs/spec/clients.md 3.13, tests 1 and 19)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from other_threads import PATIENCE
from script_plugin import GATE
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

CONTEXT = 512
KEY = "a key of the tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[anthropic.Anthropic]:
    """Of a model that says what its prompt says."""
    settings = ServerSettings(max_body_size=100_000)
    with running(model, settings, max_model_len=CONTEXT) as server, client_of(server) as made:
        yield made


def client_of(server: ScriptServer, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def turn(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def sdk(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 100, "messages": [turn(text)], **more}


def test_the_client_reads_a_message(client: anthropic.Anthropic) -> None:
    """Test 1 and 19 of 3.13."""
    reply = client.messages.create(**sdk("<<Good day>>", system="Be brief", stop_sequences=["da"]))
    assert [(block.type, block.text) for block in reply.content] == [("text", "Good ")]
    assert (reply.role, reply.model, reply.stop_reason, reply.stop_sequence) == (
        *("assistant", "tiny", "stop_sequence", "da"),
    )
    counted = client.messages.count_tokens(model="tiny", messages=sdk("<<Good day>>")["messages"], system="Be brief")
    usage = reply.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert usage.input_tokens + cached == counted.input_tokens
    assert usage.output_tokens == 7


def test_the_clients_conversation_goes_on(client: anthropic.Anthropic) -> None:
    """What a reply holds can be sent back as it is."""
    asking: list[Any] = [turn("one")]
    first = client.messages.create(model="tiny", max_tokens=20, messages=asking)
    asking += [{"role": "assistant", "content": first.content}, turn("<<two>>")]
    second = client.messages.create(model="tiny", max_tokens=20, messages=asking)
    assert text_of(second) == "two"
    assert (second.usage.cache_read_input_tokens or 0) > 0


def test_the_clients_stream_helper(client: anthropic.Anthropic) -> None:
    """Case H-O20: its events, its text and its final message."""
    with client.messages.stream(**sdk("<<Good day>>", max_tokens=6)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == "Good d"
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)
    whole = client.messages.create(**sdk("<<Good day>>", max_tokens=6))
    cached = (final.usage.cache_read_input_tokens or 0, whole.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + cached[0] == whole.usage.input_tokens + cached[1]


def test_the_clients_raw_stream(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**sdk("<<a>>"), stream=True)]
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"extra_body": {"temperature": 1.5}}, anthropic.BadRequestError),
        ({"messages": [turn([{"type": "image", "source": {}}])]}, anthropic.BadRequestError),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, anthropic.BadRequestError),
        ({"messages": [turn("a" * 600)]}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
        ({"messages": [turn("a" * 100_000)]}, anthropic.RequestTooLargeError),
    ],
)
def test_the_client_raises_the_right_class(
    client: anthropic.Anthropic, more: dict[str, Any], error: type[anthropic.APIStatusError]
) -> None:
    """Test 1 of 3.13, whole and streamed; then a good request."""
    body = {**sdk("<<a>>"), **more}
    with pytest.raises(error) as whole:
        client.messages.create(**body)
    with pytest.raises(error), client.messages.stream(**body) as stream:
        stream.get_final_message()
    told = whole.value.body
    assert isinstance(told, dict)
    assert (told["type"], told["request_id"]) == ("error", whole.value.response.headers["x-request-id"])
    assert text_of(client.messages.create(**sdk("<<ok>>"))) == "ok"


def test_the_client_without_a_key_and_with_a_full_queue(model: Path) -> None:
    """clients.md 3.5 and 3.7: 401, and 503 with the seconds to wait."""
    settings = ServerSettings(api_keys=(KEY,), max_queue_depth=0)
    with running(model, settings, max_model_len=CONTEXT, max_num_seqs=1) as made:
        with client_of(made, "another") as stranger, pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**sdk("<<a>>"))
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        with client_of(made) as known:
            GATE.shut()
            with known.messages.stream(**sdk("<<abc>>")) as running_one:
                assert GATE.waited.wait(PATIENCE)
                with pytest.raises(anthropic.APIStatusError) as full:
                    known.messages.create(**sdk("<<b>>"))
                GATE.open.set()
                assert running_one.get_final_text() == "abc"
        assert full.value.status_code == 503
        assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
        assert 1 <= int(full.value.response.headers["retry-after"]) <= 60


def test_the_client_raises_a_fault_in_mid_stream(client: anthropic.Anthropic) -> None:
    """The event `error` is an exception there, and a row that fails whole is a server's error."""
    with pytest.raises(anthropic.APIStatusError, match="failed"), client.messages.stream(**sdk("<<ab!c>>")) as stream:
        stream.get_final_message()
    with pytest.raises(anthropic.InternalServerError):
        client.messages.create(**sdk("<<ab!c>>"))
    assert text_of(client.messages.create(**sdk("<<ok>>"))) == "ok"


def text_of(message: anthropic.types.Message) -> str:
    """Of a message of one text."""
    [block] = message.content
    assert isinstance(block, anthropic.types.TextBlock)
    return block.text
