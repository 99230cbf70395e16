"""Sampling fields under the names of other programs' APIs (docs/spec/clients.md 0.3, 3.4, spec S8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.core.param_table import FIELDS, RULES
from mlxcel.core.params import STAGE_NAMES, SamplingParams
from mlxcel.core.request_names import OUR_NAME, REFUSED, canonical
from mlxcel.errors import RequestError, UnsupportedField

SAMPLES: dict[str, tuple[Any, Any]] = {
    "n": (2, 3),
    "max_tokens": (5, 6),
    "repetition_penalty": (1.5, 2),
    "repeat_last_n": (3, 0),
    "stop": (["a"], "b"),
    "logprobs": (2, 3),
}
PAIRS = [(field.name, other) for field in FIELDS for other in field.other]


def test_no_name_means_two_things() -> None:
    names = [name for field in FIELDS for name in (field.name, *field.other)]
    assert len(set(names)) == len(names)
    assert not set(names) & set(REFUSED)
    assert set(OUR_NAME.values()) == set(RULES)


@pytest.mark.parametrize(("field", "other"), PAIRS)
def test_every_name_reaches_its_field(field: str, other: str) -> None:
    """docs/spec/clients.md 1.10, test 14: all spellings reach the same value."""
    first, second = SAMPLES[field]
    assert canonical({other: first}) == canonical({field: first}) == {field: RULES[field](field, first)}
    assert canonical({field: first, other: first}) == canonical({field: first})
    assert canonical({field: None, other: second}) == canonical({other: second})
    assert canonical({other: None}) == {}
    SamplingParams(**canonical({other: first}))


@pytest.mark.parametrize(("field", "other"), PAIRS)
def test_two_names_with_different_values_are_refused(field: str, other: str) -> None:
    """Spec S8."""
    first, second = SAMPLES[field]
    for request in ({field: first, other: second}, {other: second, field: first}):
        with pytest.raises(RequestError, match="are one field, and their values differ") as caught:
            canonical(request)
        assert field in str(caught.value)
        assert other in str(caught.value)


def test_values_are_compared_as_they_are_read() -> None:
    assert canonical({"repetition_penalty": 2, "repeat_penalty": 2.0}) == {"repetition_penalty": 2.0}
    assert canonical({"stop": "x", "stop_sequences": ["x", "x"]}) == {"stop": ("x",)}


@pytest.mark.parametrize(("field", "other"), PAIRS)
def test_h_m7_an_error_names_the_field_as_the_request_does(field: str, other: str) -> None:
    with pytest.raises(RequestError, match=f"^{other}") as caught:
        canonical({other: {"no": "value"}})
    assert caught.value.field == other


def test_h_o9_null_is_not_given() -> None:
    """docs/spec/clients.md 0.3."""
    assert canonical(dict.fromkeys([*OUR_NAME, *REFUSED])) == {}


def test_fields_of_the_route_are_the_routes() -> None:
    assert canonical({"model": "m", "messages": [], "stream": True, "top_k": 3}) == {"top_k": 3}


@pytest.mark.parametrize(
    ("request_", "logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": None}, None),
        ({"top_logprobs": 5}, 5),
        ({"logprobs": 5, "top_logprobs": 5}, 5),
        ({"n_probs": 0}, None),
        ({"n_probs": 3}, 3),
        ({"logprobs": 0}, 0),
    ],
)
def test_log_probabilities_by_a_switch_and_a_count(request_: dict[str, Any], logprobs: int | None) -> None:
    """docs/spec/clients.md 3.3: the chat route has a boolean with `top_logprobs`; llama-server's 0 is off."""
    assert canonical(request_).get("logprobs") == logprobs


@pytest.mark.parametrize(
    "request_", [{"logprobs": False, "top_logprobs": 5}, {"logprobs": 3, "top_logprobs": 5}, {"top_logprobs": True}]
)
def test_counts_that_contradict_the_switch_are_refused(request_: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="logprobs"):
        canonical(request_)


@pytest.mark.parametrize("count", [False, True, 0.0, "0", []])
@pytest.mark.parametrize("switch", [{}, {"logprobs": True}, {"logprobs": False}], ids=str)
def test_h_m7_a_count_of_another_type_is_refused_whatever_the_switch(switch: dict[str, Any], count: Any) -> None:
    with pytest.raises(RequestError, match="top_logprobs must be an integer"):
        canonical({**switch, "top_logprobs": count})


@pytest.mark.parametrize("field", RULES)
def test_h_m7_an_array_is_refused_by_the_name_of_its_field(field: str) -> None:
    """Not by whatever a comparison with an array raises."""
    for array in (np.array([1, 2]), np.zeros((2, 2)), np.array(["raw", "auto"])):
        with pytest.raises(RequestError, match=field):
            canonical({field: array})


def test_probabilities_after_the_chain_are_not_raw() -> None:
    """Spec S8, S37."""
    assert canonical({"post_sampling_probs": True, "logprobs_mode": "processed"})["post_sampling_probs"] is True
    assert canonical({"post_sampling_probs": False, "logprobs_mode": "raw"})["logprobs_mode"] == "raw"
    with pytest.raises(RequestError, match="post_sampling_probs"):
        canonical({"post_sampling_probs": True, "logprobs_mode": "raw"})


ASKS: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "best_of": 3,
    "grammar": "root ::= x",
    "penalize_nl": False,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_name_with_the_reason(name: str) -> None:
    """docs/spec/clients.md 0, rule 2, and spec S9: structured output before its time, and fields of other programs."""
    with pytest.raises(UnsupportedField, match=f"^{name} is not supported: ") as caught:
        canonical({name: ASKS.get(name, {"a": 1})})
    assert caught.value.field == name
    for idle in REFUSED[name][1]:
        assert canonical({name: idle}) == {}


def test_a_value_that_asks_for_nothing_is_compared_with_its_type() -> None:
    assert canonical({"n": 3, "best_of": 3}) == {"n": 3}
    for request in ({"n": 3, "best_of": 1}, {"best_of": 2}, {"best_of": True}, {"use_beam_search": 0}):
        with pytest.raises(UnsupportedField):
            canonical(request)


def test_the_first_error_of_a_request_is_the_one_that_is_told() -> None:
    """docs/spec/clients.md 3.4."""
    for request, field in (
        ({"top_p": 3, "grammar": "x", "top_k": -5}, "top_p"),
        ({"grammar": "x", "top_p": 3}, "grammar"),
        ({"n_predict": 3, "max_tokens": 4, "top_p": 3}, "max_tokens"),
    ):
        with pytest.raises(RequestError) as caught:
            canonical(request)
        assert caught.value.field == field


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, -1, 0, 1])
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from([*STAGE_NAMES, "raw", "auto", "\ud800", "", "false"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from([*OUR_NAME, *REFUSED, "foo"]), JSON, max_size=4))
def test_any_json_is_read_or_refused(request_: dict[str, Any]) -> None:
    """H-P12: whatever is sent is a RequestError of bounded length, or reads the same again."""
    try:
        values = canonical(request_)
        params = SamplingParams(**values)
    except RequestError as error:
        refused = str(error)
        assert len(refused) < 400
        return
    assert canonical(values) == values
    assert params.clone() == params
    assert set(values) <= set(RULES)
