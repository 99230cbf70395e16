"""How tokens are drawn and when a reply ends: one record for every client (docs/spec/clients.md 0.3)."""

from __future__ import annotations

from typing import Any, Self

import attrs

from mlxcel.core.param_records import LogitBias, LoopDetection, Processor
from mlxcel.core.param_table import RULES
from mlxcel.core.stage_order import FIRST_FILTER, LAST_FILTER, STAGE_NAMES
from mlxcel.errors import RequestError

__all__ = [
    "FIRST_FILTER",
    "GREEDY_TEMPERATURE",
    "LAST_FILTER",
    "STAGE_NAMES",
    "LogitBias",
    "LoopDetection",
    "Processor",
    "SamplingParams",
]

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy (spec S23)."""


class _Given:
    """Remembers which values a record was built with. No field of the record: it takes no part in comparisons."""

    __slots__ = ("given",)
    given: frozenset[str]

    def __new__(cls, **values: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(values))
        return made


@attrs.frozen(kw_only=True)
class SamplingParams(_Given):
    """Every value is checked when it is built. The defaults are the library's: neutral. Other clients fill in theirs
    with `resolve_sampling`. What needs a vocabulary, a tokenizer or a context is checked by `bind_params`.

    `given` are the names of the values that were passed: the others may be filled from the model's own defaults."""

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
        if self.post_sampling_probs:
            object.__setattr__(self, "logprobs_mode", "processed")
        if self.samplers is not None and self.mirostat:
            raise RequestError(
                f"samplers and mirostat {self.mirostat} exclude each other: mirostat has an order of its own",
                field="samplers",
                hint="leave one of them out",
            )
        if 0 <= self.max_tokens < self.min_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
                field="min_tokens",
                hint=f"ask for min_tokens of {self.max_tokens} or less",
            )

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """As the constructor, None meaning "not given"."""
        return cls(**{field: value for field, value in values.items() if value is not None})

    @property
    def greedy(self) -> bool:
        """No noise: argmax, the lowest id on ties (spec S23). A mirostat row is not: its mu moves."""
        cold = self.temperature < GREEDY_TEMPERATURE and self.dynatemp_range == 0
        return not self.mirostat and (self.top_k == 1 or cold)

    def runs(self, stage: str) -> bool:
        """Whether `samplers` leaves a stage in."""
        return self.samplers is None or stage in self.samplers

    def clone(self, **changes: Any) -> SamplingParams:
        """The same with some fields changed, validated again. What was given before counts as given."""
        made = attrs.evolve(self, **changes)
        object.__setattr__(made, "given", self.given.union(changes))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy keeps what was given."""
        values = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        return _copied, (type(self), values, self.given)


def _copied(kind: type[SamplingParams], values: dict[str, Any], given: frozenset[str]) -> SamplingParams:
    made = kind(**values)
    object.__setattr__(made, "given", given)
    return made
