"""Where values come from when they are not given, and which of them cannot act (docs/spec/clients.md 0.1, S6 to S9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import parameter_tables
import pytest

from mlxcel.core.acting_order import acting_order
from mlxcel.core.param_table import CLIENT_DEFAULTS, CLIENTS, FIELDS, RULES
from mlxcel.core.params import LoopDetection, SamplingParams
from mlxcel.core.resolve_sampling import Resolved, resolve_sampling
from mlxcel.errors import RequestError


def seeds() -> Callable[[], int]:
    counter = itertools.count(1000)
    return lambda: next(counter)


def resolved(client: str = "cli", *layers: tuple[str, dict[str, Any]], **given: Any) -> Resolved:
    """`given` are flags."""
    return resolve_sampling(client, *layers, ("flag", given), fresh_seed=seeds())


# --- the tables of the specifications

NEWLINE_AND_SIGNS = ("\n", ":", '"', "*")


@pytest.mark.parametrize("client", CLIENTS)
def test_defaults_are_those_of_the_clients_page(client: str) -> None:
    """docs/spec/clients.md 0.3; spec D2 to D9."""
    told = parameter_tables.defaults()
    assert set(told) == set(RULES) - {"post_sampling_probs"}
    values = {**attrs.asdict(SamplingParams(), recurse=False), **CLIENT_DEFAULTS[client]}
    for field, by_client in told.items():
        if field == "dry_sequence_breakers":
            assert (by_client[client], values[field]) == ("newline", NEWLINE_AND_SIGNS)
        elif field in ("skip_special_tokens", "add_special_tokens"):
            assert values[field] is (True if field == "skip_special_tokens" else None)
        else:
            assert (values[field] or None) == (by_client[client] or None), field


def test_defaults_are_those_of_the_engine_page() -> None:
    """Spec 4.2."""
    seen = 0
    for names, told, _ in parameter_tables.lines("engine.md", "### 4.2"):
        fields = [name for name in parameter_tables.quoted(names) if name in RULES]
        for place, field in enumerate(fields):
            parts = told.split(" · ")
            words = parts[place] if len(parts) == len(fields) else parts[0]
            numbers = [parameter_tables.value(word) for word in words.split(" / ")]
            if field == "dry_sequence_breakers":
                continue
            for client, number in zip(CLIENTS, numbers * (3 // len(numbers)), strict=True):
                value = CLIENT_DEFAULTS[client].get(field, getattr(SamplingParams(), field))
                assert (value or None) == (number or None), (field, client)
                seen += 1
    assert seen > 90


def test_the_names_of_requests_are_those_of_the_clients_page() -> None:
    """The other names of a line are those of its first field."""
    ours = {field.name: field.other for field in FIELDS}
    for row in parameter_tables.field_rows():
        if row.fields[0] not in ("logit_bias", "logprobs_mode"):  # shapes and values, not names
            assert set(row.other) == set(ours[row.fields[0]]), row.fields


# --- layers


def test_each_value_says_where_it_came_from() -> None:
    """docs/spec/clients.md 0.1, spec S6, S7: request > flag > generation_config > default, field by field."""
    said = resolve_sampling(
        "srv",
        ("generation_config", {"temperature": 0.6, "top_p": 0.9, "top_k": None}),
        ("flag", {"top_p": 0.5, "min_p": 0.1, "stop": None}),
        ("request", {"min_p": 0.2, "temperature": None}),
        fresh_seed=seeds(),
    )
    fields = ("temperature", "top_p", "top_k", "min_p", "stop")
    assert [getattr(said.params, field) for field in fields] == [0.6, 0.5, 40, 0.2, ()]
    assert [said.origin[field] for field in fields] == ["generation_config", "flag", "default", "request", "default"]
    assert set(said.origin) == set(RULES)


def test_zero_and_false_are_given() -> None:
    said = resolve_sampling(
        "srv",
        ("flag", {"top_k": 5, "ignore_eos": True, "temperature": 1, "stop": ["x"]}),
        ("request", {"top_k": 0, "ignore_eos": False, "temperature": 0, "stop": []}),
        fresh_seed=seeds(),
    )
    assert (said.params.top_k, said.params.ignore_eos, said.params.temperature, said.params.stop) == (0, False, 0, ())


@pytest.mark.parametrize(
    ("client", "values"), [("lib", (1, 0, 1, 0)), ("cli", (0, 0, 1, 0)), ("srv", (0.8, 40, 0.95, 0.05))]
)
def test_clients_differ_where_the_table_says_so(client: str, values: tuple[float, ...]) -> None:
    """Spec D2."""
    params = resolved(client).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == values
    assert params.clone(temperature=1, top_k=0, top_p=1, min_p=0, seed=-1) == SamplingParams()


def test_every_default_of_the_server_can_be_asked_for_by_every_client() -> None:
    """Spec D3."""
    asked = resolved("cli", **CLIENT_DEFAULTS["srv"]).params
    assert asked == resolved("srv").params


def test_h_f5_a_fresh_seed_is_drawn_once_and_reported() -> None:
    """Spec S7, D10."""
    draw = seeds()

    def seed(**given: Any) -> int:
        return resolve_sampling("lib", ("request", given), fresh_seed=draw).params.seed

    assert [seed(), seed(seed=-1), seed(seed=None), seed(seed=7), seed(seed=0)] == [1000, 1001, 1002, 7, 0]
    assert [seed(seed=2**31), seed(seed=2**63 - 1)] == [2**31, 2**63 - 1]
    with pytest.raises(RequestError, match="seed must be an integer from 0 to 2"):
        seed(seed=2**63)
    assert draw() == 1003


def test_a_bad_value_names_its_field_whatever_its_layer() -> None:
    for origin in ("generation_config", "flag", "request"):
        with pytest.raises(RequestError, match="top_p"):
            resolve_sampling("cli", (origin, {"top_p": 3}), fresh_seed=seeds())


def test_an_unknown_field_is_refused_whatever_its_layer() -> None:
    with pytest.raises(TypeError, match="p_less"):
        resolved(p_less=True)


# --- what cannot act

GREEDY = "the reply is greedy"
MIROSTAT = "mirostat takes the place of the filters"
IDLE = [
    ({"top_p": 0.5, "seed": 3}, {"top_p": GREEDY, "seed": GREEDY}),
    ({"top_k": 5, "min_p": 0.1, "typical_p": 0.5}, {"top_k": GREEDY, "min_p": GREEDY, "typical_p": GREEDY}),
    ({"top_n_sigma": 1.0, "xtc_probability": 0.5}, {"top_n_sigma": GREEDY, "xtc_probability": GREEDY}),
    ({"adaptive_target": 0.3, "min_keep": 3}, {"adaptive_target": GREEDY, "min_keep": GREEDY}),
    ({"top_k": 1, "temperature": 0.7}, {"temperature": GREEDY}),
    ({"top_k": 1, "temperature": 0.7, "dynatemp_range": 0.2}, {"temperature": GREEDY, "dynatemp_range": GREEDY}),
    ({"top_k": 1, "temperature": 0}, {}),
    ({"top_k": 1}, {}),
    ({"top_p": 1, "top_k": 0, "min_p": 0, "seed": -1, "top_n_sigma": 0}, {}),
    ({"top_p": 0.5, "temperature": 1}, {}),
    ({"temperature": 0, "dynatemp_range": 1, "top_p": 0.5, "seed": 1}, {}),
    ({"repetition_penalty": 1.5, "dry_multiplier": 1}, {}),
    ({"mirostat": 2, "temperature": 1, "top_k": 5, "top_p": 0.5}, {"top_k": MIROSTAT, "top_p": MIROSTAT}),
    (
        {"mirostat": 1, "temperature": 1, "min_keep": 2, "xtc_probability": 0.1},
        {"xtc_probability": MIROSTAT, "min_keep": MIROSTAT},
    ),
    (
        {"mirostat": 1, "temperature": 1, "adaptive_target": 0.1, "top_k": 1},
        {"top_k": MIROSTAT, "adaptive_target": MIROSTAT},
    ),
    (
        {"mirostat": 2, "mirostat_tau": 3, "seed": 1},
        dict.fromkeys(("mirostat", "mirostat_tau", "seed"), "at temperature 0 mirostat takes the best token"),
    ),
    ({"mirostat_tau": 3, "mirostat_eta": 0.2}, dict.fromkeys(("mirostat_tau", "mirostat_eta"), "mirostat is off")),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2, "temperature": 1}, {}),
    (
        {"xtc_probability": 0.5, "xtc_threshold": 0.51, "temperature": 1},
        dict.fromkeys(("xtc_probability", "xtc_threshold"), "above an xtc_threshold of 0.5 no two tokens qualify"),
    ),
    ({"xtc_threshold": 0.2}, {"xtc_threshold": "xtc_probability is 0"}),
    ({"dynatemp_exponent": 2}, {"dynatemp_exponent": "dynatemp_range is 0"}),
    ({"adaptive_decay": 0.5}, {"adaptive_decay": "adaptive_target is off"}),
    ({"repeat_last_n": 5}, {"repeat_last_n": "no penalty that looks at a window acts"}),
    ({"repeat_last_n": 5, "window_presence_penalty": 1}, {}),
    ({"repeat_last_n": 5, "presence_penalty": 1}, {"repeat_last_n": "no penalty that looks at a window acts"}),
    ({"repeat_last_n": 0, "repetition_penalty": 1.5}, {"repetition_penalty": "repeat_last_n is 0"}),
    (
        {"dry_base": 2, "dry_sequence_breakers": []},
        dict.fromkeys(("dry_base", "dry_sequence_breakers"), "dry_multiplier is 0"),
    ),
    ({"dry_multiplier": 1, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": -1}, {}),
    ({"dry_multiplier": 1, "dry_penalty_last_n": 0}, {"dry_multiplier": "dry_penalty_last_n is 0"}),
    ({"min_keep": 2, "temperature": 1, "top_k": 3}, {"min_keep": "no filter that it holds back acts"}),
    ({"min_keep": 2, "temperature": 1, "top_p": 0.3}, {}),
    ({"logprobs_mode": "processed"}, {"logprobs_mode": "no log-probabilities of the reply are asked for"}),
    ({"logprobs_mode": "processed", "logprobs": 0}, {}),
    ({"post_sampling_probs": True}, {"post_sampling_probs": "no log-probabilities of the reply are asked for"}),
    (
        {"dry_multiplier": 1, "dry_penalty_last_n": 0, "dry_base": 2},
        {"dry_multiplier": "dry_penalty_last_n is 0", "dry_base": "DRY does not act"},
    ),
    (
        {"dry_multiplier": 1, "dry_penalty_last_n": 5, "samplers": []},
        {"dry_multiplier": "samplers leaves out dry", "dry_penalty_last_n": "DRY does not act"},
    ),
    (
        {"xtc_probability": 0.5, "xtc_threshold": 0.3},
        {"xtc_probability": GREEDY, "xtc_threshold": "XTC does not act"},
    ),
    (
        {"temperature": 1, "adaptive_target": 0.5, "adaptive_decay": 0.1, "samplers": ["top_k"]},
        {"adaptive_target": "samplers leaves out adaptive_p", "adaptive_decay": "adaptive-p does not act"},
    ),
    (
        {"top_k": 1, "dynatemp_range": 0.5, "dynatemp_exponent": 2},
        {"dynatemp_range": GREEDY, "dynatemp_exponent": "the temperature does not act"},
    ),
    (
        {"temperature": 1, "min_keep": 2, "top_p": 0.5, "samplers": ["top_k"]},
        {"min_keep": "no filter that it holds back acts", "top_p": "samplers leaves out top_p"},
    ),
    (
        {"repetition_penalty": 2, "repeat_last_n": 5, "samplers": []},
        {
            "repetition_penalty": "samplers leaves out penalties",
            "repeat_last_n": "no penalty that looks at a window acts",
        },
    ),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": "there is no stop string"}),
    ({"include_stop_str_in_output": True, "stop": ["x"]}, {}),
    ({"samplers": ["temperature"], "temperature": 1, "top_k": 5}, {"top_k": "samplers leaves out top_k"}),
    ({"samplers": ["top_k"], "temperature": 0.5, "top_k": 5}, {"temperature": "samplers leaves out temperature"}),
    ({"samplers": [], "top_k": 1, "temperature": 1}, {}),
    ({"samplers": [], "temperature": 0, "dry_multiplier": 1}, {"dry_multiplier": "samplers leaves out dry"}),
    (
        {"samplers": ["top_k"], "temperature": 1, "presence_penalty": 1},
        {"presence_penalty": "samplers leaves out penalties"},
    ),
    ({"loop_detection": LoopDetection(max_pattern=0), "ignore_eos": True, "stop": ["x"], "min_tokens": 2}, {}),
]


@pytest.mark.parametrize(("given", "told"), IDLE, ids=str)
def test_values_that_cannot_act_are_said(given: dict[str, Any], told: dict[str, str]) -> None:
    """Spec S9, S32."""
    order = [field.name for field in FIELDS]
    lines = [f"{field} has no effect: {told[field]}" for field in sorted(told, key=order.index)]
    assert list(resolved("cli", **given).warnings) == lines


@pytest.mark.parametrize(("given", "told"), IDLE, ids=str)
def test_strict_refuses_what_would_be_said(given: dict[str, Any], told: dict[str, str]) -> None:
    """Spec S9."""

    def strict() -> Resolved:
        return resolve_sampling("cli", ("flag", given), strict=True, fresh_seed=seeds())

    if not told:
        assert strict().warnings == ()
        return
    with pytest.raises(RequestError, match="has no effect") as caught:
        strict()
    assert caught.value.field in told
    assert caught.value.hint


def test_only_what_somebody_asked_for_is_said() -> None:
    """A server's defaults and the model's own file are no one's request."""
    said = resolve_sampling(
        "srv", ("generation_config", {"top_p": 0.5}), ("request", {"temperature": 0}), fresh_seed=seeds(), strict=True
    )
    assert said.warnings == ()
    assert resolved("srv", temperature=0, top_k=40).warnings == ("top_k has no effect: the reply is greedy",)


# --- the order that is reported


@pytest.mark.parametrize(
    ("client", "given", "order"),
    [
        ("cli", {}, ()),
        ("lib", {}, ()),
        ("lib", {"temperature": 0.5}, ("temperature",)),
        ("lib", {"dynatemp_range": 0.5}, ("temperature",)),
        ("srv", {}, ("top_k", "top_p", "min_p", "temperature")),
        ("srv", {"temperature": 0, "repetition_penalty": 2}, ("penalties",)),
        ("srv", {"repetition_penalty": 2, "repeat_last_n": 0}, ("top_k", "top_p", "min_p", "temperature")),
        ("srv", {"mirostat": 2, "dry_multiplier": 1}, ("dry", "temperature", "mirostat")),
        ("srv", {"samplers": ["temperature", "top_p", "min_p"]}, ("temperature", "top_p", "min_p")),
        ("lib", {"xtc_probability": 1, "xtc_threshold": 0.6}, ()),
        (
            "lib",
            {
                "temperature": 2,
                "presence_penalty": 1,
                "dry_multiplier": 1,
                "top_n_sigma": 1,
                "top_k": 5,
                "typical_p": 0.5,
                "top_p": 0.5,
                "min_p": 0.1,
                "xtc_probability": 0.5,
                "adaptive_target": 0.5,
            },
            ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"),
        ),
    ],
)
def test_h_e12_the_order_that_ran_is_reported(client: str, given: dict[str, Any], order: tuple[str, ...]) -> None:
    """Spec S1, S32: what is left out, off, or inert under mirostat is not in it."""
    assert acting_order(resolved(client, **given).params) == order
