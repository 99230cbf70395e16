"""The one table of sampling parameters: names, ranges, and what clients ask for where nobody says anything
(docs/spec/clients.md 0.3). SamplingParams, requests, the command line and the documentation's tables come from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from mlxcel.core import param_records as records
from mlxcel.core.param_rules import MOST_ID, MOST_TOKENS, Rule, flag, ids, one_of, optional, real, strings, whole
from mlxcel.core.stage_order import SAMPLERS


@attrs.frozen
class Field:
    """A parameter. `rule` takes what the record takes, `other` are further names of it in requests.

    `clients` holds the defaults of clients that differ from the library's, which is SamplingParams' own.
    """

    name: str
    rule: Rule
    other: tuple[str, ...] = ()
    clients: Mapping[str, Any] = attrs.field(factory=dict)


_WINDOW = whole(-1, MOST_TOKENS, "of 1 or more, 0 for off, or -1 for the whole context")
_PENALTY = real(-2, 2, "from -2 to 2")
_SHARE = real(0, 1, "from 0 to 1")
_LOGPROBS = optional(whole(-1, MOST_ID, "from 0 to the cap, or -1 for the whole vocabulary"))
_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
MOST_ALLOWED: Final = 1 << 20
"""More than any vocabulary has."""

_MUCH = 1e9  # beyond any use, and far from where float32 overflows

FIELDS: Final = (
    Field("n", whole(1, MOST_ID, "of 1 or more, up to the cap"), ("n_cmpl",)),
    Field(
        "max_tokens",
        whole(-1, MOST_TOKENS, "of 0 or more, or -1 for up to the end of the context"),
        ("max_completion_tokens", "n_predict", "max_output_tokens"),
    ),
    Field("min_tokens", whole(0, MOST_TOKENS, "of 0 or more, and no more than the reply may have")),
    Field("temperature", real(0, 100, "from 0 to 100"), clients={"cli": 0.0, "srv": 0.8}),
    Field("top_k", whole(-1, MOST_TOKENS, "of 1 or more, or 0 or -1 for off"), clients={"srv": 40}),
    Field("top_p", _SHARE, clients={"srv": 0.95}),
    Field("min_p", _SHARE, clients={"srv": 0.05}),
    Field("typical_p", real(0, 1, "above 0, up to 1", above=True)),
    Field("top_n_sigma", real(0, _MUCH, "above 0, or 0 or -1 for off", also=-1)),
    Field("min_keep", whole(0, MOST_ID, "from 0 to the size of the vocabulary")),
    Field("xtc_probability", _SHARE),
    Field("xtc_threshold", _SHARE),
    Field("dynatemp_range", real(0, _MUCH, "of 0 or more, 0 for off")),
    Field("dynatemp_exponent", real(0, _MUCH, "above 0", above=True)),
    Field("mirostat", whole(0, 2, "from 0 to 2, 0 for off")),
    Field("mirostat_tau", real(0, _MUCH, "above 0", above=True)),
    Field("mirostat_eta", real(0, _MUCH, "above 0", above=True)),
    Field("adaptive_target", real(0, 1, "above 0, up to 1, or -1 for off", above=True, also=-1)),
    Field("adaptive_decay", real(0, 0.99, "from 0 to 0.99")),
    Field("repetition_penalty", real(0, 10, "above 0, up to 10, 1 for off", above=True), ("repeat_penalty",)),
    Field("repeat_last_n", _WINDOW, ("penalty_last_n",)),
    Field("presence_penalty", _PENALTY),
    Field("frequency_penalty", _PENALTY),
    Field("window_presence_penalty", _PENALTY),
    Field("window_frequency_penalty", _PENALTY),
    Field("dry_multiplier", real(0, _MUCH, "of 0 or more, 0 for off")),
    Field("dry_base", real(1, _MUCH, "of 1 or more")),
    Field("dry_allowed_length", whole(1, MOST_ID, "of 1 or more")),
    Field("dry_penalty_last_n", _WINDOW),
    Field("dry_sequence_breakers", strings(64, 40, "at most 64 strings of 1 to 40 bytes")),
    Field("logit_bias", records.LOGIT_BIAS),
    Field("bad_words", strings(256, 1024, "at most 256 strings of 1 to 1024 bytes")),
    Field("allowed_token_ids", optional(ids(MOST_ALLOWED, f"a list of 1 to {MOST_ALLOWED} token ids", empty=False))),
    Field("stop", strings(64, 1024, "at most 64 strings of 1 to 1024 bytes"), ("stop_sequences",)),
    Field("stop_token_ids", ids(64, "a list of at most 64 token ids")),
    Field("include_stop_str_in_output", flag()),
    Field("ignore_eos", flag()),
    Field("seed", optional(whole(-1, MOST_TOKENS, "from 0 to 2**63 - 1, or -1 for a fresh one"), -1)),
    Field("logprobs", _LOGPROBS, ("top_logprobs", "n_probs")),
    Field("prompt_logprobs", _LOGPROBS),
    Field("logprobs_mode", one_of("raw", "processed", spellings=_MODES)),
    Field("post_sampling_probs", flag()),
    Field("skip_special_tokens", flag()),
    Field("add_special_tokens", optional(flag())),
    Field("reasoning_format", one_of("none", "deepseek", "deepseek-legacy", "auto")),
    Field("t_max_predict_ms", real(0, 1e15, "of 0 or more, 0 for off")),
    Field("n_indent", whole(0, MOST_ID, "of 0 or more, 0 for off")),
    Field("loop_detection", records.LOOP_DETECTION),
    Field("truncate_prompt_tokens", optional(whole(1, MOST_TOKENS, "of 1 or more, or -1 to fit", also=-1))),
    Field("samplers", SAMPLERS),
    Field("logits_processors", records.PROCESSORS),
)

RULES: Final[Mapping[str, Rule]] = {field.name: field.rule for field in FIELDS}

CLIENTS: Final = ("lib", "cli", "srv")

CLIENT_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    client: {field.name: field.clients[client] for field in FIELDS if client in field.clients} for client in CLIENTS
}
"""What a client asks for where nobody says anything (spec D2): the library is neutral, a command repeats itself, a
server is compared with llama-server."""
