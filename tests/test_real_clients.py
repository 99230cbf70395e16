"""Clients of others against a server on this machine (docs/spec/clients.md 3.13: 1). OpenAI's and Anthropic's Python
clients have files of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_programs import program, run
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

NODE_CLIENT = Path(__file__).parent / "data" / "openai_client.mjs"
NODE_PACKAGE = "openai@6"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), max_num_seqs=2) as made:
        yield made
        assert made.idle()


# --- OpenAI's client for Node -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_node(server: ScriptServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client made of its calls. It is installed for this test alone."""
    folder = tmp_path_factory.mktemp("node")
    npm, node = program("npm", "it comes with Node.js"), program("node", "https://nodejs.org")
    installed = run([npm, "install", "--no-audit", "--no-fund", NODE_PACKAGE], folder)
    if installed.returncode:
        pytest.skip(f"npm cannot install {NODE_PACKAGE}: {installed.stderr.strip()[-300:]}")
    script = folder / NODE_CLIENT.name
    script.write_bytes(NODE_CLIENT.read_bytes())
    ran = run([node, script, server.url], folder)
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.slow
def test_node_gets_whole_replies(in_node: dict[str, Any]) -> None:
    assert in_node["chat"] == [["héllo", "stop"], ["world", "stop"]]
    assert in_node["bytes"][:3] == [[ord("h")], [0xC3], [0xA9]]
    assert in_node["usage"]["completion_tokens"] == 11
    assert in_node["completion"] == "ab"
    assert in_node["models"] == {"object": "list", "ids": ["tiny"]}


@pytest.mark.slow
def test_node_gets_streams(in_node: dict[str, Any]) -> None:
    """H-O1, H-I3: a loop over the first choice, one id for all chunks, and the client's own streaming helper."""
    assert in_node["streamed"] == {"text": "héllo", "ids": 1, "finish": "stop"}
    assert in_node["older"] == {"text": "a→b", "ids": 1, "finish": "stop"}
    helper = in_node["helper"]
    assert helper["text"] == helper["joined"] == "héllo"
    assert helper["usage"]["completion_tokens"] == 6


@pytest.mark.slow
def test_node_gets_errors_of_its_own_classes(in_node: dict[str, Any]) -> None:
    """H-O7: by status, with code and param; behind all of them and a reader that left there is a good reply."""
    kind = "invalid_request_error"
    assert in_node["bad"] == {
        "kind": "BadRequestError", "status": 400, "code": None, "param": "temperature", "type": kind,
    }  # fmt: skip
    assert in_node["missing"] == {
        "kind": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model", "type": "not_found_error",
    }  # fmt: skip
    assert in_node["tools"]["code"] == "unsupported_field"
    assert (in_node["tools"]["kind"], in_node["tools"]["param"]) == ("BadRequestError", "tools")
    assert (in_node["failed"]["kind"], in_node["failed"]["status"]) == ("InternalServerError", 500)
    assert (in_node["broken"]["kind"], in_node["broken"]["code"]) == ("APIError", "internal_error")
    assert in_node["after"] == "fine"


# --- llm --------------------------------------------------------------------------------------------------------------


class Llm:
    """The command `llm`, with this server's model as a chat model and as one that completes."""

    def __init__(self, server: ScriptServer, folder: Path) -> None:
        self._program, self._folder = program("llm", "`pip install llm` has it"), folder
        about = {"model_name": "tiny", "api_base": f"{server.url}/v1"}
        models = [{"model_id": "chat", **about}, {"model_id": "text", "completion": True, **about}]
        (folder / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def __call__(self, model: str, *words: object) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        asked = [self._program, "prompt", "-m", model, "--key", "none", *words]
        ran = run(asked, self._folder, LLM_USER_PATH=str(self._folder))
        return ran.returncode, ran.stdout, ran.stderr


@pytest.fixture
def llm(server: ScriptServer, tmp_path: Path) -> Llm:
    return Llm(server, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [(), ("--no-stream",)], ids=["stream", "whole"])
@pytest.mark.parametrize("model", ["chat", "text"])
def test_llm_prints_replies(llm: Llm, model: str, stream: tuple[str, ...]) -> None:
    assert llm(model, "<<héllo>>", *stream) == (0, "héllo\n", "")
    assert llm(model, "<<abcdef>>", "-o", "max_tokens", 3, *stream) == (0, "abc\n", "")


@pytest.mark.slow
def test_llm_goes_on_with_a_conversation(llm: Llm) -> None:
    """What its log has of the first turn comes back as messages."""
    assert llm("chat", "one", "-s", "be brief")[0] == 0
    code, out, err = llm("chat", "<<two>>", "-c")
    assert (code, out) == (0, "two\n"), err


@pytest.mark.slow
@pytest.mark.parametrize("stream", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_llm_says_what_the_server_says(llm: Llm, stream: tuple[str, ...]) -> None:
    """H-I6, H-I8: a refusal before the stream is an error there, and no empty reply."""
    code, out, err = llm("chat", "x" * 5000, *stream)
    assert (code, out) == (1, "")
    assert "the context holds" in err
    code, _, err = llm("chat", "hi", "-o", "logit_bias", '{"9999": 5}', *stream)
    assert code == 1
    assert "logit_bias" in err


# --- LangChain --------------------------------------------------------------------------------------------------------


@pytest.fixture
def langchain(server: ScriptServer) -> Any:
    """A function that makes its chat model, or with `older` the one that completes, for this server's."""
    found = pytest.importorskip("langchain_openai")

    def make(*, older: bool = False, **fields: Any) -> Any:
        kind = found.OpenAI if older else found.ChatOpenAI
        return kind(base_url=f"{server.url}/v1", api_key="none", model="tiny", max_retries=0, **fields)

    return make


def test_langchain_asks_and_streams(langchain: Any) -> None:
    chat = langchain(max_tokens=4, stream_usage=True)
    reply = chat.invoke([("system", "be brief"), ("human", "<<héllo>>")])
    assert (reply.content, reply.response_metadata["finish_reason"]) == ("hél", "length")
    pieces = list(chat.stream("<<héllo>>"))
    assert "".join(piece.content for piece in pieces) == "hél"
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 4
    assert chat.bind(stop=["l"]).invoke("<<hello>>").content == "he"
    assert [each.content for each in chat.batch(["<<one>>", "<<two>>"])] == ["one", "two"]
    assert langchain(older=True, max_tokens=3).invoke("<<abcdef>>") == "abc"


def test_langchain_hears_what_is_refused(langchain: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        langchain().invoke("x" * 5000)
    with pytest.raises(openai.BadRequestError, match="tools"):
        langchain().bind(tools=[{"type": "function", "function": {"name": "f"}}]).invoke("hi")


# --- readers of event streams -----------------------------------------------------------------------------------------


def asked(path: str, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 20}
    if path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    given = {"prompt": text} if path in ("/v1/completions", "/completion") else {}
    return {**body, **(given or {"messages": [{"role": "user", "content": text}]})}


SAID = "a\u2028b\u0085é"
"""Characters that end a line for some readers, and none in an event stream."""

TEXTS: dict[str, Callable[[Any], str]] = {
    "/v1/completions": lambda event: "".join(choice["text"] for choice in event["choices"]),
    "/v1/chat/completions": lambda event: "".join(c["delta"].get("content") or "" for c in event["choices"]),
    "/completion": lambda event: event["content"],
    "/v1/messages": lambda event: event.get("delta", {}).get("text", ""),
}


def checked(path: str, events: list[Any]) -> None:
    """Events with `event` and `data`, as a reader found them."""
    if path.startswith("/v1/") and path != "/v1/messages":
        assert events.pop().data == "[DONE]"
    decoded = [json.loads(event.data) for event in events]
    assert "".join(TEXTS[path](event) for event in decoded) == SAID
    named = [event.event for event in events]
    assert named == ([each["type"] for each in decoded] if path == "/v1/messages" else ["message"] * len(events))
    assert path == "/v1/messages" or len(events) > 3


@pytest.mark.parametrize("path", TEXTS)
def test_httpx2_reads_the_streams(server: ScriptServer, path: str) -> None:
    """H-A7: by the standard's own rules of lines and events."""
    httpx2 = pytest.importorskip("httpx2")
    with httpx2.Client() as client:
        sent = asked(path, f"<<{SAID}>>")
        with client.sse(f"{server.url}{path}", method="POST", json=sent) as source:
            assert source.response.headers["content-type"] == "text/event-stream; charset=utf-8"
            events = list(source)
    checked(path, events)


@pytest.mark.parametrize("path", TEXTS)
def test_httpx_sse_reads_the_streams(server: ScriptServer, path: str) -> None:
    """H-A7: the package from which others have their reader."""
    httpx = pytest.importorskip("httpx")
    httpx_sse = pytest.importorskip("httpx_sse")
    with httpx.Client() as client:
        sent = asked(path, f"<<{SAID}>>")
        with httpx_sse.connect_sse(client, "POST", f"{server.url}{path}", json=sent) as source:
            events = list(source.iter_sse())
    checked(path, events)
