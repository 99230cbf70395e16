"""The order that is reported is the one that ran: compared with what the sampler itself packs (spec S1, S7, H-E12)."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.core.acting_order import acting_order
from mlxcel.core.params import STAGE_NAMES, SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.stage_order import in_order
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import ByteTokenizer

SAMPLER = ChainSampler(vocab=300, tokenizer=ByteTokenizer())

NAMES = {
    "repetition": "penalties",
    "frequency": "penalties",
    "window_frequency": "penalties",
    "temperature_first": "temperature",
    "dynatemp": "temperature",
    "mirostat_1": "mirostat",
    "mirostat_2": "mirostat",
}
"""Stages of a step whose name is not that of the report."""

VALUES: dict[str, list[Any]] = {
    "temperature": [0, 1e-6, 0.5, 1, 2],
    "top_k": [0, -1, 1, 5, 299, 300, 1000],
    "top_p": [0, 0.5, 1],
    "min_p": [0, 0.1],
    "typical_p": [0.5, 1],
    "top_n_sigma": [-1, 0, 1],
    "xtc_probability": [0, 0.5],
    "xtc_threshold": [0.1, 0.5, 0.6],
    "dynatemp_range": [0, 0.5],
    "mirostat": [0, 0, 1, 2],
    "adaptive_target": [-1, 0.5],
    "repetition_penalty": [1, 1.5],
    "repeat_last_n": [0, 5, -1],
    "presence_penalty": [0, 1],
    "frequency_penalty": [0, -1],
    "window_presence_penalty": [0, 1],
    "window_frequency_penalty": [0, 1],
    "dry_multiplier": [0, 1],
    "dry_penalty_last_n": [0, 5],
}


def ran(params: SamplingParams) -> set[str]:
    """By the names of reports, what the step of a lone row has."""
    spec = SequenceSpec("row", np.arange(4, dtype=np.int32), params)
    packed = SAMPLER.pack([SAMPLER.open(spec)], [4], [False])
    return {NAMES.get(stage, stage) for stage in packed.stages} & {*STAGE_NAMES, "mirostat"}


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    given_ = {field: draw(st.sampled_from(values)) for field, values in VALUES.items()}
    if not given_["mirostat"] and draw(st.booleans()):
        chosen = tuple(name for name in STAGE_NAMES if draw(st.booleans()))
        if "temperature" in chosen and draw(st.booleans()):
            rest = [name for name in chosen if name != "temperature"]
            before = sum(name in ("penalties", "dry") for name in rest)
            chosen = (*rest[:before], "temperature", *rest[before:])
        given_["samplers"] = chosen
    return SamplingParams(seed=1, **given_)


@settings(max_examples=400, deadline=None)
@given(parameters())
def test_h_e12_what_is_reported_is_what_ran(params: SamplingParams) -> None:
    order = acting_order(params, 300)
    assert set(order) == ran(params)
    names = tuple(name for name in order if name != "mirostat")
    assert in_order(names)
    if params.samplers is not None:
        assert list(names) == [name for name in params.samplers if name in names]
