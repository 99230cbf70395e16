"""Operations that make much of little: what each would come to is charged before it runs.

A guard knows the operation by its name in Jinja or in Python; what has no guard makes no more than it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Final

from jinja2.exceptions import SecurityError

from mlxcel.text.template_work import CALL, CHARACTER, ITEM, WEIGHED_ITEM, Meter

MAX_WIDTH: Final = 4096  # of a padding, an indentation, a batch
MAX_DIGITS: Final = 4300  # Python's own bound for numbers as text, here for every base
MAX_BITS: Final = 4096  # of a product or a power
MAX_PAD_TEXT: Final = 256  # characters of a text that is repeated at each line or item

DROPPED_FILTERS: Final = ("random", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Not the same in equal requests, or made for web pages and slower than their text is long."""

COMPARING_TESTS: Final = (
    *("in", "==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
    *("lower", "upper"),
)

_WHOLE: Final = frozenset({"length", "count", "first", "default", "d", "attr"})  # do not go through their value
_ITEMWISE: Final = frozenset(  # go through it, and not into its items
    {"list", "map", "select", "reject", "selectattr", "rejectattr", "reverse", "last", "batch", "slice", "items"}
)

_PADDED: Final = frozenset({"center", "indent", "batch", "slice", "round", "tojson", "truncate"})
_FORMAT_FIELD: Final = re.compile(r"\{[^{}]*\}")
_PERCENT_FIELD: Final = re.compile(r"%(?:\([^()]*\))?([^%a-zA-Z]*)")
_NESTED_FIELD: Final = re.compile(r"\{[^{}]*\{")


def guard_filter(meter: Meter, name: str, values: list[Any], options: Mapping[str, Any]) -> None:
    """`values` are the filter's value and its arguments; an iterator among them is replaced by one that is charged."""
    meter.charge(CALL)
    if values and isinstance(values[0], Iterator):
        values[0] = list(meter.counted(values[0])) if name == "join" else meter.counted(values[0])
    value, arguments = (values[0] if values else None), [*values[1:], *options.values()]
    characters = 0
    if name in _ITEMWISE:
        meter.charge(ITEM * len(value) if isinstance(value, str | list | tuple | dict | range) else 0)
    elif name not in _WHOLE:
        characters = meter.weigh(value)
        meter.room(characters)
    for argument in arguments:
        meter.weigh(argument)
    if name in _PADDED:
        _refuse_padding(arguments, numbers=name != "truncate")
    if name == "join":
        separator = values[1] if len(values) > 1 else options.get("d", "")
        meter.room(characters + meter.weigh(separator) * len(value) if isinstance(value, list | tuple) else characters)
    elif name == "replace":
        _replace(meter, str(value), *map(str, arguments[:2]))
    elif name == "indent":
        width = max((a if isinstance(a, int) else len(a) for a in arguments if isinstance(a, int | str)), default=4)
        meter.room(characters + (str(value).count("\n") + 1) * width)
    elif name == "format":
        guard_percent(meter, str(value), arguments)
    elif name == "int" and characters > MAX_DIGITS:
        raise SecurityError(f"a number of more than {MAX_DIGITS} digits")
    elif name == "sum" and not all(isinstance(a, int | float | str | None) for a in arguments):
        raise SecurityError("sum adds numbers")


def guard_method(meter: Meter, name: str, owner: Any, arguments: Sequence[Any]) -> None:
    """A method of a text, list or dict; those of numbers and bytes are no business of a template."""
    meter.charge(CALL + WEIGHED_ITEM * len(arguments))
    weight = sum(map(meter.weigh, arguments))
    if isinstance(owner, list | tuple):  # count and index compare with each item
        meter.charge(CHARACTER * weight * len(owner) + ITEM * len(owner))
    elif isinstance(owner, dict):
        meter.charge(ITEM * len(owner))
    elif isinstance(owner, str):
        _guard_text_method(meter, name, owner, arguments)
    elif isinstance(owner, int | float | bytes):
        raise SecurityError(f"access to method {name!r} of {type(owner).__name__!r} object is unsafe")


def _guard_text_method(meter: Meter, name: str, text: str, arguments: Sequence[Any]) -> None:
    meter.room(len(text))
    if name == "expandtabs":
        _refuse_padding(arguments)
        meter.room(len(text) + text.count("\t") * max((a for a in arguments if isinstance(a, int)), default=8))
    elif name == "replace":
        _replace(meter, text, *map(str, arguments[:2]))
    elif name == "join":
        meter.room(len(text) * sum(len(argument) for argument in arguments if isinstance(argument, Sized)))
    elif name == "translate":
        longest = [len(v) for a in arguments if isinstance(a, dict) for v in a.values() if isinstance(v, str)]
        meter.room(len(text) * max(longest, default=1))
    elif name in ("split", "rsplit", "splitlines"):
        by = arguments[0] if arguments and isinstance(arguments[0], str) and name != "splitlines" else ""
        meter.charge(ITEM * (text.count(by) + 1 if by else len(text) // 2 + 1))
    elif name in ("center", "ljust", "rjust", "zfill"):
        _refuse_padding(arguments)


def guard_format(meter: Meter, text: str, arguments: Any) -> None:
    """`text.format(…)`."""
    if _NESTED_FIELD.search(text.replace("{{", "")):
        raise SecurityError("a width that is computed")
    _room_for_fields(meter, text, _FORMAT_FIELD.findall(text), arguments)


def guard_percent(meter: Meter, text: str, right: Any) -> None:
    """`text % right`."""
    fields = _PERCENT_FIELD.findall(text)
    if any("*" in field for field in fields):
        raise SecurityError("a width that is computed")
    _room_for_fields(meter, text, fields, right)


def guard_operator(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """`+`, `*`, `**` and `%`."""
    if operator == "%" and isinstance(left, str):
        guard_percent(meter, left, right)
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
            raise SecurityError(f"a power of more than {MAX_BITS} bits")
    elif operator == "+":
        _charge_items(meter, left, 1, right)
        _charge_items(meter, right, 1, left)
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError(f"a product of more than {MAX_BITS} bits")
        else:
            _charge_items(meter, left, right)
            _charge_items(meter, right, left)


def _room_for_fields(meter: Meter, text: str, fields: Sequence[str], values: Any) -> None:
    """Each field may write all of the values, in its width."""
    width = max((int(number[:9]) for field in fields for number in re.findall(r"\d+", field)), default=0)
    if width > MAX_WIDTH:
        raise SecurityError(f"a width of more than {MAX_WIDTH}")
    meter.room(len(text) + len(fields) * (meter.weigh(values) + width))


def _charge_items(meter: Meter, value: Any, times: Any, beside: Any = "") -> None:
    if not isinstance(times, int) or times < 1:
        return
    if isinstance(value, str | bytes):
        meter.room(len(value) * times + (len(beside) if isinstance(beside, str | bytes) else 0))
    elif isinstance(value, list | tuple):
        meter.charge(ITEM * len(value) * times)


def _replace(meter: Meter, text: str, old: str = "", new: str = "") -> None:
    found = text.count(old) if old else len(text) + 1
    meter.room(len(text) + found * len(new))


def _refuse_padding(arguments: Sequence[Any], *, numbers: bool = True) -> None:
    for argument in arguments:
        if numbers and isinstance(argument, int) and abs(argument) > MAX_WIDTH:
            raise SecurityError(f"a width of more than {MAX_WIDTH}")
        if isinstance(argument, str) and len(argument) > MAX_PAD_TEXT:
            raise SecurityError(f"padding of more than {MAX_PAD_TEXT} characters")
        if isinstance(argument, list | tuple):
            _refuse_padding(argument, numbers=numbers)
