"""Sampling parameters: one table of ranges, one function that fills in what was not said."""

import itertools
import math

import pytest

from mlxcel.core.params import RULES, SamplingParams
from mlxcel.core.request import resolve_sampling
from mlxcel.errors import RequestError

GOOD = {
    "max_tokens": [-1, 0, 1, 2**40, 2**63 - 1],
    "temperature": [0, 0.0, 1e-9, 1e-5, 0.7, 1, 100, 100.0],
    "top_k": [-1, 0, 1, 40, 10**6],
    "top_p": [0, 0.5, 1, 1.0],
    "min_p": [0, 0.05, 1.0],
    "seed": [-1, 0, 42, 2**31, 2**63 - 1],
    "stop_token_ids": [[], [0], (1, 2, 2), list(range(64))],
    "logprobs": [None, 0, 1, 20],
    "skip_special_tokens": [True, False],
}
NO_NUMBER = [None, "1", "0.7", True, False, [], {}, math.nan, math.inf, -math.inf, 1j]
BAD = {
    "max_tokens": [-2, 1.5, 2**63, *NO_NUMBER],
    "temperature": [-1, -1e-9, 100.1, 10**400, 10**9999, *NO_NUMBER],
    "top_k": [-2, 1.5, 10**9999, *NO_NUMBER],
    "top_p": [-0.1, 1.1, 2, *NO_NUMBER],
    "min_p": [-0.1, 1.1, *NO_NUMBER],
    "seed": [-2, 2**63, 2**64, 0.5, *NO_NUMBER],
    "stop_token_ids": [[-1], [1.0], [True], ["1"], "12", 5, None, {1: 2}, list(range(65)), [2**31]],
    "logprobs": [-1, 21, 1.0, True, "5"],
    "skip_special_tokens": [0, 1, "true", None],
}


def cases(table):
    return [(field, value) for field, values in table.items() for value in values]


def test_every_field_has_good_and_bad_values_here():
    assert set(GOOD) == set(BAD) == set(RULES) == set(SamplingParams.__slots__) - {"__weakref__"}


@pytest.mark.parametrize(("field", "value"), cases(GOOD))
def test_values_in_range_are_taken(field, value):
    taken = getattr(SamplingParams(**{field: value}), field)
    if field == "stop_token_ids":
        assert taken == tuple(sorted(set(value)))
    else:
        assert taken == value
        assert type(taken) is type(RULES[field](field, value))


@pytest.mark.parametrize(("field", "value"), cases(BAD), ids=lambda value: str(type(value).__name__))
def test_h_m7_values_out_of_range_are_refused_by_name(field, value):
    """Spec S46: strict types, finite numbers; the error names the field and shows the value."""
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 250
    with pytest.raises(RequestError):
        SamplingParams().clone(**{field: value})


def test_an_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="p_less"):
        SamplingParams(p_less=1)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 9.9e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1, "temperature": 1}, True),
        ({"top_k": 2}, False),
        ({}, False),
    ],
)
def test_h_m1_greedy_is_below_a_stated_temperature(params, greedy):
    """Spec S23."""
    assert SamplingParams(**params).greedy is greedy


def seeds():
    counter = itertools.count(1000)
    return lambda: next(counter)


def test_each_value_says_where_it_came_from():
    """docs/spec/clients.md 0.1, spec S6, S7."""
    said = resolve_sampling(
        "cli", {"top_p": 0.5, "top_k": None}, generation_config={"temperature": 0.6, "top_p": 0.9}, fresh_seed=seeds()
    )
    assert (said.params.temperature, said.params.top_p, said.params.top_k) == (0.6, 0.5, 0)
    origin = {name: said.origin[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    assert origin == {
        "temperature": "generation_config",
        "top_p": "flag",
        "top_k": "default",
        "min_p": "default",
    }


@pytest.mark.parametrize(("client", "temperature"), [("lib", 1.0), ("cli", 0.0)])
def test_clients_differ_where_the_table_says_so(client, temperature):
    """Spec D2."""
    assert resolve_sampling(client, {}, fresh_seed=seeds()).params.temperature == temperature


def test_h_f5_a_fresh_seed_is_drawn_once_and_reported():
    draw = seeds()
    assert resolve_sampling("lib", {}, fresh_seed=draw).params.seed == 1000
    assert resolve_sampling("lib", {"seed": -1}, fresh_seed=draw).params.seed == 1001
    assert resolve_sampling("lib", {"seed": 7}, fresh_seed=draw).params.seed == 7
    assert draw() == 1002


def test_values_that_cannot_act_are_said():
    """Spec S9."""
    said = resolve_sampling("cli", {"top_p": 0.5, "seed": 3}, fresh_seed=seeds())
    assert said.warnings == ("top_p has no effect: the reply is greedy", "seed has no effect: the reply is greedy")
    assert resolve_sampling("cli", {"top_p": 0.5, "temperature": 1}, fresh_seed=seeds()).warnings == ()
    assert resolve_sampling("cli", {"top_k": 1, "temperature": 1}, fresh_seed=seeds()).warnings == ()


def test_a_bad_value_names_its_field_whatever_its_layer():
    with pytest.raises(RequestError, match="top_p"):
        resolve_sampling("cli", {}, generation_config={"top_p": 3}, fresh_seed=seeds())
