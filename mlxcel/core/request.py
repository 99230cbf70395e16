"""What a client asks for: sampling parameters, validated once for everybody, and the spec of one sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import attrs
import numpy as np

from mlxcel.errors import RequestError, shown

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy (spec S23)."""

MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20


Rule = Callable[[str, Any], Any]
"""(field, value) -> the value in its own type, or RequestError with field, value and range."""


def _real(low: float, high: float, words: str) -> Rule:
    def check(field: str, value: Any) -> float:
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Real) else value
        if not low <= number <= high:
            raise RequestError(f"{field} must be a number {words}, not {shown(value)}", field=field)
        return float(number)

    return check


def _whole(low: int, high: int, words: str) -> Rule:
    def check(field: str, value: Any) -> int:
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Integral) else value
        if not low <= number <= high:
            raise RequestError(f"{field} must be an integer {words}, not {shown(value)}", field=field)
        return int(number)

    return check


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{field} must be true or false, not {shown(value)}", field=field)
    return value


def _optional(rule: Rule) -> Rule:
    return lambda field, value: None if value is None else rule(field, value)


def _id_list(field: str, value: Any) -> tuple[int, ...]:
    words = f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"
    if not isinstance(value, list | tuple | set | frozenset):
        raise RequestError(f"{field} must be {words}, not {shown(value)}", field=field)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"{field} must be {words}, not {len(value)} of them", field=field)
    whole = _whole(0, 2**31 - 1, "of 0 or more in each place")
    return tuple(sorted({whole(field, item) for item in value}))


RULES: Mapping[str, Rule] = {
    "max_tokens": _whole(-1, 2**63 - 1, "of 0 or more, or -1 for up to the end of the context"),
    "temperature": _real(0, 100, "from 0 to 100"),
    "top_k": _whole(-1, 2**63 - 1, "of 1 or more, or 0 or -1 for off"),
    "top_p": _real(0, 1, "from 0 to 1"),
    "min_p": _real(0, 1, "from 0 to 1"),
    "seed": _whole(-1, 2**63 - 1, "from 0 to 2**63 - 1, or -1 for a fresh one"),
    "stop_token_ids": _id_list,
    "logprobs": _optional(_whole(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")),
    "skip_special_tokens": _flag,
}


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a reply ends. Every value is checked when it is built (docs/spec/clients.md 0.3).

    The defaults are the library's: neutral. Other clients fill in theirs with `resolve_sampling`.
    """

    max_tokens: int = -1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = -1
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __attrs_post_init__(self) -> None:
        for field, rule in RULES.items():
            object.__setattr__(self, field, rule(field, getattr(self, field)))

    @property
    def greedy(self) -> bool:
        """No noise: argmax, the lowest id on ties (spec S23)."""
        return self.top_k == 1 or self.temperature < GREEDY_TEMPERATURE

    def clone(self, **changes: Any) -> SamplingParams:
        """The same with some fields changed, validated again."""
        return attrs.evolve(self, **changes)


@attrs.frozen(eq=False)
class SequenceSpec:
    """One sequence, complete: nothing in it is left to a default.

    prompt_ids: int32 [P]. `params` has its seed drawn. `eos_ids` is the set E of docs/spec/engine.md 5.2.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    choice: int = 0


CLIENT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"lib": {}, "cli": {"temperature": 0.0}}
"""What a client asks for where nobody says anything (spec D2): the library is neutral, a command repeats itself."""


@attrs.frozen
class Resolved:
    """Effective parameters, where each value came from, and accepted values that cannot act."""

    params: SamplingParams
    origin: Mapping[str, str]
    warnings: tuple[str, ...] = ()


def resolve_sampling(
    client: str,
    given: Mapping[str, Any],
    *,
    given_origin: str = "flag",
    generation_config: Mapping[str, Any] | None = None,
    fresh_seed: Callable[[], int],
) -> Resolved:
    """The one place where "not given" becomes a value, for every client (spec E0b, docs/spec/clients.md 0.1).

    `given` holds only what was said (None counts as not said); `generation_config` what its mode lets through;
    `fresh_seed` is asked once when no seed was said, and its draw is reported like any other value.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(RULES, "default")
    layers = (
        ("default", CLIENT_DEFAULTS[client]),
        ("generation_config", generation_config or {}),
        (given_origin, given),
    )
    for name, layer in layers:
        for field, value in layer.items():
            if value is not None:
                values[field] = value
                origin[field] = name
    params = SamplingParams(**values)
    if params.seed == -1:
        params = params.clone(seed=fresh_seed())
    return Resolved(params, origin, _inert(params, origin))


def _inert(params: SamplingParams, origin: Mapping[str, str]) -> tuple[str, ...]:
    """Accepted values that cannot change this reply (spec S9)."""
    if not params.greedy:
        return ()
    idle = [field for field in ("top_k", "top_p", "min_p", "seed") if origin[field] in ("flag", "request")]
    if params.top_k == 1 and "top_k" in idle:
        idle.remove("top_k")
    return tuple(f"{field} has no effect: the reply is greedy" for field in idle)
