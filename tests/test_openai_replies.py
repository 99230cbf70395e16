"""Replies of /v1/completions and /v1/chat/completions, streamed and not (docs/spec/clients.md 3.3, 3.6)."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = [TEXT, CHAT]
CONTEXT, VOCAB = 2048, 320


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with running(
        write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), max_num_seqs=4, prefill_chunk=128
    ) as made:
        yield made


def saying(path: str, text: str, **more: Any) -> dict[str, Any]:
    """A request whose reply is `text`."""
    prompt = f"<<{text}>>"
    given = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    return {**given, **more}


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of a streamed choice."""
    parts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(parts)


def finish(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    (last,) = [
        each for chunk in chunks for each in chunk["choices"] if each["index"] == index and each["finish_reason"]
    ]
    return last


def refused(server: ScriptServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, reply, _ = server.post(path, body)
    assert status == 400, reply
    return dict(reply["error"])


# --- shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_reply_holds_what_the_specification_says(server: ScriptServer, path: str) -> None:
    """3.6: keys of the reply, of its choice and of its usage."""
    mine = f"mine-{PATHS.index(path)}"  # an id is free again only once all of its request is over
    status, reply, headers = server.post(path, saying(path, "hello"), {"X-Request-Id": mine})
    assert (status, headers["x-request-id"]) == (200, mine)
    (choice,) = reply.pop("choices")
    prompt = reply["usage"]["prompt_tokens"]
    assert isinstance(reply.pop("created"), int)
    assert reply.pop("system_fingerprint").startswith("mlxcel-")
    assert reply == {
        "id": f"{'cmpl' if path == TEXT else 'chatcmpl'}-{mine}",
        "object": "text_completion" if path == TEXT else "chat.completion",
        "model": "tiny",
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 5,
            "total_tokens": prompt + 5,
            "prompt_tokens_details": {"cached_tokens": 0, "truncated_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    ended = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None, "finish_cause": "eos"}
    said = {"text": "hello"} if path == TEXT else {
        "message": {"role": "assistant", "content": "hello", "refusal": None}
    }  # fmt: skip
    assert choice == {**ended, **said}


@pytest.mark.parametrize("path", PATHS)
def test_h_i3_chunks_have_one_identity_and_the_role_comes_with_the_first_text(server: ScriptServer, path: str) -> None:
    chunks = server.stream(path, saying(path, "hey"))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    first, *middle, last = [choice for chunk in chunks for choice in chunk["choices"]]
    if path == CHAT:
        assert first["delta"] == {"role": "assistant", "content": "h"}
        assert [choice["delta"] for choice in middle] == [{"content": "e"}, {"content": "y"}]
        assert last["delta"] == {}
    else:
        assert [choice["text"] for choice in (first, *middle, last)] == ["h", "e", "y", ""]
    assert (last["finish_reason"], last["finish_cause"], last["stop_reason"]) == ("stop", "eos", None)
    assert all(choice["finish_reason"] is None for choice in (first, *middle))


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_reply_has_one_chunk_and_an_end(server: ScriptServer, path: str) -> None:
    chunks = server.stream(path, saying(path, "hello", max_tokens=0))
    first, last = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (first.get("delta") or first["text"]) == ({"role": "assistant", "content": ""} if path == CHAT else "")
    assert last["finish_reason"] == "length"


@pytest.mark.parametrize("path", PATHS)
def test_h_o1_usage_comes_when_it_is_asked_for_and_last(server: ScriptServer, path: str) -> None:
    asked = saying(path, "ab", stream_options={"include_usage": True})
    *chunks, last = server.stream(path, asked)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == server.ok(path, saying(path, "ab"))["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    running_usage = saying(path, "ab", stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in server.stream(path, running_usage)]
    assert counts == [1, 2, 2, 2]
    alone = server.stream(path, saying(path, "ab", stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in alone)


@pytest.mark.parametrize("path", PATHS)
def test_h_o17_the_model_may_be_left_out_and_is_named_by_what_is_served(server: ScriptServer, path: str) -> None:
    for model in (None, "", "tiny"):
        assert server.ok(path, saying(path, "a", model=model))["model"] == "tiny"
    for model in ("gpt-4o", "models/tiny", "../tiny", "Tiny"):
        for stream in (False, True):
            status, reply, _ = server.post(path, saying(path, "a", model=model, stream=stream))
            error = reply["error"]
            assert (status, error["code"], error["type"], error["param"]) == (
                404, "model_not_found", "not_found_error", "model"
            )  # fmt: skip
            assert "tiny" in error["message"]


# --- text -------------------------------------------------------------------------------------------------------------

STOPS: list[tuple[str, dict[str, Any], str, str, Any]] = [
    ("AB|C DE|FG".replace("|", ""), {"stop": "DEFG"}, "ABC ", "stop_string", "DEFG"),
    ("one two three", {"stop": ["nine", "thr"]}, "one two ", "stop_string", "thr"),
    ("one two three", {"stop": ["thr"], "include_stop_str_in_output": True}, "one two thr", "stop_string", "thr"),
    ("abc", {"stop": "abcd"}, "abc", "eos", None),
    ("naïve 😀 👩‍👩‍👧", {}, "naïve 😀 👩‍👩‍👧", "eos", None),
    ("a😀", {"max_tokens": 3}, "a\ufffd", "max_tokens", None),
    ("abc", {"stop_token_ids": [98]}, "a", "stop_token", 98),
    ("abc", {"max_completion_tokens": 2}, "ab", "max_tokens", None),
    ("x" * 20, {"loop_detection": {"min_pattern": 1, "max_pattern": 2, "min_count": 8}}, "x" * 8, "loop",
     {"period": 1, "count": 8}),
    ("  a\nb", {"n_indent": 2}, "  a\n", "indent_limit", None),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("said", "more", "text", "cause", "reason"), STOPS)
def test_h_b5_streamed_and_whole_replies_say_the_same_on_both_routes(
    server: ScriptServer, path: str, said: str, more: dict[str, Any], text: str, cause: str, reason: Any
) -> None:
    """H-B1, H-B5, H-B6, H-A5, H-I17: text, cause and reason; joined deltas are the text, byte for byte."""
    (choice,) = server.ok(path, saying(path, said, **more))["choices"]
    assert (text_of(choice), choice["finish_cause"], choice["stop_reason"]) == (text, cause, reason)
    assert choice["finish_reason"] == ("length" if cause == "max_tokens" else "stop")
    chunks = server.stream(path, saying(path, said, **more))
    last = finish(chunks)
    assert joined(chunks) == text
    assert {name: last[name] for name in ("finish_reason", "finish_cause", "stop_reason")} == {
        name: choice[name] for name in ("finish_reason", "finish_cause", "stop_reason")
    }


def test_h_b9_an_empty_stop_string_is_refused_and_the_prompt_is_not_searched(server: ScriptServer) -> None:
    for path in PATHS:
        assert refused(server, path, saying(path, "abc", stop=""))["param"] == "stop"
        (choice,) = server.ok(path, saying(path, "abc", stop="<<"))["choices"]
        assert text_of(choice) == "abc"


@pytest.mark.parametrize("form", ["deepseek", "deepseek-legacy", "none"])
def test_reasoning_is_apart_streamed_and_not(server: ScriptServer, form: str) -> None:
    """T9, and `reasoning_tokens`: those up to the end of the reasoning."""
    asked = saying(CHAT, "<think>hm</think>yes", reasoning_format=form)
    whole = server.ok(CHAT, asked)
    message = whole["choices"][0]["message"]
    chunks = server.stream(CHAT, asked)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert joined(chunks) == message["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message.get("reasoning_content", "")
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    if form == "none":
        assert message == {"role": "assistant", "content": "<think>hm</think>yes", "refusal": None}
        assert counted == 0
    else:
        assert message["reasoning_content"] == "hm"
        assert message["content"] == ("yes" if form == "deepseek" else "<think>hm</think>yes")
        assert counted == len("<think>hm")
        assert deltas[0]["role"] == "assistant"


# --- choices and prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_h_i1_choices_are_apart_and_interleave(server: ScriptServer, path: str) -> None:
    """H-I1: three choices, each with its own text; each chunk holds one of them."""
    asked = saying(path, "one|two!".replace("!", "") + "|three", n=3)
    assert [text_of(choice) for choice in server.ok(path, asked)["choices"]] == ["one", "two", "three"]
    chunks = server.stream(path, asked)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert [joined(chunks, index) for index in range(3)] == ["one", "two", "three"]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


def test_several_prompts_are_choices_in_their_order(server: ScriptServer) -> None:
    """3.6: index = prompt times n and choice; ids and texts as prompts; more of them than rows and queue hold."""
    prompts = ["<<a|b>>", "<<c|d>>", "<<e|f>>"]
    for prompt in (prompts, [list(each.encode()) for each in prompts]):
        reply = server.ok(TEXT, {"prompt": prompt, "n": 2, "return_token_ids": True})
        assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == list(enumerate("abcdef"))
        assert [choice["token_ids"] for choice in reply["choices"]] == [[ord(letter)] for letter in "abcdef"]
        assert reply["choices"][2]["prompt_token_ids"] == list(prompts[1].encode())
        assert reply["usage"]["prompt_tokens"] == 3 * 7
        assert reply["usage"]["completion_tokens"] == 6
    many = {"prompt": [f"<<{number}>>" for number in range(100)]}
    assert [choice["text"] for choice in server.ok(TEXT, many)["choices"]] == [str(number) for number in range(100)]
    chunks = server.stream(TEXT, many)
    assert [joined(chunks, index) for index in range(100)] == [str(number) for number in range(100)]
    assert server.idle()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, 17, 5_000_000, 2**63])
def test_h_i2_h_p3_n_is_a_number_of_choices_up_to_the_cap(server: ScriptServer, path: str, n: Any) -> None:
    for name in ("n", "n_cmpl"):
        error = refused(server, path, saying(path, "a", **{name: n}))
        assert error["param"] == name


def test_h_p3_caps_hold_before_memory_is_taken(server: ScriptServer) -> None:
    """H-P3: huge numbers and lists are refused; what that takes is what the body is."""
    tracemalloc.start()
    try:
        assert refused(server, TEXT, {"prompt": "a", "n": 5_000_000})["param"] == "n"
        assert refused(server, TEXT, {"prompt": "a", "best_of": 5_000_000})["code"] == "unsupported_field"
        assert refused(server, TEXT, {"prompt": ["a"] * 257})["param"] == "prompt"
        assert "256" in refused(server, TEXT, {"prompt": ["a"] * 100_000})["message"]
        assert "1024" in refused(server, TEXT, {"prompt": ["a"] * 256, "n": 16})["message"]
        assert refused(server, TEXT, {"prompt": "a", "prompt_logprobs": 2**31 - 1})["param"] == "prompt_logprobs"
        assert refused(server, CHAT, {"messages": [{"role": "user", "content": ""}] * 4097})["param"] == "messages"
        parts = [{"type": "text", "text": "a"}] * 257
        refusal = refused(server, CHAT, {"messages": [{"role": "user", "content": parts}]})
        assert refusal["param"] == "messages[0].content"
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 64 << 20
    finally:
        tracemalloc.stop()
    assert server.ok(TEXT, saying(TEXT, "ok"))["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("asked", "tokens", "reason"), [
    (0, 0, "length"), (1, 1, "length"), (None, 3, "stop"), (-1, 3, "stop"), (2**40, 3, "stop"), (3, 3, "length"),
])  # fmt: skip
def test_h_i5_max_tokens(server: ScriptServer, path: str, asked: Any, tokens: int, reason: str) -> None:
    """H-I5: none, one, to the end, and far beyond what fits."""
    reply = server.ok(path, saying(path, "abc", max_tokens=asked))
    assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (tokens, reason)
    assert text_of(reply["choices"][0]) == "abc"[:tokens]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_h_i6_h_o18_a_prompt_that_does_not_fit_is_400_before_a_stream(
    server: ScriptServer, path: str, stream: bool
) -> None:
    """H-I6, H-I8, H-O18: the code that routers look for, and both numbers."""
    text = "x" * (CONTEXT + 1)
    body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    error = refused(server, path, {**body, "stream": stream})
    assert (error["code"], error["type"], error["n_ctx"]) == (
        "context_length_exceeded", "invalid_request_error", CONTEXT
    )  # fmt: skip
    assert error["n_prompt_tokens"] >= CONTEXT + 1
    assert str(error["n_prompt_tokens"]) in error["message"]
    assert str(CONTEXT) in error["message"]


def test_h_i10_a_prompt_is_cut_only_when_asked_and_that_is_seen(server: ScriptServer) -> None:
    reply = server.ok(TEXT, {"prompt": "x" * 3000 + "<<hi>>", "truncate_prompt_tokens": 6})
    assert reply["choices"][0]["text"] == "hi"
    assert reply["usage"]["prompt_tokens"] == 6
    assert reply["usage"]["prompt_tokens_details"]["truncated_tokens"] == 3000
    chunks = server.stream(
        TEXT,
        {
            "prompt": "x" * 3000,
            "truncate_prompt_tokens": -1,
            "max_tokens": 1,
            "stream_options": {"include_usage": True},
        },
    )
    assert chunks[-1]["usage"]["prompt_tokens"] == CONTEXT - 1


@pytest.mark.parametrize(
    ("prompt", "path"),
    [
        ([-1], "prompt[0]"), ([VOCAB], "prompt[0]"), ([2**63], "prompt[0]"), ([True], "prompt[0]"),
        ([1.5], "prompt[0]"),
        ([1, None], "prompt[1]"), ([1, "a"], "prompt[1]"), ([[1], [VOCAB]], "prompt[1][0]"), ([["a"]], "prompt[0][0]"),
        (["a", 1], "prompt[1]"), (["a", {}], "prompt[1]"), (5, "prompt"), ({"a": 1}, "prompt"), (True, "prompt"),
    ],
)  # fmt: skip
def test_h_i12_ids_that_are_none(server: ScriptServer, prompt: Any, path: str) -> None:
    assert refused(server, TEXT, {"prompt": prompt})["param"] == path
    assert server.ok(TEXT, {"prompt": [60, 60, 65, 62, 62]})["choices"][0]["text"] == "A"


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""]])
def test_a_prompt_of_nothing_is_its_own_code(server: ScriptServer, prompt: Any) -> None:
    error = refused(server, TEXT, {"prompt": prompt})
    assert (error["code"], error["param"].split("[")[0]) == ("empty_prompt", "prompt")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"999999": 5}, 'logit_bias["999999"]'), ({"-1": 1}, 'logit_bias["-1"]'), ({"abc": 1}, 'logit_bias["abc"]'),
        ({str(VOCAB): 1}, f'logit_bias["{VOCAB}"]'), ({"1": 101}, 'logit_bias["1"]'), ([[VOCAB, 1]], "logit_bias[0]"),
        (5, "logit_bias"),
    ],
)  # fmt: skip
def test_h_i14_biases_for_ids_that_are_none(server: ScriptServer, path: str, bias: Any, param: str) -> None:
    assert refused(server, path, saying(path, "a", logit_bias=bias))["param"] == param
    assert text_of(server.ok(path, saying(path, "a", logit_bias={"98": 1}))["choices"][0]) == "a"


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_of_fields_are_named_by_their_place(server: ScriptServer, field: str) -> None:
    for path in PATHS:
        assert refused(server, path, saying(path, "a", **{field: [5, VOCAB, 7]}))["param"] == f"{field}[1]"


def test_h_i17_the_context_is_an_ending_of_its_own(server: ScriptServer) -> None:
    prompt = "x" * (CONTEXT - 3)
    (choice,) = server.ok(TEXT, {"prompt": prompt})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["finish_cause"]) == ("xxx", "length", "context")


# --- warnings, ids, progress, names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_value_that_cannot_act_is_told(server: ScriptServer, path: str) -> None:
    asked = saying(path, "a", xtc_probability=1, xtc_threshold=0.6)
    reply = server.ok(path, asked)
    assert any("xtc_threshold" in warning for warning in reply["warnings"])
    told = [chunk["warnings"] for chunk in server.stream(path, asked) if "warnings" in chunk]
    assert told == [reply["warnings"]]
    assert "warnings" not in server.ok(path, saying(path, "a"))


@pytest.mark.parametrize("path", PATHS)
def test_ids_ride_on_the_chunk_that_releases_their_text(server: ScriptServer, path: str) -> None:
    asked = saying(path, "a😀b", return_token_ids=True)
    reply = server.ok(path, asked)
    ids = list("a😀b".encode())
    assert reply["choices"][0]["token_ids"] == ids
    chunks = server.stream(path, asked)
    found = [choice["token_ids"] for chunk in chunks for choice in chunk["choices"]]
    assert found == [ids[:1], ids[1:5], ids[5:], []]
    prompt = reply["prompt_token_ids"] if path == CHAT else reply["choices"][0]["prompt_token_ids"]
    assert len(prompt) == reply["usage"]["prompt_tokens"]
    streamed = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert [each for each in streamed if each] == [prompt]


def test_progress_is_told_on_request(server: ScriptServer) -> None:
    """Behind each piece of the prompt, before its first text; for the first of several choices."""
    server.serving.reset_cache()
    asked = saying(TEXT, "abc" * 20 + "|" + "d" * 300, return_progress=True, n=2)
    chunks = server.stream(TEXT, asked)
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    pieces = [0, 128, 256, 365]
    assert [(each["total"], each["cache"], each["processed"]) for each in told] == [(365, 0, done) for done in pieces]
    first = next(place for place, chunk in enumerate(chunks) if chunk["choices"] and chunk["choices"][0]["index"] == 0)
    assert all("prompt_progress" in chunk for chunk in chunks[: len(pieces)])
    assert first >= len(pieces)
    again = [chunk["prompt_progress"] for chunk in server.stream(TEXT, asked) if "prompt_progress" in chunk]
    assert again[0]["cache"] == again[0]["processed"] > 0
    assert again[-1]["processed"] == 365
    assert all(chunk["choices"] == [] for chunk in chunks if "prompt_progress" in chunk)
    assert all("prompt_progress" not in chunk for chunk in server.stream(TEXT, saying(TEXT, "abc")))


def test_a_reply_can_be_named(server: ScriptServer) -> None:
    assert server.ok(TEXT, saying(TEXT, "a", request_id="run-7"))["id"] == "cmpl-run-7"
    assert server.ok(CHAT, saying(CHAT, "a", request_id="run-7"))["id"] == "chatcmpl-run-7"


def test_priority_is_a_name_or_a_number_and_the_header_says_the_same(server: ScriptServer) -> None:
    for priority in ("high", "normal", "low", 0, 1, 2):
        assert server.post(TEXT, saying(TEXT, "a", priority=priority), {"X-Priority": str(priority)})[0] == 200
    assert server.post(TEXT, saying(TEXT, "a", priority="high"), {"X-Priority": "0"})[0] == 200
    status, reply, _ = server.post(TEXT, saying(TEXT, "a", priority="high"), {"X-Priority": "low"})
    assert (status, reply["error"]["param"]) == (400, "priority")
    status, reply, _ = server.post(TEXT, saying(TEXT, "a"), {"X-Priority": "3"})
    assert (status, reply["error"]["param"]) == (400, "X-Priority")
    for priority in (3, -1, "", 1.5, True):
        assert refused(server, TEXT, saying(TEXT, "a", priority=priority))["param"] == "priority"


def test_h_p7_only_one_salt_shares_the_cache(server: ScriptServer) -> None:
    """H-P7: the same salt hits, another one and none do not; `cache_prompt: false` neither reads nor fills."""
    prompt = "shared words " * 10

    def cached(**more: Any) -> int:
        usage = server.ok(TEXT, {"prompt": prompt, "max_tokens": 2, **more})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    server.serving.reset_cache()
    assert (cached(cache_prompt=False), cached(cache_salt="a")) == (0, 0)
    assert cached(cache_salt="a") > 0
    assert (cached(cache_salt="b"), cached()) == (0, 0)
    assert cached(cache_salt="a", cache_prompt=False) == 0
    assert refused(server, TEXT, {"prompt": prompt, "cache_salt": ""})["param"] == "cache_salt"
