"""Accepted values that cannot change this reply (spec S9, S32): said, never dropped silently."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mlxcel.core.acting_order import acting_order, looks_at_a_window
from mlxcel.core.params import GREEDY_TEMPERATURE, SamplingParams
from mlxcel.core.stage_order import STAGE_NAMES

STAGE_FIELDS = {
    "penalties": (
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("window_presence_penalty", "window_frequency_penalty"),
    ),
    "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typ_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "temperature": ("temperature", "dynatemp_range"),
    "adaptive_p": ("adaptive_target",),
}
"""Of each stage the fields that switch it on."""

FILTER_FIELDS = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc_probability")

WINDOWED = ("repetition_penalty", "window_presence_penalty", "window_frequency_penalty")
DRY = ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")


def inert(params: SamplingParams, said: frozenset[str]) -> dict[str, str]:
    """By field, a line for each of the `said` ones whose value differs from "off" and has no effect, with the reason;
    in the table's order."""
    found: dict[str, str] = {}
    for fields, reason in _reasons(params):
        for field in fields:
            if field in said and field not in found and _asks(params, field):
                found[field] = f"{field} has no effect: {reason}"
    return {field.name: found[field.name] for field in attrs.fields(SamplingParams) if field.name in found}


def _asks(params: SamplingParams, field: str) -> bool:
    """Whether the value asks for anything: it is not the neutral one, nor another way to say it."""
    value = getattr(params, field)
    neutral = {"top_k": (0, -1), "top_n_sigma": (0.0, -1.0), "min_keep": (0, 1), "seed": (-1,)}
    return value not in neutral.get(field, (attrs.fields_dict(SamplingParams)[field].default,))


def _reasons(params: SamplingParams) -> Iterator[tuple[tuple[str, ...], str]]:
    """Fields that cannot act, and why. A field may come twice: the first reason counts."""
    if params.mirostat:
        yield (*FILTER_FIELDS, "min_keep", "adaptive_target"), "mirostat takes the place of the filters"
        if params.temperature < GREEDY_TEMPERATURE and params.dynatemp_range == 0:
            why = "at temperature 0 mirostat takes the best token"
            yield ("mirostat", "mirostat_tau", "mirostat_eta", "seed"), why
    else:
        yield ("mirostat_tau", "mirostat_eta"), "mirostat is off"
    makes_greedy: set[str] = set()
    if params.greedy:
        makes_greedy = {"top_k"} if params.top_k == 1 else set()
        makes_greedy |= {"temperature"} if params.temperature < GREEDY_TEMPERATURE else set()
        idle = (*FILTER_FIELDS, "temperature", "min_keep", "dynatemp_range", "adaptive_target", "seed")
        yield tuple(field for field in idle if field not in makes_greedy), "the reply is greedy"
    for stage in STAGE_NAMES:
        if not params.runs(stage):
            fields = tuple(field for field in STAGE_FIELDS[stage] if field not in makes_greedy)
            yield fields, f"samplers leaves out {stage}"
    if params.xtc_threshold > 0.5 and params.xtc_probability > 0:
        yield ("xtc_threshold", "xtc_probability"), "above an xtc_threshold of 0.5 no two tokens qualify"
    yield from _companions(params)


def _companions(params: SamplingParams) -> Iterator[tuple[tuple[str, ...], str]]:
    """Fields that only shape what another one switches on."""
    acting = acting_order(params)
    if "xtc" not in acting:
        yield ("xtc_threshold",), "xtc_probability is 0" if params.xtc_probability == 0 else "XTC does not act"
    if params.dynatemp_range == 0:
        yield ("dynatemp_exponent",), "dynatemp_range is 0"
    elif "temperature" not in acting:
        yield ("dynatemp_exponent",), "the temperature does not act"
    if "adaptive_p" not in acting:
        yield ("adaptive_decay",), "adaptive_target is off" if params.adaptive_target < 0 else "adaptive-p does not act"
    if params.repeat_last_n == 0:
        yield WINDOWED, "repeat_last_n is 0"
    if not looks_at_a_window(params) or not params.runs("penalties"):
        yield ("repeat_last_n",), "no penalty that looks at a window acts"
    if params.dry_penalty_last_n == 0:
        yield ("dry_multiplier",), "dry_penalty_last_n is 0"
    if params.dry_multiplier == 0:
        yield DRY, "dry_multiplier is 0"
    elif "dry" not in acting:
        yield tuple(field for field in DRY if getattr(params, field) != 0), "DRY does not act"
    if not {"typ_p", "top_p", "min_p", "xtc"}.intersection(acting):
        yield ("min_keep",), "no filter that it holds back acts"
    if params.logprobs is None:
        yield ("post_sampling_probs", "logprobs_mode"), "no log-probabilities of the reply are asked for"
    if not params.stop:
        yield ("include_stop_str_in_output",), "there is no stop string"
