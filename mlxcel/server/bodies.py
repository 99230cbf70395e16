"""From the bytes of a request to the fields of its route: every fault by the path that the client wrote
(docs/spec/clients.md 3.3 to 3.5)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import Request

from mlxcel.core.request_names import OUR_NAME, REFUSED, canonical
from mlxcel.errors import RequestError, shown
from mlxcel.server.errors import UnknownField
from mlxcel.server.fields import Body
from mlxcel.server.json_in import inside, parse_json
from mlxcel.server.known_fields import IDLE, UNSUPPORTED, check_known
from mlxcel.server.refusals import UnsupportedMediaType
from mlxcel.server.state import ServerState

JSON: Final = "application/json"
PLAIN: Final = "identity"

MOST_TEXT: Final = 64 << 10
"""Bytes of one string that is neither a prompt nor the content of a message."""

LONG_TEXTS: Final = frozenset({"prompt", "content", "text", "system"})
"""Names, at any depth, of what the body may hold as much of as it likes."""

_PLACE: Final = re.compile(r"(?s)(.*) - at `\$(.*)`")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[([0-9]+)\]")
_TYPES: Final[Mapping[str, str]] = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "object": "an object",
    "array": "a list",
}

B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B]) -> B:
    """The fields of `kind` that the body gives, those of sampling in `sampling` as they were written; null is "not
    given". The first fault in the body's order counts. A long body is read off the event loop, and one at a time: as
    Python's objects it may be seconds of work and many times its size.

    UnsupportedMediaType; RequestError, UnsupportedField, and under `--strict` UnknownField.
    """
    media = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media != JSON:
        raise UnsupportedMediaType(f"the body is {shown(media)}, {JSON} is read here", hint=f"send `{JSON}`")
    if (encoding := request.headers.get("content-encoding", PLAIN).strip().lower()) != PLAIN:
        raise UnsupportedMediaType(f"the body's encoding is {shown(encoding)}, none is read here", hint="send it plain")
    body = bytearray()
    async for part in request.stream():
        body += part  # parts may be of a byte each, and an object of Python's for each would be many times the body
    server: ServerState = request.app.state.server
    reader = _Reader(kind, strict=server.settings.strict, long=len(body) > MOST_TEXT)
    if len(body) > MOST_TEXT:
        async with server.long_bodies:
            made: B = await asyncio.to_thread(_read, body, reader)
    else:
        made = _read(body, reader)
    for name in reader.unknown:
        server.unknown.ignored(name, f"{request.method} {request.url.path}")
    return made


def _read(body: bytearray, reader: _Reader) -> Any:
    document = parse_json(body)
    if not isinstance(document, dict):
        raise RequestError(f"the body is {shown(document)}, a JSON object is needed")
    return reader.read(document)


class _Reader:
    """Takes a body apart, field by field."""

    def __init__(self, kind: type[Any], *, strict: bool, long: bool) -> None:
        self._kind, self._strict, self._long = kind, strict, long
        self._types = {field.encode_name: field for field in msgspec.structs.fields(kind) if field.name != "sampling"}
        self.unknown: list[str] = []

    def read(self, document: Mapping[str, Any]) -> Any:
        values: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        try:
            for name, value in document.items():
                self._field(name, value, values, sampling)
        except RequestError:
            canonical(sampling)  # what came before it may have a fault as well
            raise
        canonical(sampling)
        for name, field in self._types.items():
            if field.required and field.name not in values:
                raise RequestError(f"{name} is missing or null, it is needed", field=name)
        return self._kind(**values, sampling=sampling)

    def _field(self, name: str, value: Any, values: dict[str, Any], sampling: dict[str, Any]) -> None:
        if self._long:
            _refuse_long({name: value}, "")
        if name in self._types:
            if value is not None:
                field = self._types[name]
                values[field.name] = converted(value, field.type, name)
                self._nested(name, value, values[field.name])
        elif self._kind.samples and (name in OUR_NAME or name in REFUSED):
            sampling[name] = value
        elif name in UNSUPPORTED or (self._kind.samples and name in IDLE):
            check_known(name, value, strict=self._strict)
        else:
            self._unknown(name, self._known)

    def _nested(self, name: str, value: Any, made: Any) -> None:
        """Fields of a record inside the body that it does not know."""
        if isinstance(made, msgspec.Struct) and isinstance(value, Mapping):
            known = [field.encode_name for field in msgspec.structs.fields(made)]
            for each in value:
                if each not in known:
                    self._unknown(inside(name, each), lambda: [inside(name, every) for every in known])

    def _unknown(self, path: str, known: Callable[[], list[str]]) -> None:
        if not self._strict:
            self.unknown.append(path)
            return
        near = get_close_matches(path[:64], known(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "leave it out, or ask without --strict"
        raise UnknownField(f"{shown(path)} is not a field of this route", field=path[:256], hint=hint)

    def _known(self) -> list[str]:
        names = set(self._types)
        if self._kind.samples:
            names.update(OUR_NAME, IDLE)
        return sorted(names)


def converted(value: Any, kind: Any, path: str) -> Any:
    """A value as its type has it. RequestError, whose field is the path of what is wrong."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        words, steps = str(error), ""
        if found := _PLACE.fullmatch(words):
            words, steps = found[1], found[2]
        place, given = path, value
        for key, index in _STEP.findall(steps):
            given = given[key] if key else given[int(index)]
            place = inside(place, key or int(index))
        if words.startswith("Invalid enum value"):
            words = f"Expected one of {', '.join(map(str, _named(kind)))}"
        raise RequestError(_wording(words, place, given), field=place) from None


def _named(kind: Any) -> list[Any]:
    """The values of a Literal, wherever it is inside a type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for part in get_args(kind) for value in _named(part)]


def _wording(words: str, place: str, given: Any) -> str:
    if missing := re.fullmatch(r"Object missing required field `(.*)`", words):
        return f"{place} has no {missing[1]}, which is needed"
    allowed = re.match(r"Expected (.*?)(, got .*)?$", words)
    if allowed is None:
        return f"{place} is {shown(given)}: {words}"
    said = re.sub(r"`([^`]*)`", lambda types: _in_words(types[1]), allowed[1])
    return f"{place} must be {said}, not {shown(given)}"


def _in_words(types: str) -> str:
    return " or ".join(_TYPES.get(each, each) for each in types.split(" | ") if each != "null")


def _refuse_long(value: Any, path: str) -> None:
    if isinstance(value, str):
        if len(value) > MOST_TEXT or len(value.encode()) > MOST_TEXT:
            raise RequestError(f"{path} is a string of {len(value.encode())} bytes, at most {MOST_TEXT}", field=path)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            _refuse_long(each, inside(path, place))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if len(key) > MOST_TEXT:
                where = path or "the body"
                raise RequestError(
                    f"{where} has a name of {len(key)} characters, at most {MOST_TEXT}", field=path or None
                )
            if key not in LONG_TEXTS:
                _refuse_long(each, inside(path, key))
