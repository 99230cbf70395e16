"""Bodies whose depth or names are out of all proportion: a bound, and a price that they do not choose
(docs/spec/clients.md 3.4, 3.5)."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from test_server_bodies import reading, refusal

from mlxcel.errors import RequestError
from mlxcel.server.bodies import MOST_TEXT
from mlxcel.server.fields import Chat, Completion
from mlxcel.server.json_in import MOST_DEPTH, MOST_NAME, parse_json

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = {"user": "x" * (MOST_TEXT - 1), "metadata": "y"}
"""Fields that make a body long enough to be searched for long strings."""

FACTOR = 8
"""Memory over the size of a body: its text, its strings, and their paths one at a time."""


def lists(depth: int, inner: str) -> str:
    return "[" * depth + inner + "]" * depth


def objects(depth: int, inner: str, name: str = "a") -> str:
    return f'{{"{name}":' * depth + inner + "}" * depth


@pytest.mark.parametrize("nested", [lists, objects])
@pytest.mark.parametrize("inner", ["1", "1e999", '"\\ud800"'])
def test_depth_has_a_bound_whichever_reader_reads(nested: Any, inner: str) -> None:
    """3.5: one level more than the bound is refused, whatever is inside; the bound is not."""
    deep = nested(MOST_DEPTH, inner).encode()
    for body in (b"[" + deep + b"]", nested(MOST_DEPTH + 1, inner).encode()):
        with pytest.raises(RequestError, match=f"more than {MOST_DEPTH} lists and objects"):
            parse_json(body)
    if "ud800" in inner:
        with pytest.raises(RequestError, match="half a"):
            parse_json(deep)
    else:
        found, depth = parse_json(deep), 0
        while isinstance(found, list | dict):
            found, depth = found["a"] if isinstance(found, dict) else found[0], depth + 1
        assert depth == MOST_DEPTH


def test_many_lists_beside_each_other_are_not_deep() -> None:
    assert parse_json(json.dumps([[1]] * 10_000).encode()) == [[1]] * 10_000
    assert parse_json(b'"' + b"[" * 1000 + b'"') == "[" * 1000


@pytest.mark.parametrize("depth", [MOST_DEPTH - 1, MOST_DEPTH, 300, 900, 955, 1000, 100_000])
@pytest.mark.parametrize("name", ["metadata", "foo", "logit_bias", "stop", "messages", "chat_template_kwargs"])
def test_h_p12_no_depth_is_a_fault_of_ours(depth: int, name: str) -> None:
    """H-P12: in long bodies too, which are read once more."""
    body = json.dumps({**LONG, "messages": MESSAGES, "temperature": 0})
    for nested in (lists, objects):
        sent = f'{body[:-1]},"{name}":{nested(depth, "1")}}}'.encode()
        client, _ = reading(Chat)
        status = client.post("/read", content=sent, headers={"Content-Type": "application/json"}).status_code
        assert status in ((200, 400) if depth < MOST_DEPTH else (400,)), (status, nested)


@pytest.mark.parametrize("inner", ["1", '"\\ud800"', f'"{"z" * (MOST_TEXT + 1)}"'])
def test_h_p3_long_names_inside_one_another_cost_no_more_than_the_body(inner: str) -> None:
    """H-P3: paths of nested names are not the sum of all that is above them."""
    name = "k" * (MOST_TEXT - 1)
    body = f'{{"prompt":"a","foo":{objects(MOST_DEPTH - 1, inner, name)}}}'.encode()
    client, _ = reading(Completion)
    tracemalloc.start()
    try:
        reply = client.post("/read", content=body, headers={"Content-Type": "application/json"})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply.status_code == (200 if inner == "1" else 400)
    assert most < FACTOR * len(body)
    assert len(reply.content) < 4 * MOST_DEPTH * MOST_NAME


def test_the_path_of_a_long_name_is_its_beginning() -> None:
    name = "k" * (MOST_NAME + 1)
    status, error = refusal(Completion, f'{{"prompt":"a","foo":{{"{name}":"\\ud800"}}}}'.encode())
    assert (status, error["param"]) == (400, f'foo["{name[: MOST_NAME - 3]}..."]')


@pytest.mark.parametrize("given", ["a\n", "\na", "a\r\n", "a b", "", "x" * 129, "é"])
def test_a_request_id_is_of_its_characters_to_the_end(given: str) -> None:
    """3.9: a line end behind it would stand in ids and logs."""
    status, error = refusal(Completion, {"prompt": "a", "request_id": given})
    assert (status, error["param"]) == (400, "request_id")
    client, _ = reading(Completion)
    assert client.post("/read", json={"prompt": "a", "request_id": "A.b_-9" + "x" * 122}).status_code == 200
