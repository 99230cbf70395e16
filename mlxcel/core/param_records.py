"""Parameters that are more than one value: biases, loop detection, logits processors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from mlxcel.core.param_rules import TOKEN_ID, Rule, fits_in_bytes, real, refused, too_many, whole
from mlxcel.errors import RequestError, shown

MOST_BIASES = 1024

LogitBias = tuple[tuple[int | str, float | None], ...]
"""(token id, what is added to its logit; None: never drawn). A text stands for each of its tokens, until `bind_params`
has put their ids in its place."""


class _AddedUp(tuple[tuple[int | str, float | None], ...]):
    """Entries that were checked one by one and then added up: a sum may lie beyond what one entry may be."""

    __slots__ = ()


_BIAS_WORDS = f"at most {MOST_BIASES} pairs of a token id or a text and a number from -100 to 100, or false for never"
_ADDED = real(-100, 100, "from -100 to 100, or false for never")


def _logit_bias(field: str, value: Any) -> LogitBias:
    """[[id or text, value or false], …] or {"id": value}; values for one token add up, and false wins."""
    if isinstance(value, _AddedUp):
        return value
    if not isinstance(value, Mapping | list | tuple):
        raise refused(field, _BIAS_WORDS, value)
    if len(value) > MOST_BIASES:
        raise too_many(field, _BIAS_WORDS, len(value))
    if isinstance(value, Mapping):
        entries = [_entry(f'{field}["{_plain(key)}"]', key, added) for key, added in value.items()]
    else:
        entries = [_pair(f"{field}[{place}]", pair) for place, pair in enumerate(value)]
    return added_up((token, None if added is False else _ADDED(where, added)) for where, token, added in entries)


def added_up(entries: Iterable[tuple[int | str, float | None]]) -> LogitBias:
    """One entry for each token, the sum of its own; None, never, wins."""
    found: dict[int | str, float | None] = {}
    for token, amount in entries:
        before = found.get(token, 0.0)
        found[token] = None if before is None or amount is None else before + amount
    return _AddedUp(found.items())


def _entry(where: str, key: Any, added: Any) -> tuple[str, int | str, Any]:
    """A key of a JSON object is a string, and means an id."""
    number = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
    return where, TOKEN_ID(where, number), added


def _plain(key: Any) -> str:
    return shown(key)[1:-1] if isinstance(key, str) else shown(key)


def _pair(where: str, pair: Any) -> tuple[str, int | str, Any]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise refused(where, "a pair of a token id or a text and a number, or false", pair)
    token, added = pair
    if not isinstance(token, str):
        token = TOKEN_ID(where, token)
    elif not token or not fits_in_bytes(token, 1024):
        raise refused(where, "a token id or a text of 1 to 1024 bytes of UTF-8", token)
    return where, token, False if added is None and isinstance(pair, tuple) else added


LOGIT_BIAS = Rule(_BIAS_WORDS, _logit_bias)


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


_LOOP_CAPS = {"min_pattern": 64, "max_pattern": 64, "min_count": 1000}
_LOOP_WORDS = "null or {min_pattern, max_pattern, min_count} with patterns of at most 64 and counts of at most 1000"


def _loop_detection(field: str, value: Any) -> LoopDetection | None:
    """Parts that are not given are those of LoopDetection (spec F19)."""
    if value is None:
        return None
    given = attrs.asdict(value) if isinstance(value, LoopDetection) else value
    if not isinstance(given, Mapping):
        raise refused(field, _LOOP_WORDS, value)
    if unknown := [name for name in given if name not in _LOOP_CAPS]:
        raise RequestError(f"{field} has no {shown(unknown[0])}: it has {', '.join(_LOOP_CAPS)}", field=field)
    checked = {
        name: whole(0, cap, f"from 0 to {cap}")(f"{field}.{name}", given[name])
        for name, cap in _LOOP_CAPS.items()
        if given.get(name) is not None
    }
    made = attrs.evolve(LoopDetection(), **checked)
    if made.max_pattern and made.min_pattern > made.max_pattern:
        where = f"{field}.min_pattern"
        raise RequestError(f"{where} {made.min_pattern} is above max_pattern {made.max_pattern}", field=where)
    return attrs.evolve(made, min_pattern=max(1, made.min_pattern))


LOOP_DETECTION = Rule(_LOOP_WORDS, _loop_detection)


@attrs.frozen
class Processor:
    """A registered logits processor by name, and its arguments as JSON text: hashable, and decoded where it is made."""

    name: str
    args: str = "{}"


MOST_PROCESSORS = 16
_MOST_ARGS = 1 << 16
_PROCESSOR_WORDS = f"a list of at most {MOST_PROCESSORS} of {{name, args}}, args being a JSON object"


def _processors(field: str, value: Any) -> tuple[Processor, ...]:
    if not isinstance(value, list | tuple):
        raise refused(field, _PROCESSOR_WORDS, value)
    if len(value) > MOST_PROCESSORS:
        raise too_many(field, _PROCESSOR_WORDS, len(value))
    return tuple(_processor(f"{field}[{place}]", item) for place, item in enumerate(value))


def _processor(where: str, item: Any) -> Processor:
    if isinstance(item, Processor):
        return item
    if not isinstance(item, Mapping) or set(item) - {"name", "args"}:
        raise refused(where, "{name, args}", item)
    name, args = item.get("name"), item.get("args")
    if not isinstance(name, str) or not name:
        raise refused(f"{where}.name", "the name of a logits processor", name)
    if args is not None and not isinstance(args, Mapping):
        raise refused(f"{where}.args", "a JSON object", args)
    try:
        text = json.dumps(args or {}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where}.args is no JSON: {shown(str(error))}", field=f"{where}.args") from None
    if len(text) > _MOST_ARGS:
        raise RequestError(f"{where}.args is {len(text)} bytes of JSON, at most {_MOST_ARGS}", field=f"{where}.args")
    return Processor(name, text)


PROCESSORS = Rule(_PROCESSOR_WORDS, _processors)
