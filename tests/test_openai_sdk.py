"""OpenAI's own Python client against a server on this machine (docs/spec/clients.md 3.13: 1, 10)."""

import math
from collections.abc import Iterator

import pytest
from other_threads import PATIENCE
from script_server import GATE, ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

openai = pytest.importorskip("openai")
from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion  # noqa: E402

HELLO = [{"role": "user", "content": "<<hello|world>>"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    settings = ServerSettings(max_queue_depth=0)
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), settings, max_num_seqs=1) as made:
        yield made


@pytest.fixture
def client(server: ScriptServer) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: "openai.OpenAI") -> None:
    reply = client.chat.completions.create(model="tiny", messages=HELLO, n=2, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(reply.model_dump(), strict=True)
    assert [choice.message.content for choice in reply.choices] == ["hello", "world"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "stop"]
    assert reply.usage.completion_tokens == 10
    assert reply.system_fingerprint


def test_h_h3_chat_log_probabilities(client: "openai.OpenAI") -> None:
    """H-H3: `logprobs.content[]` with token, logprob, bytes and top_logprobs."""
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "<<é!>>".replace("!", "a")}], logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    assert [token.bytes for token in content] == [[0xC3], [0xA9], [97]]
    assert [token.token for token in content] == ["\ufffd", "\ufffd", "a"]
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    bare = client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
    assert all(token.top_logprobs == [] for token in bare.choices[0].logprobs.content)
    assert client.chat.completions.create(model="tiny", messages=HELLO).choices[0].logprobs is None
    streamed = [
        token
        for chunk in client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "<<éa>>"}], logprobs=True, top_logprobs=2, stream=True
        )
        for choice in chunk.choices
        for token in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert streamed == content


def test_h_h3_log_probabilities_of_completions(client: "openai.OpenAI") -> None:
    """H-H3: tokens, token_logprobs, top_logprobs, text_offset; bytes that are no text stay apart."""
    reply = client.completions.create(model="tiny", prompt="<<aéb>>", logprobs=1)
    Completion.model_validate(reply.model_dump(), strict=True)
    assert reply.choices[0].text == "aéb"
    found = reply.choices[0].logprobs
    assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert found.text_offset == [0, 1, 1, 2]
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]
    assert found.token_logprobs == [next(iter(top.values())) for top in found.top_logprobs]
    parts = [
        choice.logprobs
        for chunk in client.completions.create(model="tiny", prompt="<<aéb>>", logprobs=1, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(found, name)


@pytest.mark.parametrize("stream", [False, True])
def test_h_h5_echo_puts_the_prompt_in_front(client: "openai.OpenAI", stream: bool) -> None:
    """H-H5: the older shape, with the prompt's tokens; max_tokens 0 scores the prompt alone."""
    for most, said in ((0, ""), (2, "hi")):
        asked = {"model": "tiny", "prompt": "é<<hi>>", "echo": True, "logprobs": 2, "max_tokens": most}
        if stream:
            choices = [choice for chunk in client.completions.create(**asked, stream=True) for choice in chunk.choices]
            text, (found,) = "".join(c.text for c in choices), [c.logprobs for c in choices if c.logprobs is not None]
        else:
            reply = client.completions.create(**asked)
            assert reply.usage.completion_tokens == most
            text, found = reply.choices[0].text, reply.choices[0].logprobs
        assert text == "é<<hi>>" + said
        assert found.tokens == ["bytes:\\xc3", "bytes:\\xa9", *"<<hi>>", *said]
        assert found.text_offset == [0, 0, 1, 2, 3, 4, 5, 6, *range(7, 7 + most)]
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        assert all(math.isfinite(value) for value in found.token_logprobs[1:])
        assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])


def test_the_streaming_helper(client: "openai.OpenAI") -> None:
    with client.chat.completions.stream(model="tiny", messages=HELLO, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "hello"
    assert final.usage.completion_tokens == 5
    assert kinds.count("content.delta") == 5
    assert kinds.count("content.done") == 1


def test_a_loop_over_the_first_choice_meets_no_chunk_without_one(client: "openai.OpenAI") -> None:
    """H-O1: without `include_usage` each chunk has a choice."""
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"


def test_errors_are_of_the_clients_classes(client: "openai.OpenAI") -> None:
    """H-O7: each status is its own class, with code and param."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=101)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("temperature", None, "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="tiny", prompt="<<a!>>")
    assert failed.value.status_code == 500
    with pytest.raises(openai.APIError) as broken:
        list(client.completions.create(model="tiny", prompt="<<a!>>", stream=True))
    assert broken.value.code == "internal_error"
    for body in ({"foo": 1}, {"user": "me", "store": False, "metadata": {}}):
        assert client.completions.create(model="tiny", prompt="<<a>>", extra_body=body).choices[0].text == "a"


def test_a_full_server_is_tried_again(server: ScriptServer) -> None:
    """503 with Retry-After: the client waits as it is told and asks again."""
    GATE.shut()
    first = server.raw("/v1/completions", {"prompt": "<<a>>"})
    assert GATE.waited.wait(PATIENCE)
    waits: list[float] = []

    class Patient(openai.OpenAI):
        def _sleep_for_retry(self, *, response: object, **more: object) -> None:
            waits.append(float(response.headers["retry-after"]))  # type: ignore[attr-defined]
            GATE.open.set()
            first.recv(1)

    try:
        with Patient(base_url=f"{server.url}/v1", api_key="none", max_retries=1000) as client:
            reply = client.completions.create(model="tiny", prompt="<<b>>")
    finally:
        GATE.open.set()
        first.close()
    assert reply.choices[0].text == "b"
    assert len(waits) >= 1
    assert all(1 <= wait <= 60 for wait in waits)
