"""What a client asks for: sampling parameters, validated once for everybody, and the spec of one sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import attrs
import numpy as np

from mlxcel.errors import RequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy (spec S23)."""

MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20


def _number(field: str, value: Any, low: float, high: float, words: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{field} must be a number {words}, not {value!r}", field=field)
    return float(value)


def _integer(field: str, value: Any, low: int, high: int, words: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= value <= high:
        raise RequestError(f"{field} must be an integer {words}, not {value!r}", field=field)
    return int(value)


def _real(low: float, high: float, words: str) -> Any:
    def convert(value: Any, self_: Any, field: attrs.Attribute[Any]) -> float:
        return _number(field.name, value, low, high, words)

    return attrs.Converter(convert, takes_self=True, takes_field=True)


def _whole(low: int, high: int, words: str) -> Any:
    def convert(value: Any, self_: Any, field: attrs.Attribute[Any]) -> int:
        return _integer(field.name, value, low, high, words)

    return attrs.Converter(convert, takes_self=True, takes_field=True)


def _flag(value: Any, self_: Any, field: attrs.Attribute[Any]) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise RequestError(f"{field.name} must be true or false, not {value!r}", field=field.name)
    return bool(value)


def _stop_ids(value: Any, self_: Any, field: attrs.Attribute[Any]) -> tuple[int, ...]:
    words = f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise RequestError(f"{field.name} must be {words}, not {value!r}", field=field.name)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"{field.name} must be {words}, not {len(value)} of them", field=field.name)
    return tuple(dict.fromkeys(_integer(field.name, item, 0, 2**31 - 1, "of 0 or more in its list") for item in value))


def _optional_logprobs(value: Any, self_: Any, field: attrs.Attribute[Any]) -> int | None:
    return None if value is None else _integer(field.name, value, 0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}")


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a reply ends. Every value is checked when it is built (docs/spec/clients.md 0.3).

    The defaults are the library's: neutral. Other clients fill in theirs with `resolve_sampling`.
    """

    max_tokens: int = attrs.field(default=-1, converter=_whole(-1, 2**63 - 1, "of -1 (to the context's end) or more"))
    temperature: float = attrs.field(default=1.0, converter=_real(0, 100, "from 0 to 100"))
    top_k: int = attrs.field(default=0, converter=_whole(-1, 2**63 - 1, "of 1 or more, or 0 or -1 for off"))
    top_p: float = attrs.field(default=1.0, converter=_real(0, 1, "from 0 to 1"))
    min_p: float = attrs.field(default=0.0, converter=_real(0, 1, "from 0 to 1"))
    seed: int = attrs.field(default=-1, converter=_whole(-1, 2**63 - 1, "from 0 to 2**63 - 1, or -1 for a fresh one"))
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(), converter=attrs.Converter(_stop_ids, takes_self=True, takes_field=True)
    )
    logprobs: int | None = attrs.field(
        default=None, converter=attrs.Converter(_optional_logprobs, takes_self=True, takes_field=True)
    )
    skip_special_tokens: bool = attrs.field(
        default=True, converter=attrs.Converter(_flag, takes_self=True, takes_field=True)
    )

    @property
    def greedy(self) -> bool:
        """No noise: argmax, the lowest id on ties (spec S23)."""
        return self.top_k == 1 or self.temperature < GREEDY_TEMPERATURE

    def clone(self, **changes: Any) -> SamplingParams:
        """The same with some fields changed, validated again."""
        return attrs.evolve(self, **changes)


def field_names() -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(SamplingParams))


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
