"""How tokens are drawn and when a reply ends: one table for every client (docs/spec/clients.md 0.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.core import param_rules as rules
from mlxcel.core.param_rules import Rule
from mlxcel.errors import RequestError, shown

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy (spec S23)."""

STAGE_NAMES = (
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p"),
)
"""Names that `samplers` knows, in the one order they may stand in (spec S1)."""

FIRST_FILTER, LAST_FILTER = STAGE_NAMES.index("top_n_sigma"), STAGE_NAMES.index("xtc")

LogitBias = tuple[tuple[int, float | None], ...]
"""(token id, what is added to its logit; None: never drawn)."""


@attrs.frozen
class LoopDetection:
    """Ends a reply whose newest `min_count` blocks of `min_pattern` to `max_pattern` tokens are equal (spec F16).

    Off with `max_pattern` 0 or a `min_count` below 2.
    """

    min_pattern: int = 1
    max_pattern: int = 20
    min_count: int = 12

    @property
    def on(self) -> bool:
        return self.max_pattern >= 1 and self.min_count >= 2


@attrs.frozen
class Processor:
    """A registered logits processor by name, and its arguments as JSON text: hashable, and decoded where it is made."""

    name: str
    args: str = "{}"


def _samplers(field: str, value: Any) -> tuple[str, ...] | None:
    """Spec S1 and S2: a subsequence of STAGE_NAMES, except that `temperature` may stand before the first filter."""
    if value is None:
        return None
    words = f"a list of stages in this order: {', '.join(STAGE_NAMES)} (temperature may stand before the first filter)"
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise rules.refused(field, words, value)
    unknown = [name for name in value if name not in STAGE_NAMES]
    if unknown:
        raise RequestError(f"{field}: no stage is called {shown(unknown[0])}; it must be {words}", field=field)
    rest = [name for name in value if name != "temperature"]
    places = [STAGE_NAMES.index(name) for name in rest]
    in_order = places == sorted(set(places)) and len(value) - len(rest) <= 1
    if in_order and "temperature" in value:
        at = value.index("temperature")
        before, after = places[:at], places[at:]
        last = all(place < STAGE_NAMES.index("temperature") for place in before) and all(
            place > STAGE_NAMES.index("temperature") for place in after
        )
        first = all(place < FIRST_FILTER for place in before) and all(place >= FIRST_FILTER for place in after)
        in_order = last or first
    if not in_order:
        raise RequestError(f"{field} must be {words}, not {shown(', '.join(value))}", field=field)
    return tuple(value)


def _logit_bias(field: str, value: Any) -> LogitBias:
    """[[id, value or false], …] or {id: value}; values for one id add up, and false wins."""
    words = "at most 1024 pairs of a token id and a number from -100 to 100, or false for never"
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or len(pairs) > 1024:
        raise rules.refused(field, words, value if not isinstance(pairs, list | tuple) else f"{len(pairs)} of them")
    found: dict[int, float | None] = {}
    number = rules.real(-100, 100, "from -100 to 100, or false")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise rules.refused(field, words, pair)
        token, added = pair
        if isinstance(token, str):  # keys of a JSON object are strings
            token = int(token) if token.isascii() and token.isdecimal() and len(token) <= 10 else token
        token = rules.whole(0, rules.MOST_ID, "of 0 or more as a token id")(field, token)
        if added is None or added is False or found.get(token, 0.0) is None:
            found[token] = None
        else:
            found[token] = (found.get(token) or 0.0) + number(field, added)
    return tuple(sorted(found.items()))


def _loop_detection(field: str, value: Any) -> LoopDetection | None:
    if value is None or isinstance(value, LoopDetection):
        given: Mapping[str, Any] = attrs.asdict(value) if value is not None else {}
        if value is None:
            return None
    elif isinstance(value, Mapping):
        given = value
    else:
        raise rules.refused(field, "null or {min_pattern, max_pattern, min_count}", value)
    caps = {"min_pattern": 64, "max_pattern": 64, "min_count": 1000}
    if unknown := [name for name in given if name not in caps]:
        raise RequestError(f"{field} has no {shown(unknown[0])}: it has {', '.join(caps)}", field=field)
    checked = {
        name: rules.whole(0, caps[name], f"from 0 to {caps[name]}")(f"{field}.{name}", given[name]) for name in given
    }
    made = attrs.evolve(LoopDetection(), **checked)
    if made.max_pattern and made.min_pattern > made.max_pattern:
        raise RequestError(
            f"{field}.min_pattern {made.min_pattern} is above max_pattern {made.max_pattern}", field=field
        )
    return attrs.evolve(made, min_pattern=max(1, made.min_pattern))


def _processors(field: str, value: Any) -> tuple[Processor, ...]:
    import json

    words = "a list of at most 16 of {name, args}"
    if not isinstance(value, list | tuple) or len(value) > 16:
        raise rules.refused(field, words, value)
    made = []
    for item in value:
        if isinstance(item, Processor):
            made.append(item)
            continue
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str) or set(item) - {"name", "args"}:
            raise rules.refused(field, words, item)
        made.append(Processor(item["name"], json.dumps(item.get("args") or {}, sort_keys=True)))
    return tuple(made)


def _window(field: str, value: Any) -> int:
    return int(rules.whole(-1, rules.MOST_TOKENS, "of 1 or more, 0 for off or -1 for everything")(field, value))


_penalty = rules.real(-2, 2, "from -2 to 2")
_logprobs = rules.optional(rules.whole(-1, rules.MOST_ID, "of 0 or more, or -1 for all"))

RULES: Mapping[str, Rule] = {
    "n": rules.whole(1, rules.MOST_ID, "of 1 or more"),
    "max_tokens": rules.whole(-1, rules.MOST_TOKENS, "of 0 or more, or -1 for up to the end of the context"),
    "min_tokens": rules.whole(0, rules.MOST_TOKENS, "of 0 or more"),
    "temperature": rules.real(0, 100, "from 0 to 100"),
    "top_k": rules.whole(-1, rules.MOST_TOKENS, "of 1 or more, or 0 or -1 for off"),
    "top_p": rules.real(0, 1, "from 0 to 1"),
    "min_p": rules.real(0, 1, "from 0 to 1"),
    "typical_p": rules.real(0, 1, "above 0, up to 1", above=True),
    "top_n_sigma": rules.real(0, 1e9, "above 0, or 0 or -1 for off", also=-1),
    "min_keep": rules.whole(0, rules.MOST_ID, "of 0 or more"),
    "xtc_probability": rules.real(0, 1, "from 0 to 1"),
    "xtc_threshold": rules.real(0, 1, "from 0 to 1"),
    "dynatemp_range": rules.real(0, 1e9, "of 0 or more"),
    "dynatemp_exponent": rules.real(0, 1e9, "above 0", above=True),
    "mirostat": rules.whole(0, 2, "from 0 to 2"),
    "mirostat_tau": rules.real(0, 1e9, "above 0", above=True),
    "mirostat_eta": rules.real(0, 1e9, "above 0", above=True),
    "adaptive_target": rules.real(0, 1, "above 0, up to 1, or -1 for off", above=True, also=-1),
    "adaptive_decay": rules.real(0, 0.99, "from 0 to 0.99"),
    "repetition_penalty": rules.real(0, 10, "above 0, up to 10", above=True),
    "repeat_last_n": _window,
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "window_presence_penalty": _penalty,
    "window_frequency_penalty": _penalty,
    "dry_multiplier": rules.real(0, 1e9, "of 0 or more"),
    "dry_base": rules.real(1, 1e9, "of 1 or more"),
    "dry_allowed_length": rules.whole(1, rules.MOST_ID, "of 1 or more"),
    "dry_penalty_last_n": _window,
    "dry_sequence_breakers": rules.strings(64, 40, "at most 64 strings of 1 to 40 bytes"),
    "logit_bias": _logit_bias,
    "bad_words": rules.strings(256, 1024, "at most 256 strings of 1 to 1024 bytes"),
    "allowed_token_ids": rules.optional(rules.ids(None, "a list of token ids, at least one", empty=False)),
    "stop": rules.strings(64, 1024, "at most 64 strings of 1 to 1024 bytes"),
    "stop_token_ids": rules.ids(64, "a list of at most 64 token ids"),
    "include_stop_str_in_output": rules.flag,
    "ignore_eos": rules.flag,
    "seed": rules.whole(-1, rules.MOST_TOKENS, "from 0 to 2**63 - 1, or -1 for a fresh one"),
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "logprobs_mode": rules.one_of(
        "raw", "processed", spellings={"raw_logprobs": "raw", "processed_logprobs": "processed"}
    ),
    "post_sampling_probs": rules.flag,
    "skip_special_tokens": rules.flag,
    "add_special_tokens": rules.optional(rules.flag),
    "reasoning_format": rules.one_of("none", "deepseek", "deepseek-legacy", "auto"),
    "t_max_predict_ms": rules.real(0, 1e15, "of 0 or more"),
    "n_indent": rules.whole(0, rules.MOST_ID, "of 0 or more"),
    "loop_detection": _loop_detection,
    "truncate_prompt_tokens": rules.optional(rules.whole(-1, rules.MOST_TOKENS, "of 1 or more, or -1 to fit")),
    "samplers": _samplers,
    "logits_processors": _processors,
}


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Every value is checked when it is built. The defaults are the library's: neutral. Other clients fill in theirs
    with `resolve_sampling`. What needs a vocabulary, a tokenizer or a context to be checked is checked at `open`."""

    n: int = 1
    max_tokens: int = -1
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    repetition_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    window_presence_penalty: float = 0.0
    window_frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: LogitBias = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int = -1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    post_sampling_probs: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    reasoning_format: str = "auto"
    t_max_predict_ms: float = 0.0
    n_indent: int = 0
    loop_detection: LoopDetection | None = None
    truncate_prompt_tokens: int | None = None
    samplers: tuple[str, ...] | None = None
    logits_processors: tuple[Processor, ...] = ()

    def __attrs_post_init__(self) -> None:
        for field, rule in RULES.items():
            object.__setattr__(self, field, rule(field, getattr(self, field)))
        if self.samplers is not None and self.mirostat:
            raise RequestError("samplers cannot be given together with mirostat, which has an order of its own")

    @property
    def greedy(self) -> bool:
        """No noise: argmax, the lowest id on ties (spec S23). A mirostat row is not: its mu moves."""
        cold = self.temperature < GREEDY_TEMPERATURE and self.dynatemp_range == 0
        return not self.mirostat and (self.top_k == 1 or cold)

    def runs(self, stage: str) -> bool:
        """Whether `samplers` leaves a stage in."""
        return self.samplers is None or stage in self.samplers

    def clone(self, **changes: Any) -> SamplingParams:
        """The same with some fields changed, validated again."""
        return attrs.evolve(self, **changes)
