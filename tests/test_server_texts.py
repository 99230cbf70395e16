"""Chat templates behind the chat route, and the routes for texts: /tokenize, /detokenize, /apply-template."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from script_server import ScriptServer, running
from tiny_checkpoint import write_json, write_tiny_llama

from mlxcel.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] not in ('user', 'system') %}{{ raise_exception('the user must begin') }}"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if mood is defined %}mood {{ mood }}\n{% endif %}"
    "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if clock is defined %}{{ strftime_now('%Y') }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """The tiny model itself, with a BOS that its tokenizer adds and its template writes."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": TEMPLATE})
    settings = ServerSettings(allow_request_templates=True)
    with running(folder, settings, backend="reference-numpy", max_num_seqs=4) as made:
        yield made


def refused(server: ScriptServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, reply, _ = server.post(path, body)
    assert status == 400, reply
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1})[0] == 200
    return dict(reply["error"])


def test_h_d1_a_chat_has_one_bos(server: ScriptServer) -> None:
    """H-D1: the template writes it, the tokenizer adds none; what is counted is what is fed."""
    explained = server.ok("/apply-template", {"messages": HELLO, "explain": True})
    ids = explained["token_ids"]
    bos = server.serving.model.tokenizer.special_ids["bos"]
    assert (ids[0], ids.count(bos)) == (bos, 1)
    assert server.ok("/tokenize", {"messages": HELLO})["tokens"] == ids
    reply = server.ok(CHAT, {"messages": HELLO, "max_tokens": 1, "return_token_ids": True})
    assert reply["prompt_token_ids"] == ids
    assert reply["usage"]["prompt_tokens"] == len(ids)
    raw = server.ok("/v1/completions", {"prompt": explained["prompt"], "max_tokens": 1, "return_token_ids": True})
    assert raw["choices"][0]["prompt_token_ids"] == ids


def test_h_d3_the_templates_own_reason_is_told(server: ScriptServer) -> None:
    """H-D3: 400 `template_error` in the template's words; on each route that renders."""
    messages = [{"role": "assistant", "content": "Hi"}]
    for path in (CHAT, "/apply-template", "/tokenize"):
        error = refused(server, path, {"messages": messages})
        assert "the user must begin" in error["message"]
        assert error["code"] in ("template_error", 400)


def test_h_d5_the_last_message_can_be_left_open(server: ScriptServer) -> None:
    """H-D5: the prompt ends inside the assistant's turn; both flags together are refused."""
    messages = [*HELLO, {"role": "assistant", "content": "1, 2, 3,"}]
    for more in ({}, {"add_generation_prompt": False}):
        prompt = server.ok("/apply-template", {"messages": messages, "continue_final_message": True, **more})["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n1, 2, 3,")
    asked = {"messages": messages, "continue_final_message": True, "max_tokens": 2, "return_token_ids": True}
    reply = server.ok(CHAT, asked)
    assert reply["prompt_token_ids"] == server.ok("/tokenize", {"content": prompt})["tokens"]
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    for path in (CHAT, "/apply-template", "/tokenize"):
        assert refused(server, path, both)["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), (None, "messages"), ("hi", "messages"), ([5], "messages[0]"), ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"), ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_h_d7_messages_of_a_wrong_shape_are_refused_by_their_path(
    server: ScriptServer, messages: Any, param: str
) -> None:
    """H-D7: 400, and the server goes on."""
    for stream in (False, True):
        assert refused(server, CHAT, {"messages": messages, "stream": stream})["param"] == param


def test_text_parts_are_one_message(server: ScriptServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = server.ok("/apply-template", {"messages": [{"role": "user", "content": parts}]})["prompt"]
    assert "a\nb" in prompt


def test_h_d8_a_system_message_in_the_middle_is_in_the_prompt(server: ScriptServer) -> None:
    messages = [*HELLO, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go"}]
    assert "Be brief." in server.ok("/apply-template", {"messages": messages})["prompt"]
    dropping = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    error = refused(server, CHAT, {"messages": messages, "chat_template": dropping})
    assert error["param"] == "messages[1]"


def test_h_d10_the_template_sees_its_variables(server: ScriptServer) -> None:
    """H-D10: `chat_template_kwargs` and `reasoning_effort` reach it; names that the request gives are refused."""

    def prompt(**more: Any) -> str:
        return str(server.ok("/apply-template", {"messages": HELLO, **more})["prompt"])

    assert "mood calm" in prompt(chat_template_kwargs={"mood": "calm", "unknown": 1})
    assert "effort low" in prompt(reasoning_effort="low")
    plain = server.ok(CHAT, {"messages": HELLO, "max_tokens": 1})["usage"]["prompt_tokens"]
    mooded = server.ok(CHAT, {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"mood": "calm"}})
    assert mooded["usage"]["prompt_tokens"] > plain
    error = refused(server, CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}})
    assert error["param"] == "chat_template_kwargs.messages"
    assert refused(server, CHAT, {"messages": HELLO, "chat_template_kwargs": 5})["param"] == "chat_template_kwargs"


def test_h_d12_a_clock_in_the_template_does_not_keep_the_cache_from_hitting(server: ScriptServer) -> None:
    server.serving.reset_cache()
    asked = {
        "messages": [{"role": "user", "content": "word " * 40}], "max_tokens": 2, "chat_template_kwargs": {"clock": 1}
    }  # fmt: skip
    first, second = (server.ok(CHAT, asked) for _ in range(2))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_h_p1_a_template_of_a_request_runs_in_the_sandbox(server: ScriptServer) -> None:
    """H-P1: no way to Python's internals, whoever wrote the template."""
    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{% include 'x' %}"):
        error = refused(server, CHAT, {"messages": HELLO, "chat_template": attack})
        assert error["code"] == "template_error"
    assert (
        "bye"
        in server.ok("/apply-template", {"messages": HELLO, "chat_template": "bye {{ messages[0].content }}"})["prompt"]
    )


def test_tokenize_and_detokenize_are_each_others_inverse(server: ScriptServer) -> None:
    """3.2: `content` without a BOS unless asked, `prompt` with it unless told otherwise."""
    text, bos = "in the beginning 😀", server.serving.model.tokenizer.special_ids["bos"]
    plain = server.ok("/tokenize", {"content": text})
    ids = plain["tokens"]
    assert plain == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    assert bos not in ids
    for body in (
        {"prompt": text},
        {"content": text, "add_special": True},
        {"content": text, "add_special_tokens": True},
    ):
        assert server.ok("/tokenize", body)["tokens"] == [bos, *ids]
    for body in ({"prompt": text, "add_special": False}, {"prompt": text, "add_special_tokens": False}):
        assert server.ok("/tokenize", body)["tokens"] == ids
    assert server.ok("/detokenize", {"tokens": ids}) == {"content": text, "prompt": text}
    assert server.ok("/detokenize", {"tokens": []}) == {"content": "", "prompt": ""}
    assert server.ok("/tokenize", {"content": ""})["tokens"] == []


def test_pieces_are_texts_or_bytes(server: ScriptServer) -> None:
    pieces = server.ok("/tokenize", {"content": "a😀", "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == server.ok("/tokenize", {"content": "a😀"})["tokens"]
    joined = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"]) for piece in pieces
    )
    assert joined.decode() == "a😀"
    assert any(isinstance(piece["piece"], list) for piece in pieces)


def test_special_tokens_can_be_read_as_text(server: ScriptServer) -> None:
    marked = "<|im_end|>"
    assert server.ok("/tokenize", {"content": marked})["count"] == 1
    assert server.ok("/tokenize", {"content": marked, "parse_special": False})["count"] > 1
    ids = server.ok("/tokenize", {"content": marked})["tokens"]
    assert server.ok("/detokenize", {"tokens": ids})["content"] == marked
    chat = server.ok("/tokenize", {"messages": HELLO, "parse_special": False})["count"]
    assert chat > server.ok("/tokenize", {"messages": HELLO})["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"), ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": "a", "add_special": True, "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"content": 5}, "content"), ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces"),
        ("/detokenize", {}, "tokens"), ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"), ("/detokenize", {"tokens": [1, 320]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"), ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": HELLO, "explain": True, "temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_read_are_refused(
    server: ScriptServer, path: str, body: dict[str, Any], param: str
) -> None:
    assert refused(server, path, body)["param"] == param


def test_explain_tells_the_template_and_what_was_not_said(server: ScriptServer) -> None:
    told = server.ok("/apply-template", {"messages": HELLO, "explain": True, "temperature": 0.5, "seed": 7})
    assert told["template_source"] == TEMPLATE
    assert (told["sampling"]["temperature"], told["sampling"]["seed"]) == (0.5, 7)
    assert told["sampling"]["origin"]["temperature"] == told["sampling"]["origin"]["seed"] == "request"
    own = server.ok(
        "/apply-template", {"messages": HELLO, "explain": True, "chat_template": "{{ messages[0].content }}"}
    )
    assert (own["prompt"], own["template_source"]) == ("Hello", "{{ messages[0].content }}")
    assert set(server.ok("/apply-template", {"messages": HELLO})) == {"prompt"}
