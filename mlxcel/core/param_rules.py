"""Rules for values that come from outside: (field, value) -> the value in its own type, or a RequestError."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import attrs

from mlxcel.errors import RequestError, shown

MOST_TOKENS = 2**63 - 1
MOST_ID = 2**31 - 1
SMALLEST = 2.0**-126
"""The least positive number that float32, in which sampling is done, holds at full precision."""


@attrs.frozen
class Rule:
    """What a field takes. `words` complete "must be ...", in errors and in the documentation alike."""

    words: str
    read: Callable[[str, Any], Any]

    def __call__(self, field: str, value: Any) -> Any:
        """The value in its own type; a value that was read before comes back as it is. RequestError for anything else,
        with field, value and range; its `field` is a path where the value has parts."""
        return self.read(field, value)


def refused(field: str, words: str, value: Any, *, hint: str | None = None) -> RequestError:
    return RequestError(f"{field} must be {words}, not {shown(value)}", field=field, hint=hint)


def too_many(field: str, words: str, count: int) -> RequestError:
    return RequestError(f"{field} must be {words}, not {count} of them", field=field)


def real(low: float, high: float, words: str, *, above: bool = False, also: float | None = None) -> Rule:
    """A finite number from `low` (above it, with `above`) to `high`, or the one value `also`. Booleans are none."""
    words = f"a number {words}"

    def read(field: str, value: Any) -> float:
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Real) else value
        if above and low == 0 < number < SMALLEST:
            raise refused(field, words, value, hint="float32 would take it for 0: the least it can be is 1.2e-38")
        fits = low <= number <= high and math.isfinite(number) and not (above and number == low)
        if not fits and number != also:
            raise refused(field, words, value)
        return float(number)

    return Rule(words, read)


def whole(low: int, high: int, words: str, *, also: int | None = None) -> Rule:
    """An integer from `low` to `high`, or the one value `also`. Booleans and floats are none."""
    words = f"an integer {words}"

    def read(field: str, value: Any) -> int:
        number: Any = math.nan if isinstance(value, bool) or not isinstance(value, Integral) else value
        if not low <= number <= high and number != also:
            raise refused(field, words, value)
        return int(number)

    return Rule(words, read)


def flag() -> Rule:
    words = "true or false"

    def read(field: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise refused(field, words, value)
        return value

    return Rule(words, read)


def optional(rule: Rule, absent: Any = None) -> Rule:
    """As the rule, or None, which becomes `absent`."""
    return Rule(rule.words, lambda field, value: absent if value is None else rule(field, value))


def one_of(*names: str, spellings: dict[str, str] | None = None) -> Rule:
    """One of the names, or a spelling of one."""
    words = f"one of {', '.join(names)}"

    def read(field: str, value: Any) -> str:
        name = (spellings or {}).get(value, value) if isinstance(value, str) else None
        if name is None or name not in names:
            raise refused(field, words, value)
        return name

    return Rule(words, read)


TOKEN_ID = whole(0, MOST_ID, "of 0 or more, a token id")


def ids(most: int, words: str, *, empty: bool = True) -> Rule:
    """A list of token ids, each once, in order."""

    def read(field: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple | set | frozenset):
            raise refused(field, words, value)
        if len(value) > most or not (value or empty):
            raise too_many(field, words, len(value))
        return tuple(sorted({TOKEN_ID(f"{field}[{place}]", item) for place, item in enumerate(value)}))

    return Rule(words, read)


def strings(most: int, longest: int, words: str) -> Rule:
    """A string or a list of at most `most`, each of 1 to `longest` UTF-8 bytes; what occurs twice counts once."""
    each = f"a string of 1 to {longest} bytes of UTF-8"

    def read(field: str, value: Any) -> tuple[str, ...]:
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise refused(field, words, value)
        if len(items) > most:
            raise too_many(field, words, len(items))
        for place, item in enumerate(items):
            if not isinstance(item, str) or not item or not fits_in_bytes(item, longest):
                raise refused(field if items is not value else f"{field}[{place}]", each, item)
        return tuple(dict.fromkeys(items))

    return Rule(words, read)


def fits_in_bytes(text: str, most: int) -> bool:
    """Whether it is UTF-8 of at most `most` bytes. A lone surrogate is none."""
    try:
        return len(text) <= most and len(text.encode()) <= most
    except UnicodeEncodeError:
        return False
