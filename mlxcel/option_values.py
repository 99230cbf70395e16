"""Kinds of option values: each says in words what it takes, and reads it from text (a flag, a variable) or from data
(a keyword, a key of the configuration file). Strict: `nan`, `inf` and `1_0` are no numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from mlxcel.core.param_records import LOOP_DETECTION as LOOP_DETECTION_RULE
from mlxcel.core.param_records import LoopDetection

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_REAL: Final = re.compile(r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_SIZE: Final = re.compile(r"([0-9]{1,20})([KMGT]?)", re.ASCII | re.IGNORECASE)
_DEVICE: Final = re.compile(r"auto|cpu|cuda(?::[0-9]{1,3})?", re.ASCII)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MAX_WHOLE: Final = 2**63 - 1
_FAR: Final = 10**40  # beyond what _WHOLE takes


@attrs.frozen
class Kind:
    """`words` completes the sentence "must be ...". Both readers raise ValueError for anything else."""

    metavar: str
    words: str
    from_text: Callable[[str], Any]
    from_data: Callable[[Any], Any]


def _refuse(value: Any) -> Any:
    raise ValueError(value)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else str(_refuse(value))


def whole(low: int = -_FAR, high: int = _FAR, words: str = "an integer", metavar: str = "N") -> Kind:
    """An integer from `low` to `high`; without them its range is checked by whoever owns the field."""

    def from_data(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            _refuse(value)
        return int(value)

    def from_text(text: str) -> int:
        return from_data(int(text)) if _WHOLE.fullmatch(text) else int(_refuse(text))

    return Kind(metavar, words, from_text, from_data)


def real(words: str = "a number", metavar: str = "X") -> Kind:
    """A finite number; its range is checked by whoever owns the field."""

    def from_data(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _refuse(value)
        return float(value)

    def from_text(text: str) -> float:
        return from_data(float(text)) if _REAL.fullmatch(text) else float(_refuse(text))

    return Kind(metavar, words, from_text, from_data)


def real_in(low: float, high: float, words: str, metavar: str = "X", *, above: bool = False) -> Kind:
    """A number from `low` to `high`, or `above` low."""
    any_number = real()

    def within(value: float) -> float:
        return value if low <= value <= high and not (above and value == low) else float(_refuse(value))

    return Kind(
        metavar,
        words,
        lambda text: within(any_number.from_text(text)),
        lambda value: within(any_number.from_data(value)),
    )


def _switch_text(text: str) -> bool:
    return text == "1" if text in ("0", "1") else bool(_refuse(text))


def _switch_data(value: Any) -> bool:
    return value if isinstance(value, bool) else bool(_refuse(value))


SWITCH: Final = Kind("", "1 or 0 (true or false in a file)", _switch_text, _switch_data)

ON_OFF: Final = Kind("", SWITCH.words, _switch_text, _switch_data)
"""A switch that has no value of its own until somebody says on or off."""


def _name(value: Any) -> str:
    text = _string(value)
    return text if text.strip() and "\0" not in text else str(_refuse(value))  # no file or plugin has a NUL in its name


NAME: Final = Kind("NAME", "a name", _name, _name)
TEXT: Final = Kind("TEXT", "text", _string, _string)
FILE: Final = Kind("FILE", "the name of a file", _name, _name)


def _device(value: Any) -> str:
    text = _string(value)
    return text if _DEVICE.fullmatch(text) else str(_refuse(value))


DEVICE: Final = Kind("auto|cuda|cuda:N|cpu", "auto, cuda, cuda:N (the GPU of that number) or cpu", _device, _device)


def one_of(*names: str) -> Kind:
    """One of fixed names."""

    def read(value: Any) -> str:
        return str(value) if value in names else str(_refuse(value))

    return Kind("|".join(names), f"one of {', '.join(names)}", read, read)


def _size_text(text: str) -> int | None:
    if text == "auto":
        return None
    found = _SIZE.fullmatch(text)
    return _size_data(int(found[1]) * 1024 ** _POWERS[found[2].upper()]) if found else int(_refuse(text))


def _size_data(value: Any) -> int | None:
    if isinstance(value, str):
        return _size_text(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_WHOLE:
        _refuse(value)
    return int(value)


SIZE: Final = Kind(
    "auto|BYTES", "auto or a number of bytes, with K, M, G or T for powers of 1024", _size_text, _size_data
)
"""None stands for `auto`."""


CAPACITY: Final = Kind(
    "auto|BYTES",
    "auto, 0 or a number of bytes, with K, M, G or T for powers of 1024",
    lambda text: 0 if text == "0" else _size_text(text),
    lambda value: 0 if value == 0 and not isinstance(value, bool) else _size_data(value),
)
"""None stands for `auto`."""


def _bytes_text(text: str) -> int:
    return _bytes_data(_size_text(text))


def _bytes_data(value: Any) -> int:
    return int(_refuse(value)) if (size := _size_data(value)) is None else size


BYTES: Final = Kind("BYTES", "a number of bytes, with K, M, G or T for powers of 1024", _bytes_text, _bytes_data)


def _object_text(text: str) -> Mapping[str, Any]:
    try:
        return _object_data(json.loads(text, parse_constant=_refuse))
    except RecursionError:
        _refuse(text)
        raise


def _object_data(value: Any) -> Mapping[str, Any]:
    return dict(value) if isinstance(value, Mapping) else dict(_refuse(value))


JSON_OBJECT: Final = Kind("JSON", "a JSON object", _object_text, _object_data)


def _names_text(text: str) -> tuple[str, ...]:
    return (_name(text),)


def _names_data(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return _names_text(value)
    if not isinstance(value, list | tuple) or not value:
        _refuse(value)
    return tuple(_name(item) for item in value)


NAMES: Final = Kind("NAME", "a name, or a list of names", _names_text, _names_data)


def _loop_text(text: str) -> LoopDetection:
    if text in ("off", "on"):
        return LoopDetection() if text == "on" else LOOP_OFF
    parts = text.split(",")
    return _loop_data([int(part) if _WHOLE.fullmatch(part) else _refuse(text) for part in parts])


def _loop_data(value: Any) -> LoopDetection:
    if isinstance(value, str):
        return _loop_text(value)
    if isinstance(value, list | tuple):
        if len(value) != 3:
            _refuse(value)
        value = dict(zip(("min_pattern", "max_pattern", "min_count"), value, strict=True))
    found: LoopDetection | None = LOOP_DETECTION_RULE("loop_detection", value)  # RequestError is a ValueError
    return LOOP_OFF if found is None else found


LOOP_OFF: Final = LoopDetection(max_pattern=0)
LOOP_DETECTION: Final = Kind(
    "off|on|MIN,MAX,COUNT",
    "off, on, or MIN,MAX,COUNT with patterns of 0 to 64 and a count of 0 to 1000",
    _loop_text,
    _loop_data,
)
"""`on` is 1,20,12 (spec F19)."""
