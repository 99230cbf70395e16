"""Sampling parameters on the command line: every flag of the table reaches its field (docs/spec/clients.md 0.3)."""

from __future__ import annotations

from typing import Any

import click
import parameter_tables
import pytest

from mlxcel.cli.context import CliContext
from mlxcel.cli.generate import command
from mlxcel.cli.sampling_options import SAMPLING_FLAGS, SamplingFlag, given_fields
from mlxcel.core.param_table import CLIENT_DEFAULTS, RULES
from mlxcel.core.params import SamplingParams
from mlxcel.errors import UsageError

SAMPLES: dict[str, tuple[str, Any]] = {
    "mirostat": ("2", 2),
    "dry_base": ("1.5", 1.5),
    "dry_sequence_breakers": ("x", ("x",)),
    "logit_bias": ("5+1.5", ((5, 1.5),)),
    "stop": ("END", ("END",)),
    "stop_token_ids": ("7", (7,)),
    "logprobs_mode": ("processed", "processed"),
    "reasoning_format": ("none", "none"),
    "t_max_predict_ms": ("1.5", 1500.0),
    "samplers": ("top_k;top_p", ("top_k", "top_p")),
    "max_tokens": ("3", 3),
    "seed": ("3", 3),
}


def parameters(*arguments: str) -> dict[str, Any]:
    """What click makes of the arguments, without running anything."""
    with command.make_context("generate", list(arguments), obj=CliContext()) as context:
        return dict(context.params)


def given(*arguments: str) -> dict[str, Any]:
    return given_fields(parameters(*arguments))


def sample(flag: SamplingFlag) -> tuple[str, Any]:
    if flag.parameter == "sampling_seq":
        return "kp", ("top_k", "top_p")
    if flag.field in SAMPLES:
        return SAMPLES[flag.field]
    whole = isinstance(getattr(SamplingParams(), flag.field), int)
    return ("3", 3) if whole else ("0.5", 0.5)


@pytest.mark.parametrize(
    ("flag", "spelled"),
    [(flag, spelled) for flag in SAMPLING_FLAGS for spelled in flag.flags],
    ids=lambda part: part if isinstance(part, str) else part.field,
)
def test_every_spelling_reaches_its_field(flag: SamplingFlag, spelled: str) -> None:
    """docs/spec/clients.md 1.10, test 14: the flag and the keyword are one value, by one validation."""
    if flag.switch:
        assert given(spelled) == {flag.field: True}
        return
    text, meant = sample(flag)
    said = given(spelled, text)
    assert set(said) == {flag.field}
    assert getattr(SamplingParams(**said), flag.field) == meant == RULES[flag.field](flag.field, meant)


def test_nothing_is_given_unasked() -> None:
    assert given() == {}


def test_flags_are_those_of_the_clients_page() -> None:
    ours: dict[str, set[str]] = {}
    for flag in SAMPLING_FLAGS:
        ours.setdefault(flag.field, set()).update(flag.flags)
    elsewhere = {"skip_special_tokens", "add_special_tokens", "loop_detection"}
    for row in parameter_tables.field_rows():
        told = {
            word.rstrip(",") for cell in row.flags for word in cell.split() if word.startswith("-") and word != "--"
        }
        if "--" in row.flags or row.fields[0] == "dynatemp_range":  # the column says "same"
            told |= {f"--{field.replace('_', '-')}" for field in row.fields}
        if not elsewhere & set(row.fields):
            assert set().union(*(ours.get(field, set()) for field in row.fields)) == told, row.fields


def test_defaults_in_the_help_are_the_command_lines() -> None:
    """They are read from the table; these are said in words."""
    words = {flag.parameter: flag.default_words for flag in SAMPLING_FLAGS}
    assert (words["temperature"], words["top_p"], words["max_tokens"], words["xtc_threshold"]) == (
        "0",
        "1",
        "-1",
        "0.1",
    )
    assert (words["stop"], words["ignore_eos"], words["logprobs_mode"]) == ("none", "off", "raw")
    assert CLIENT_DEFAULTS["cli"] == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("texts", "breakers"),
    [
        (("none",), ()),
        (("a",), ("a",)),
        (("a", "b", "a"), ("a", "b")),
        (("a", "none"), ()),
        (("a", "none", "b"), ("b",)),
    ],
)
def test_breakers_take_the_place_of_the_usual_ones(texts: tuple[str, ...], breakers: tuple[str, ...]) -> None:
    """H-E11: an empty list is no breaker at all, not "not given"."""
    said = given(*(word for text in texts for word in ("--dry-sequence-breaker", text)))
    assert SamplingParams(**said).dry_sequence_breakers == breakers


def test_repeatable_flags_collect() -> None:
    said = given(
        "-l", "5+1", "-l", "5-0.25", "--logit-bias", "7=false", "--stop", "a", "-r", "b", "--stop-token-id", "1"
    )
    params = SamplingParams(**said)
    assert params.logit_bias == ((5, 0.75), (7, None))
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1,))


def test_special_tokens() -> None:
    assert given("--special") == {"skip_special_tokens": False}
    assert given("--no-special") == {"skip_special_tokens": True}
    assert given("--no-add-special") == {"add_special_tokens": False}


@pytest.mark.parametrize(
    "text", ["5", "+1", "5+", "5+nan", "5-inf", "5+1_0", "5=true", "x+1", "5+1+1", "-5+1", "5 +1", "5+1e400"]
)
def test_biases_in_no_form_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="a token id with"):
        given("-l", text)


NUMBERS = [flag for flag in SAMPLING_FLAGS if flag.kind.metavar in ("N", "X", "ID", "SECONDS")]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1_0", "0x1", "", "1e", "one", "1,5", "٣", "1e99999"])
@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.field)
def test_h_m7_what_is_no_number_is_none(flag: SamplingFlag, text: str) -> None:
    """docs/spec/clients.md 0.3: click's own types let some of these through."""
    with pytest.raises(click.BadParameter):
        given(flag.flags[0], text)


@pytest.mark.parametrize(
    "flag", [flag for flag in NUMBERS if flag.kind.metavar in ("N", "ID")], ids=lambda flag: flag.field
)
def test_h_m7_a_fraction_is_no_integer(flag: SamplingFlag) -> None:
    with pytest.raises(click.BadParameter):
        given(flag.flags[0], "1.5")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mirostat", "2", "--samplers", "top_k"), ("--mirostat 2", "--samplers")),
        (("--mirostat", "1", "--sampling-seq", "k"), ("--mirostat 1", "--sampling-seq")),
        (("--samplers", "top_k", "--sampling-seq", "p"), ("--samplers", "--sampling-seq")),
        (("--top-k", "1", "--top-k", "2"), ("--top-k", "1", "2")),
        (("-t", "0", "--temp", "1"), ("--temperature", "0", "1")),
        (("--mirostat-ent", "1", "--mirostat-ent", "2"), ("--mirostat-ent",)),
    ],
)
def test_h_s4_flags_that_contradict_each_other_are_refused(arguments: tuple[str, ...], says: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        given(*arguments)
    for word in says:
        assert word in str(caught.value)


def test_flags_that_agree_are_one() -> None:
    assert given("--samplers", "top_k,top_p", "--sampling-seq", "kp") == {"samplers": ("top_k", "top_p")}
    assert given("--top-k", "3", "--top-k", "3") == {"top_k": 3}
    assert given("--mirostat", "0", "--samplers", "") == {"mirostat": 0, "samplers": ()}


def test_letters_that_mean_no_stage() -> None:
    with pytest.raises(click.BadParameter, match="edskypmxta"):
        given("--sampling-seq", "kz")
