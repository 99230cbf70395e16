"""Sampling parameters as fields of a request, so that a server samples as the library does."""

from __future__ import annotations

import json
from typing import Any

import attrs

from mlxcel.core.inert import inert
from mlxcel.core.params import SamplingParams


def request_fields(params: SamplingParams, given: frozenset[str], *, chat: bool) -> dict[str, Any]:
    """Every value, since a server's defaults are others. Left out are values that nobody gave and that cannot act, of
    which it would warn, and loop detection that nobody gave: that is an option of the engine, the operator's here.

    `given` are the fields that the caller gave; `params` may hold a drawn seed besides.
    """
    idle = set(inert(params, frozenset(field.name for field in attrs.fields(SamplingParams)) - given))
    idle |= {"loop_detection"} - given
    if params.post_sampling_probs:
        idle |= {"logprobs_mode"} - given
    values = {
        **attrs.asdict(params, recurse=False),
        "logit_bias": [[token, False if added is None else added] for token, added in params.logit_bias],
        "loop_detection": None if params.loop_detection is None else attrs.asdict(params.loop_detection),
        "logits_processors": [
            {"name": processor.name, "args": json.loads(processor.args)} for processor in params.logits_processors
        ],
    }
    fields = {name: value for name, value in values.items() if name not in idle and value is not None}
    if chat:
        fields.pop("add_special_tokens", None)  # a template writes its own
        if "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return fields
