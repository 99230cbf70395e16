"""Sampling parameters: one table of ranges for every client (docs/spec/clients.md 0.3, spec 4.2)."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from mlxcel.core.param_table import FIELDS, RULES
from mlxcel.core.params import LoopDetection, Processor, SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.errors import RequestError

SHARES = [0, 0.0, 0.05, 0.5, 1, 1.0, np.float32(0.25), Fraction(1, 4)]
PENALTIES = [-2, -0.5, 0, 1.5, 2]
WINDOWS = [-1, 0, 1, 64, 2**40]
COUNTS = [None, -1, 0, 1, 20, 21, 2**31 - 1]
FLAGS = [True, False]

GOOD = {
    "n": [1, 2, 16, 17, np.int64(3)],
    "max_tokens": [-1, 0, 1, 2**40, 2**63 - 1],
    "min_tokens": [0, 1, 2**40],
    "temperature": [0, 0.0, 1e-9, 1e-5, 0.7, 1, 100, 100.0, np.float32(0.5)],
    "top_k": [-1, 0, 1, 40, 10**6],
    "top_p": SHARES,
    "min_p": SHARES,
    "typical_p": [1.2e-38, 0.5, 1],
    "top_n_sigma": [-1, -1.0, 0, 0.5, 3],
    "min_keep": [0, 1, 2, 10**6],
    "xtc_probability": SHARES,
    "xtc_threshold": SHARES,
    "dynatemp_range": [0, 0.5, 100],
    "dynatemp_exponent": [0.001, 1, 10],
    "mirostat": [0, 1, 2],
    "mirostat_tau": [0.001, 5, 1e6],
    "mirostat_eta": [0.001, 0.1, 1],
    "adaptive_target": [-1, -1.0, 0.3, 1],
    "adaptive_decay": [0, 0.5, 0.99],
    "repetition_penalty": [0.1, 1, 1.3, 10],
    "repeat_last_n": WINDOWS,
    "presence_penalty": PENALTIES,
    "frequency_penalty": PENALTIES,
    "window_presence_penalty": PENALTIES,
    "window_frequency_penalty": PENALTIES,
    "dry_multiplier": [0, 0.8, 5],
    "dry_base": [1, 1.75, 4],
    "dry_allowed_length": [1, 2, 100],
    "dry_penalty_last_n": WINDOWS,
    "dry_sequence_breakers": [(), ("\n", ":"), ("x" * 40,), ("ä" * 20,)],
    "logit_bias": [(), ((5, 1.5), (6, None)), ((0, -100.0), (1, 100.0), ("a text", 2.0))],
    "bad_words": [(), ("bad",), tuple(f"w{i}" for i in range(256))],
    "allowed_token_ids": [None, (0,), (3, 5, 2**31 - 1)],
    "stop": [(), ("END",), ("a", "b"), ("x" * 1024,), tuple(f"s{i}" for i in range(64))],
    "stop_token_ids": [(), (0,), (1, 2), tuple(range(64))],
    "include_stop_str_in_output": FLAGS,
    "ignore_eos": FLAGS,
    "seed": [-1, 0, 42, 2**31, 2**63 - 1],
    "logprobs": COUNTS,
    "prompt_logprobs": COUNTS,
    "logprobs_mode": ["raw", "processed"],
    "post_sampling_probs": FLAGS,
    "skip_special_tokens": FLAGS,
    "add_special_tokens": [None, True, False],
    "reasoning_format": ["none", "deepseek", "deepseek-legacy", "auto"],
    "t_max_predict_ms": [0, 0.5, 10**9],
    "n_indent": [0, 1, 8],
    "loop_detection": [None, LoopDetection(), LoopDetection(1, 64, 1000), LoopDetection(1, 0, 0)],
    "truncate_prompt_tokens": [None, -1, 1, 4096],
    "samplers": [None, (), ("top_k", "top_p")],
    "logits_processors": [(), (Processor("a"), Processor("b", '{"x": 1}'))],
}

NUMBERS = ["1", "0.7", True, False, [], {}, math.nan, math.inf, -math.inf, 1j, Decimal(1), b"1", 10**9999]
NO_NUMBER = [None, *NUMBERS]
NO_INTEGER = [1.0, 1.5, np.float32(1), Fraction(1, 2), *NO_NUMBER]
NO_SHARE = [-0.1, -1e-9, 1.1, 2, -1, *NO_NUMBER]
NO_PENALTY = [-2.1, 2.1, 100, *NO_NUMBER]
NO_WINDOW = [-2, *NO_INTEGER]
NO_COUNT = [-2, 1.0, *NUMBERS]
NO_FLAG = [0, 1, "true", None, [], 1.0]
NO_POSITIVE = [0, 0.0, -1, 1e-50, 5e-324, *NO_NUMBER]
NO_IDS = [[-1], [1.0], [True], ["1"], "12", 5, {1: 2}, [2**31], [None], [10**9999], [[1]]]
NO_STRINGS = [[""], "", [1], [None], 5, {"a": 1}, ["\ud800"], [b"x"], [["x"]], True, None]

BAD = {
    "n": [0, -1, 1.5, "2", 2**31, *NO_INTEGER],
    "max_tokens": [-2, 2**63, *NO_INTEGER],
    "min_tokens": [-1, 2**63, *NO_INTEGER],
    "temperature": [-1, -1e-9, 100.1, 10**400, *NO_NUMBER],
    "top_k": [-2, *NO_INTEGER],
    "top_p": NO_SHARE,
    "min_p": NO_SHARE,
    "typical_p": [1.1, *NO_POSITIVE],
    "top_n_sigma": [-2, -0.5, *NO_NUMBER],
    "min_keep": [-1, *NO_INTEGER],
    "xtc_probability": NO_SHARE,
    "xtc_threshold": NO_SHARE,
    "dynatemp_range": [-0.1, *NO_NUMBER],
    "dynatemp_exponent": NO_POSITIVE,
    "mirostat": [-1, 3, *NO_INTEGER],
    "mirostat_tau": NO_POSITIVE,
    "mirostat_eta": NO_POSITIVE,
    "adaptive_target": [0, -0.5, 1.1, 1e-50, *NO_NUMBER],
    "adaptive_decay": [-0.1, 0.991, 1, *NO_NUMBER],
    "repetition_penalty": [10.1, *NO_POSITIVE],
    "repeat_last_n": NO_WINDOW,
    "presence_penalty": NO_PENALTY,
    "frequency_penalty": NO_PENALTY,
    "window_presence_penalty": NO_PENALTY,
    "window_frequency_penalty": NO_PENALTY,
    "dry_multiplier": [-0.1, *NO_NUMBER],
    "dry_base": [0.99, 0, *NO_NUMBER],
    "dry_allowed_length": [0, -1, *NO_INTEGER],
    "dry_penalty_last_n": NO_WINDOW,
    "dry_sequence_breakers": [["x" * 41], ["ä" * 21], [f"b{i}" for i in range(65)], *NO_STRINGS],
    "logit_bias": [
        *([[5]], [[5, 1, 2]], [5, 1], "5", 5, None, [[5, 101]], [[5, -100.1]], [[5, True]], [[5, None]], [[5, "1"]]),
        *([[5, math.nan]], [[-1, 1]], [[2**31, 1]], [[1.0, 1]], [[True, 1]], [["", 1]], [["\ud800", 1]]),
        *([["x" * 1025, 1]], [[None, 1]], [[5, False], [5, "x"]], [[i, 1] for i in range(1025)]),
        *({"-1": 1}, {"abc": 1}, {"5": 101}, {"5": None}, {"5.0": 1}, {" 5": 1}, {"": 1}, {"9" * 10000: 1}),
        *({10**9999: 1}, {True: 1}, {None: 1}, {"٥": 1}, {str(i): 1 for i in range(1025)}),
    ],
    "bad_words": [["x" * 1025], [f"w{i}" for i in range(257)], *NO_STRINGS],
    "allowed_token_ids": [[], *NO_IDS],
    "stop": [["x" * 1025], [f"s{i}" for i in range(65)], ["ok", ""], *NO_STRINGS],
    "stop_token_ids": [list(range(65)), None, *NO_IDS],
    "include_stop_str_in_output": NO_FLAG,
    "ignore_eos": NO_FLAG,
    "seed": [-2, 2**63, 2**64, 0.5, 1.0, *NUMBERS],
    "logprobs": NO_COUNT,
    "prompt_logprobs": NO_COUNT,
    "logprobs_mode": ["", "Raw", "logits", True, 1, None, ["raw"]],
    "post_sampling_probs": NO_FLAG,
    "skip_special_tokens": NO_FLAG,
    "add_special_tokens": [0, 1, "true", []],
    "reasoning_format": ["", "AUTO", "qwen", None, True, {}],
    "t_max_predict_ms": [-1, *NO_NUMBER],
    "n_indent": [-1, *NO_INTEGER],
    "loop_detection": [
        *({"max_pattern": 65}, {"min_count": 1001}, {"min_pattern": 5, "max_pattern": 3}, {"min_pattern": -1}),
        *({"max_pattern": True}, {"min_count": "12"}, {"min_count": 1.5}, {"size": 1}, {1: 2}, [1, 20, 12], "on", True),
    ],
    "truncate_prompt_tokens": [0, -2, 1.0, *NUMBERS],
    "samplers": [
        "top_k",
        ["top_q"],
        ["top_p", "top_k"],
        ["top_k", "top_k"],
        ["top_k"] * 11,
        [1],
        [None],
        [["top_k"]],
        5,
        {"top_k": 1},
    ],
    "logits_processors": [
        *("name", [5], [{}], [{"name": ""}], [{"name": 1}], [{"name": "a", "args": [1]}], [{"name": "a", "argz": {}}]),
        *([{"name": "a", "args": {"x": math.nan}}], [{"name": "a", "args": {"x": object()}}], [{"name": "a"}] * 17),
        *([{"name": "a", "args": {"x": "y" * 70000}}], {"name": "a"}, None),
    ],
}


def cases(table):
    return [(field, value) for field, values in table.items() for value in values]


def test_every_field_has_good_and_bad_values_here():
    assert set(GOOD) == set(BAD) == set(RULES) == set(SamplingParams.__slots__) - {"__weakref__"}


def test_the_table_has_the_order_and_the_defaults_of_the_record():
    assert [field.name for field in FIELDS] == list(SamplingParams.__slots__)[: len(FIELDS)]
    for field in FIELDS:
        default = getattr(SamplingParams(), field.name)
        assert field.rule(field.name, default) == default, field.name


@pytest.mark.parametrize(("field", "value"), cases(GOOD), ids=lambda value: str(value)[:20])
def test_values_in_range_are_taken(field, value):
    other = {"max_tokens": value} if field == "min_tokens" else {}
    params = SamplingParams(**{field: value, **other})
    taken = getattr(params, field)
    assert taken == value
    assert type(taken) is type(RULES[field](field, taken))
    assert isinstance(taken, tuple) or type(taken) in (int, float, bool, str, LoopDetection, type(None))
    assert params.clone() == params  # what was read once reads the same again
    assert hash(params) == hash(params.clone())


@pytest.mark.parametrize(("field", "value"), cases(BAD), ids=lambda value: str(type(value).__name__))
def test_h_m7_values_out_of_range_are_refused_by_name(field, value):
    """Spec S46: strict types, finite numbers; the error names the field and shows the value."""
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field)
    assert len(str(caught.value)) < 350
    with pytest.raises(RequestError):
        SamplingParams().clone(**{field: value})


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_h_i2_a_count_of_replies_is_an_integer_of_one_or_more(count):
    with pytest.raises(RequestError, match="n must be an integer of 1 or more") as caught:
        SamplingParams(n=count)
    assert caught.value.field == "n"


def test_an_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="p_less"):
        SamplingParams(p_less=1)


def test_lists_of_strings_and_ids_are_read_into_tuples():
    params = SamplingParams(stop="END", bad_words=["b", "a", "b"], stop_token_ids=[7, 2, 7], allowed_token_ids={5, 3})
    assert (params.stop, params.bad_words) == (("END",), ("b", "a"))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((2, 7), (3, 5))


def test_biases_of_one_token_add_up_and_never_wins():
    pairs = [[5, 1], [6, 2], [5, 0.5], [7, 1], [7, False], [7, 3], ["text", 1], ["text", 1]]
    assert SamplingParams(logit_bias=pairs).logit_bias == ((5, 1.5), (6, 2.0), (7, None), ("text", 2.0))
    assert SamplingParams(logit_bias={"5": 1, "6": False}).logit_bias == ((5, 1.0), (6, None))


def test_a_string_in_a_pair_is_a_text_even_if_it_is_a_number():
    """docs/spec/clients.md 0.3: keys of an object are ids, as JSON has no other keys; pairs can say what they mean."""
    assert SamplingParams(logit_bias=[["5", 1]]).logit_bias == (("5", 1.0),)
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == ((5, 1.0),)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"logit_bias": {"abc": 1}}, 'logit_bias["abc"]'),
        ({"logit_bias": {"-1": 1}}, 'logit_bias["-1"]'),
        ({"logit_bias": [[1, 1], [2, "x"]]}, "logit_bias[1]"),
        ({"stop_token_ids": [1, 2, -3]}, "stop_token_ids[2]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"loop_detection": {"min_count": 1001}}, "loop_detection.min_count"),
        ({"logits_processors": [{"name": "a", "args": 5}]}, "logits_processors[0].args"),
    ],
)
def test_h_i14_the_error_names_the_place_inside_a_field(value, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**value)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} ")


def test_parts_of_loop_detection_that_are_not_given_are_the_usual_ones():
    """Spec F16, F19."""
    assert SamplingParams(loop_detection={}).loop_detection == LoopDetection(1, 20, 12)
    assert SamplingParams(loop_detection={"min_count": 3, "min_pattern": None}).loop_detection == LoopDetection(
        1, 20, 3
    )
    assert SamplingParams(loop_detection={"min_pattern": 0}).loop_detection == LoopDetection(1, 20, 12)
    off = SamplingParams(loop_detection={"max_pattern": 0}).loop_detection
    assert (off, off.on) == (LoopDetection(1, 0, 12), False)
    assert not LoopDetection(min_count=1).on
    assert LoopDetection().on


def test_processors_carry_their_arguments_as_json():
    taken = SamplingParams(logits_processors=[{"name": "a", "args": {"y": 1, "x": [2]}}, {"name": "b"}])
    assert taken.logits_processors == (Processor("a", '{"x": [2], "y": 1}'), Processor("b", "{}"))


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 9.9e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1, "temperature": 1}, True),
        ({"top_k": 1, "temperature": 1, "dynatemp_range": 1}, True),
        ({"temperature": 0, "dynatemp_range": 0.5}, False),
        ({"temperature": 0, "mirostat": 2}, False),
        ({"top_k": 1, "mirostat": 1}, False),
        ({"top_k": 2}, False),
        ({}, False),
    ],
)
def test_h_m1_greedy_is_below_a_stated_temperature(params, greedy):
    """Spec S23, S29."""
    assert SamplingParams(**params).greedy is greedy


def test_fields_that_contradict_each_other_are_refused():
    """Spec S32, S46."""
    with pytest.raises(RequestError, match="samplers and mirostat 2 exclude each other"):
        SamplingParams(samplers=["top_k"], mirostat=2)
    with pytest.raises(RequestError, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5).max_tokens == -1


def test_probabilities_after_the_chain_are_processed_ones():
    """Spec S37."""
    assert SamplingParams(post_sampling_probs=True).logprobs_mode == "processed"
    assert SamplingParams(logprobs_mode="raw_logprobs").logprobs_mode == "raw"
    assert SamplingParams(logprobs_mode="processed_logprobs").logprobs_mode == "processed"


def test_none_is_not_given_where_values_are_optional():
    values = dict.fromkeys(RULES)
    assert SamplingParams.from_optional(**values) == SamplingParams()
    assert SamplingParams.from_optional(seed=None, top_p=0.5).top_p == 0.5
    assert SamplingParams(seed=None).seed == -1


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, b"x", ["x"], True])
def test_a_salt_is_a_text_of_1_to_256_characters(salt):
    """Spec X5: the empty one is refused."""

    def row(salt):
        return SequenceSpec("a", np.array([1], np.int32), SamplingParams(), cache_salt=salt)

    with pytest.raises(RequestError, match="1 to 256 characters") as refused:
        row(salt)
    assert refused.value.field == "cache_salt"
    assert [row(fine).cache_salt for fine in (None, "x", "\N{SNOWMAN}" * 256)] == [None, "x", "\N{SNOWMAN}" * 256]
