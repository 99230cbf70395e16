"""What clients were seen to do wrong, all in one run against one server, and then a good request (case H-P12)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

CONTEXT, VOCAB = 128, 320
TEXT, CHAT, NATIVE, MESSAGES = "/v1/completions", "/v1/chat/completions", "/completion", "/v1/messages"
TURN = {"role": "user", "content": "in the beginning"}
GOOD: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "in the"},
    NATIVE: {"prompt": "in the"},
    CHAT: {"messages": [TURN]},
    MESSAGES: {"messages": [TURN], "max_tokens": 4},
}

SCHEMAS: tuple[Any, ...] = (
    {"type": "nothing"}, {"$ref": "https://example.org/x"}, {"items": {"items": {"items": {}}}}, 5,
)  # fmt: skip

EVERYWHERE: dict[str, tuple[dict[str, Any], ...]] = {
    "H-I2": tuple({"n": n} for n in (0, -1, 1.5, "2", True)),
    "H-I5": ({"max_tokens": -2}, {"max_tokens": 2**64}, {"max_tokens": "5"}),
    "H-I14": tuple({"logit_bias": bias} for bias in ({"999999": 5}, {"-1": 1}, {"abc": 1}, {"1": 101}, [["a"]])),
    "H-M1": ({"temperature": -1e-9}, {"top_p": -0.0001}),
    "H-M5": ({"top_k": -2},),
    "H-M7": (
        {"temperature": -1}, {"temperature": "0.5"}, {"top_p": 2}, {"repetition_penalty": 100}, {"seed": "x"},
        {"presence_penalty": 3}, {"stop": [""]}, {"stop": ["x"] * 65}, {"min_tokens": 10**6}, {"min_p": True},
    ),
    "H-N1": ({"json_schema": {"type": "object"}},),
    "H-N4": ({"grammar": 'root ::= "a"'},),
    "H-N5": tuple(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        for schema in SCHEMAS
    ),
    "H-N9": tuple({"structured_outputs": {"regex": regex}} for regex in ("(", "[a", "(?<=x)y", "\\p{Nope}")),
    "H-O17": ({"model": "other"}, {"model": "/etc/passwd"}, {"model": 5}),
    "H-P3": ({"n": 5_000_000}, {"n": 2**63}),
    "H-P5": ({"prompt_logprobs": 10**9}, {"prompt_logprobs": VOCAB}, {"prompt_logprobs": VOCAB - 1}),
    "H-P7": ({"cache_salt": ""}, {"cache_salt": "x" * 257}, {"cache_salt": 5}),
    "H-P9": ({"lora": [{"id": 0, "scale": 1.0}]},),
}  # fmt: skip
"""By case: fields on top of a good request of each route."""

PROMPTS: dict[str, tuple[Any, ...]] = {
    "H-I6": ("x" * (CONTEXT + 1), [5] * (CONTEXT + 1)),
    "H-I12": ([-1], [VOCAB], [2**63], [True], [1.5], [[1], [-1]]),
    "H-P3": (["x"] * 100_000, [], [[]], None, 5, {}),
}
CONVERSATIONS: dict[str, tuple[Any, ...]] = {
    "H-D7": ([], None, 5, {}, ["hi"], [{}], [{"role": "user"}], [{"role": 5, "content": "x"}]),
    "H-I6": ([{**TURN, "content": "x" * (CONTEXT + 1)}],),
    "H-D1": ([{**TURN, "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],),
}
OF_CHAT: dict[str, tuple[dict[str, Any], ...]] = {
    "H-D5": ({"add_generation_prompt": True, "continue_final_message": True},),
    "H-O3": ({"tools": [{"type": "function"}]}, {"tool_choice": "required"}),
    "H-P1": ({"chat_template": "{{ ''.__class__.__mro__ }}"},),
}
SENT: dict[str, bytes] = {
    "no JSON": b'{"prompt":', "no object": b"[1]", "nothing": b"", "no UTF-8": b'{"prompt": "\xff"}',
    "deep": b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", "not finite": b'{"prompt": "a", "temperature": NaN}',
    "long": b'{"prompt": "' + b"x" * (1 << 20) + b'"}', "big number": b'{"prompt": "a", "seed": 1' + b"0" * 400 + b"}",
    "twice": b'{"prompt": "a", "temperature": 1, "temperature": 101}',
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    settings = ServerSettings(max_body_size=1 << 20)
    with running(model, settings, backend="reference-numpy", max_num_seqs=2, max_model_len=CONTEXT) as made:
        yield made


def requests() -> Iterator[tuple[str, str, Any]]:
    """Case, path, body."""
    for path, good in GOOD.items():
        for table in (EVERYWHERE, OF_CHAT if path == CHAT else {}):
            yield from ((case, path, {**good, **fields}) for case, every in table.items() for fields in every)
        name, given = ("prompt", PROMPTS) if "prompt" in good else ("messages", CONVERSATIONS)
        yield from ((case, path, {**good, name: value}) for case, values in given.items() for value in values)
        yield from ((case, path, body) for case, body in SENT.items())
    yield "H-P3", TEXT, {**GOOD[TEXT], "best_of": 5_000_000}
    yield "H-O7", "/v1/nothing", {}
    yield "H-O7", "/health", {}
    yield "H-O20", MESSAGES, {"messages": [TURN]}


NEEDS_NOTHING = {("H-P9", TEXT), ("H-P9", CHAT), ("H-P9", MESSAGES)}
"""Adapters are llama.cpp's field: elsewhere it is one that nobody knows, and ignored."""


def test_h_p12_a_good_request_behind_every_bad_one(server: ScriptServer) -> None:
    """H-P12: each is refused with a message, streamed or not, none costs a row or a page, none is a fault of ours, and
    the replies behind all of them are those before."""
    before = {path: server.post(path, {**body, "max_tokens": 4, "seed": 1})[:2] for path, body in GOOD.items()}
    assert {status for status, _ in before.values()} == {200}
    sent = 0
    for case, path, body in requests():
        for streamed in ({}, {"stream": True}) if isinstance(body, dict) else ({},):
            if (case, path) in NEEDS_NOTHING:
                continue
            status, reply, _ = server.post(path, {**body, **streamed} if isinstance(body, dict) else body)
            assert 400 <= status < 500, (case, path, str(body)[:200], status, str(reply)[:300])
            assert reply["error"]["message"], (case, path)
            sent += 1
    assert sent > 500
    assert server.idle()
    for path, body in GOOD.items():
        status, reply, _ = server.post(path, {**body, "max_tokens": 4, "seed": 1})
        assert (status, said(reply)) == (200, said(before[path][1]))


def said(reply: dict[str, Any]) -> Any:
    if "choices" in reply:
        choice = reply["choices"][0]
        return choice.get("text", choice.get("message"))
    return reply["content"]
