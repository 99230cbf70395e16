"""Sampling fields of requests at the ends of their ranges and beyond, on every route (docs/spec/clients.md 0.3)."""

from collections.abc import Iterator
from typing import Any

import pytest
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.param_table import FIELDS

MESSAGES = [{"role": "user", "content": "<<ok>>"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "<<ok>>"},
    "/completion": {"prompt": "<<ok>>"},
    "/apply-template": {"messages": MESSAGES, "explain": True},
}
VOCAB = 320
NO_NUMBER = ["1", True, [1], {}]
TOO_MANY = ["x"] * 257

RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    # field: values at its ends, values outside
    "n": ([1, 16], [0, 17, -1, 1.5, *NO_NUMBER]),
    "max_tokens": ([-1, 0, 2**63 - 1], [-2, 2**63, 1.5, *NO_NUMBER]),
    "min_tokens": ([0, 1], [-1, 1.5, *NO_NUMBER]),
    "temperature": ([0, 1e-9, 1], [-0.1, 100.1, *NO_NUMBER]),
    "top_k": ([-1, 0, 1, 10**6], [-2, 1.5, *NO_NUMBER]),
    "top_p": ([0, 1], [-0.1, 1.1, *NO_NUMBER]),
    "min_p": ([0, 1], [-0.1, 1.1, *NO_NUMBER]),
    "typical_p": ([1e-6, 1], [0, 1.1, *NO_NUMBER]),
    "top_n_sigma": ([-1, 0, 1e9], [-0.5, 1e10, *NO_NUMBER]),
    "min_keep": ([0, VOCAB], [-1, VOCAB + 1, *NO_NUMBER]),
    "xtc_probability": ([0, 1], [-0.1, 1.1, *NO_NUMBER]),
    "xtc_threshold": ([0, 1], [-0.1, 1.1, *NO_NUMBER]),
    "dynatemp_range": ([0, 1], [-0.1, 1e10, *NO_NUMBER]),
    "dynatemp_exponent": ([1e-6, 1e9], [0, -1, *NO_NUMBER]),
    "mirostat": ([0, 1, 2], [-1, 3, 1.5, *NO_NUMBER]),
    "mirostat_tau": ([1e-6, 1e9], [0, -1, *NO_NUMBER]),
    "mirostat_eta": ([1e-6, 1e9], [0, -1, *NO_NUMBER]),
    "adaptive_target": ([-1, 1], [0, 1.1, *NO_NUMBER]),
    "adaptive_decay": ([0, 0.99], [-0.1, 1, *NO_NUMBER]),
    "repetition_penalty": ([1, 10], [0, 10.1, *NO_NUMBER]),
    "repeat_last_n": ([-1, 0, 2**31], [-2, 1.5, *NO_NUMBER]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1, *NO_NUMBER]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1, *NO_NUMBER]),
    "window_presence_penalty": ([-2, 2], [-2.1, 2.1, *NO_NUMBER]),
    "window_frequency_penalty": ([-2, 2], [-2.1, 2.1, *NO_NUMBER]),
    "dry_multiplier": ([0, 1], [-0.1, *NO_NUMBER]),
    "dry_base": ([1, 10], [0.9, *NO_NUMBER]),
    "dry_allowed_length": ([1, 2**31 - 1], [0, 1.5, *NO_NUMBER]),
    "dry_penalty_last_n": ([-1, 0, 2**31], [-2, *NO_NUMBER]),
    "dry_sequence_breakers": ([[], ["x" * 40]], [[""], ["x" * 41], ["x"] * 65, 5, [5]]),
    "logit_bias": ([{"1": -100}, {str(VOCAB - 1): 1}, [["a", False]]], [{"1": 101}, {str(VOCAB): 1}, [["a"]], 5]),
    "bad_words": ([["zz"], ["zz"] * 256], [TOO_MANY, [""], 5]),
    "allowed_token_ids": ([[111, 107, 257]], [[], [VOCAB], [-1], [True], ["a"], 5]),
    "stop": (["z", ["z" * 1024] * 64], ["", ["z" * 1025], ["z"] * 65, 5, [5]]),
    "stop_token_ids": ([[], [0, VOCAB - 1]], [[VOCAB], [-1], [1.5], [1] * 65, 5]),
    "include_stop_str_in_output": ([True, False], [1, "true"]),
    "ignore_eos": ([False], [1, "true"]),
    "seed": ([-1, 0, 2**63 - 1], [-2, 2**63, 1.5, "1", True]),
    "logprobs": ([0, 20], [21, -1, -2, 1.5, "1"]),
    "prompt_logprobs": ([0, 20], [21, -1, VOCAB, -2, 1.5, *NO_NUMBER]),
    "logprobs_mode": (["raw", "processed", "raw_logprobs", "processed_logprobs"], ["cooked", 1]),
    "post_sampling_probs": ([True, False], [1, "true"]),
    "skip_special_tokens": ([True, False], [1, "true"]),
    "add_special_tokens": ([True, False], [1, "true"]),
    "reasoning_format": (["none", "auto", "deepseek", "deepseek-legacy"], ["other", 1, True]),
    "t_max_predict_ms": ([0, 1e6], [-1, *NO_NUMBER]),
    "n_indent": ([0, 2**31 - 1], [-1, 1.5, *NO_NUMBER]),
    "loop_detection": (
        [{}, {"min_pattern": 64, "max_pattern": 64, "min_count": 1000}],
        [5, {"max_pattern": 65}, {"min_count": 1001}, {"min_pattern": 3, "max_pattern": 2}, {"other": 1}],
    ),
    "truncate_prompt_tokens": ([-1, 200], [0, -2, 1.5, *NO_NUMBER]),
    "samplers": ([[], ["penalties", "dry", "top_k"]], [["top_k", "penalties"], ["nobody"], 5]),
    "logits_processors": ([[]], [[{"name": "nobody"}], [{}], 5, [{"name": "a", "other": 1}]]),
}
APART = {"truncate_prompt_tokens", "logits_processors", "n", "add_special_tokens"}
"""Fields whose effective value is not what was given, or is no value of one row."""

LISTS = {
    "allowed_token_ids",
    "stop",
    "bad_words",
    "dry_sequence_breakers",
    "logit_bias",
    "loop_detection",
    "logprobs_mode",
    "seed",
    "top_k",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), max_num_seqs=4) as made:
        yield made


def routes(server: ScriptServer) -> list[str]:
    there = {getattr(route, "path", "") for route in server.app.routes}
    return [path for path in ROUTES if path in there]


def test_the_table_has_every_field() -> None:
    assert set(RANGES) == {field.name for field in FIELDS}


@pytest.mark.parametrize("field", RANGES)
def test_a_field_is_taken_at_the_ends_of_its_range_and_applied_as_given(server: ScriptServer, field: str) -> None:
    for value in RANGES[field][0]:
        for path in routes(server):
            status, reply, _ = server.post(path, {**ROUTES[path], field: value})
            assert status == 200, (path, value, reply)
        told = server.ok("/apply-template", {**ROUTES["/apply-template"], field: value})["sampling"]
        assert told["origin"][field] == "request"
        if field not in APART | LISTS:
            assert told[field] == value


@pytest.mark.parametrize("field", RANGES)
def test_h_m7_a_value_outside_is_refused_alike_on_all_routes(server: ScriptServer, field: str) -> None:
    """H-M7: 400, the name of the field, and the same words everywhere."""
    for value in RANGES[field][1]:
        words = set()
        for path in routes(server):
            status, reply, _ = server.post(path, {**ROUTES[path], field: value})
            assert status == 400, (path, value, reply)
            error = reply["error"]
            assert error["param"].split("[")[0].split(".")[0] == field
            words.add(error["message"].rpartition("; this is ")[0])
        assert len(words) == 1


@pytest.mark.parametrize("field", [field for field in FIELDS if field.other])
def test_other_names_mean_the_same_and_are_the_ones_in_errors(server: ScriptServer, field: Any) -> None:
    value, bad = RANGES[field.name][0][-1], RANGES[field.name][1][0]
    for name in field.other:
        told = server.ok("/apply-template", {**ROUTES["/apply-template"], name: value})["sampling"]
        ours = server.ok("/apply-template", {**ROUTES["/apply-template"], field.name: value})["sampling"]
        told.pop("seed"), ours.pop("seed")
        assert told == ours
        for path in routes(server):
            status, reply, _ = server.post(path, {**ROUTES[path], name: bad})
            assert (status, reply["error"]["param"].split("[")[0]) == (400, name)


def test_h_c8_defaults_are_told_with_their_origin(server: ScriptServer) -> None:
    """H-C8, E0b: what is shown is what is applied: the file beside the weights says `do_sample: false`."""
    told = server.ok("/apply-template", {**ROUTES["/apply-template"], "top_p": 0.5})["sampling"]
    assert (told["temperature"], told["origin"]["temperature"]) == (0.0, "generation_config")
    assert (told["top_p"], told["origin"]["top_p"]) == (0.5, "request")
    assert (told["top_k"], told["min_p"], told["origin"]["top_k"]) == (40, 0.05, "default")
    assert told["seed"] >= 0
    warm = server.ok("/apply-template", {**ROUTES["/apply-template"], "temperature": 0.7})["sampling"]
    assert warm["order"] == ["top_k", "top_p", "min_p", "temperature"]


def test_special_tokens_are_not_added_to_a_chat_and_that_is_said(server: ScriptServer) -> None:
    """T14, S9: an accepted value that cannot act is a warning."""
    asked = {**ROUTES["/v1/chat/completions"], "add_special_tokens": True}
    reply = server.ok("/v1/chat/completions", asked)
    assert any("add_special_tokens" in warning for warning in reply["warnings"])
    assert "warnings" not in server.ok("/v1/completions", {"prompt": "<<a>>", "add_special_tokens": True})


@pytest.mark.parametrize("ping", [5e-324, 1e-9, 0.0099])
def test_h_p12_a_stream_is_not_kept_alive_at_the_cost_of_others(server: ScriptServer, ping: float) -> None:
    """3.3: a time between two comments that nobody could wait is refused; off is off."""
    for path in routes(server):
        if path == "/apply-template":
            continue
        status, reply, _ = server.post(path, {**ROUTES[path], "stream": True, "sse_ping_interval": ping})
        assert (status, reply["error"]["param"]) == (400, "sse_ping_interval")
        for least in (0.01, 0, -1):
            server.ok(path, {**ROUTES[path], "sse_ping_interval": least})
