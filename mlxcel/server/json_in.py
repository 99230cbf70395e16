"""Bodies as JSON: read by msgspec, and where that refuses, with the place of the fault."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

import msgspec

from mlxcel.errors import RequestError
from mlxcel.text.messages import refuse_half_characters

_BYTE: Final = re.compile(r"(.*) \(byte ([0-9]+)\)")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MOST_DEPTH: Final = 128
"""Lists and objects inside one another. What is read here is read again by code that calls itself: for names that are
wrong, in templates, as a reply."""

MOST_NAME: Final = 256
"""Characters of a name in a path: a body is at liberty to have names of megabytes."""


def parse_json(body: bytes | bytearray) -> Any:
    """Plain data. RequestError with the byte at which the body is no JSON; of a body cut short that is its length.

    Half a character, which JSON can spell, is refused by the path of its field.
    """
    halves = False
    try:
        document = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        document, halves = _second_reading(body, str(error)), True
    if body.count(b"[") + body.count(b"{") > MOST_DEPTH:
        _refuse_deep(document)
    if halves:
        _refuse_halves(document, "")
    return document


def inside(path: str, key: str | int) -> str:
    """The path of a part of a value; a name that is too long stands there by its beginning."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if len(key) > MOST_NAME:
        key = f"{key[: MOST_NAME - 3]}..."
    if not path:
        return key
    return f"{path}.{key}" if _NAME.fullmatch(key) else f'{path}["{key}"]'


def _second_reading(body: bytes | bytearray, fault: str) -> Any:
    """By Python's own reader, which takes numbers beyond float64 and halves of characters, so that the one who checks
    the field can say what is wrong, and knows the place of what is wrong in JSON itself."""
    try:
        text = body.decode()
        return json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _no_json(f"{error.reason}, it must be UTF-8", error.start) from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        if fault == "Input data was truncated":
            raise _no_json("it is cut short", len(body)) from None
        found = _BYTE.fullmatch(fault)
        words = found[1].removeprefix("JSON is malformed: ") if found else error.msg
        raise _no_json(words, len(text[: error.pos].encode())) from None
    except ValueError:  # a name that JSON does not have, or an integer of more digits than Python reads
        if found := _BYTE.fullmatch(fault):
            raise _no_json("NaN and Infinity are no numbers", int(found[2])) from None
        raise RequestError("the body has a number of too many digits", hint="no field takes as many") from None


def _no_json(what: str, byte: int) -> RequestError:
    return RequestError(f"the body is no JSON: {what} (byte {byte})", hint="send one JSON object", byte=byte)


def _too_deep() -> RequestError:
    return RequestError(
        f"the body has more than {MOST_DEPTH} lists and objects inside one another",
        hint="send fewer of them inside others",
    )


def _refuse_deep(document: Any) -> None:
    """Goes down level by level, so that no depth is too much for it."""
    level = [document] if isinstance(document, list | dict) else []
    for _ in range(MOST_DEPTH):
        level = [
            each
            for value in level
            for each in (value.values() if isinstance(value, dict) else value)
            if isinstance(each, list | dict)
        ]
    if level:
        raise _too_deep()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _refuse_halves(value: Any, path: str) -> None:
    if isinstance(value, str):
        refuse_half_characters(value, path or "the body")
    elif isinstance(value, list):
        for place, each in enumerate(value):
            _refuse_halves(each, inside(path, place))
    elif isinstance(value, dict):
        for key, each in value.items():
            refuse_half_characters(key, path or "the body")
            _refuse_halves(each, inside(path, key))
