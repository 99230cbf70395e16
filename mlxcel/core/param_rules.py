"""Rules for values that come from outside: (field, value) -> the value in its own type, or a RequestError."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from mlxcel.errors import RequestError, shown

Rule = Callable[[str, Any], Any]
"""(field, value) -> the value in its own type, or RequestError with field, value and range."""

MOST_TOKENS = 2**63 - 1
MOST_ID = 2**31 - 1


def refused(field: str, words: str, value: Any) -> RequestError:
    return RequestError(f"{field} must be {words}, not {shown(value)}", field=field)


def real(low: float, high: float, words: str, *, above: bool = False, also: float | None = None) -> Rule:
    """A finite number from `low` (above it, with `above`) to `high`, or the one value `also`. Booleans are none."""

    def check(field: str, value: Any) -> float:
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Real) else value
        fits = low <= number <= high and math.isfinite(number) and not (above and number == low)
        if not fits and number != also:
            raise refused(field, f"a number {words}", value)
        return float(number)

    return check


def whole(low: int, high: int, words: str) -> Rule:
    """An integer from `low` to `high`. Booleans and floats are none."""

    def check(field: str, value: Any) -> int:
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Integral) else value
        if not low <= number <= high:
            raise refused(field, f"an integer {words}", value)
        return int(number)

    return check


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refused(field, "true or false", value)
    return value


def optional(rule: Rule) -> Rule:
    return lambda field, value: None if value is None else rule(field, value)


def one_of(*words: str, spellings: dict[str, str] | None = None) -> Rule:
    """One of the words, or a spelling of one."""

    def check(field: str, value: Any) -> str:
        word = (spellings or {}).get(value, value) if isinstance(value, str) else value
        if word not in words:
            raise refused(field, f"one of {', '.join(words)}", value)
        return str(word)

    return check


def ids(most: int | None, words: str, *, empty: bool = True) -> Rule:
    """A list of token ids, each once, in order."""
    each = whole(0, MOST_ID, "of 0 or more in each place")

    def check(field: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple | set | frozenset):
            raise refused(field, words, value)
        if (most is not None and len(value) > most) or not (value or empty):
            raise RequestError(f"{field} must be {words}, not {len(value)} of them", field=field)
        return tuple(sorted({each(field, item) for item in value}))

    return check


def strings(most: int, longest: int | None, words: str) -> Rule:
    """A string or a list of at most `most`, each of 1 to `longest` UTF-8 bytes; what occurs twice counts once."""

    def check(field: str, value: Any) -> tuple[str, ...]:
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise refused(field, words, value)
        if len(items) > most:
            raise RequestError(f"{field} must be {words}, not {len(items)} of them", field=field)
        for item in items:
            if not isinstance(item, str) or not item or not _encodable(item, longest):
                raise refused(field, words, item)
        return tuple(dict.fromkeys(items))

    return check


def _encodable(text: str, longest: int | None) -> bool:
    """Whether it is UTF-8 of at most `longest` bytes. A lone surrogate is none."""
    if longest is not None and len(text) > longest:
        return False
    try:
        return longest is None or len(text.encode()) <= longest
    except UnicodeEncodeError:
        return False
