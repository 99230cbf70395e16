"""GET /openapi.json: the routes there are, what their bodies hold, and how they fail, from the code that reads them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from mlxcel.core.named import load_target
from mlxcel.core.param_table import FIELDS
from mlxcel.core.request_names import REFUSED
from mlxcel.server.errors import ANTHROPIC_TYPES, NATIVE_TYPES, OPENAI_TYPES, Shape, shape_of
from mlxcel.server.fields import Body
from mlxcel.server.json_out import Json
from mlxcel.server.known_fields import IDLE, UNSUPPORTED
from mlxcel.server.reply_schemas import PREFIX, REPLIES, SCHEMAS
from mlxcel.version import version

Schema = dict[str, Any]

BODIES: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "mlxcel.server.fields:Chat",
    "/chat/completions": "mlxcel.server.fields:Chat",
    "/v1/completions": "mlxcel.server.fields:Completion",
    "/completion": "mlxcel.server.native_fields:Native",
    "/completions": "mlxcel.server.native_fields:Native",
    "/v1/messages": "mlxcel.server.message_fields:Messages",
    "/v1/messages/count_tokens": "mlxcel.server.message_fields:CountTokens",
    "/tokenize": "mlxcel.server.fields:Tokenize",
    "/detokenize": "mlxcel.server.fields:Detokenize",
    "/apply-template": "mlxcel.server.fields:ApplyTemplate",
}
"""What reads the body of a POST, by path."""

_STATUSES: Final[Mapping[Shape, Mapping[int, str]]] = {
    "openai": OPENAI_TYPES,
    "native": NATIVE_TYPES,
    "anthropic": ANTHROPIC_TYPES,
}
_BETWEEN: Final = re.compile(r"(?:from|of) (-?[0-9.]+) (?:to|or more)")
_UP_TO: Final = re.compile(r"(?:from -?[0-9.]+ to|up to) ([0-9.]+)(?![0-9.*])")
_TEXTS: Final[Mapping[str, str]] = {"/": "text/html", "/assets/{name}": "*/*", "/metrics": "text/plain"}
"""Routes whose reply is no JSON, with what it is."""

_NULL: Final = {"type": "null"}
_STRING: Final = {"type": "string"}
_KINDS: Final[tuple[tuple[str, Schema], ...]] = (
    ("an integer", {"type": "integer"}),
    ("a number", {"type": "number"}),
    ("true or false", {"type": "boolean"}),
    ("one of", _STRING),
    ("at most 1024 pairs", {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "array"}}]}),
    ("at most", {"anyOf": [_STRING, {"type": "array", "items": _STRING}]}),
    ("a list of stages", {"type": "array", "items": _STRING}),
    ("null or {", {"type": "object"}),
)
"""The words of a rule, as they begin, and the type that they mean. Other lists are of ids, or of objects."""


async def document(request: Request) -> Response:
    """This document."""
    return Json(openapi(request.app.routes))


def openapi(routes: Iterable[BaseRoute]) -> Schema:
    """The document for a server that has these routes."""
    components: dict[str, Any] = dict(SCHEMAS)
    paths: dict[str, Any] = {}
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, method, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxcel", "version": version()},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(components.items()))},
    }


def sampling_schema() -> dict[str, Schema]:
    """The sampling fields under all of their names."""
    found: dict[str, Schema] = {}
    for field in FIELDS:
        kind = next((kind for words, kind in _KINDS if field.rule.words.startswith(words)), None)
        if kind is None:
            items = {"type": "object"} if "{" in field.rule.words else {"type": "integer"}
            kind = {"type": "array", "items": items}
        kind = {**kind, **_range(field.rule.words)}
        for name in (field.name, *field.other):
            kinds = [kind, {"type": "boolean"}, _NULL] if name == "logprobs" else [kind, _NULL]
            same = "" if name == field.name else f" The same as `{field.name}`."
            found[name] = {
                "anyOf": kinds,
                "description": f"{field.rule.words[0].upper()}{field.rule.words[1:]}.{same}",
            }
    return found


def _range(words: str) -> Schema:
    """What the words of a rule for a number say of it; a value that stands for "off" is in it."""
    if not words.startswith(("an integer", "a number")):
        return {}
    low, high = _BETWEEN.search(words), _UP_TO.search(words)
    lows = [float(low[1])] if low else []
    lows += [-1.0] if "-1 " in words else [0.0] if "0 for off" in words else []
    if "above 0" in words and not lows:
        return {"exclusiveMinimum": 0, **({"maximum": float(high[1])} if high else {})}
    found = {"minimum": min(lows)} if lows else {}
    return {**found, **({"maximum": float(high[1])} if high else {})}


def _operation(route: Route, path: str, method: str, components: dict[str, Any]) -> Schema:
    shape = shape_of(path)
    reply = REPLIES.get((method, path))
    schema: Schema = {} if reply is None else {"$ref": f"{PREFIX}{reply}"}
    operation: Schema = {
        "summary": (inspect.getdoc(route.endpoint) or route.name).split("\n\n")[0],
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path)}",
        "responses": {
            "200": {"description": "Done.", "content": {_TEXTS.get(path, "application/json"): {"schema": schema}}}
        },
    }
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _STRING} for name in names]
    target = BODIES.get(path) if method == "POST" else None
    if target is not None:
        kind: type[Body] = load_target(target)
        components[kind.__name__] = _body(kind, components)
        content = {"application/json": {"schema": {"$ref": f"{PREFIX}{kind.__name__}"}}}
        operation["requestBody"] = {"required": True, "content": content}
        if "stream" in {field.encode_name for field in msgspec.structs.fields(kind)}:
            operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"$ref": f"{PREFIX}Event"}}
    components[f"error_{shape}"] = _error(shape)
    for status, kind_of_error in _STATUSES[shape].items():
        schema = {"$ref": f"{PREFIX}error_{shape}"}
        operation["responses"][str(status)] = {
            "description": kind_of_error,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _body(kind: type[Body], components: dict[str, Any]) -> Schema:
    (reference,), found = msgspec.json.schema_components([kind], ref_template=PREFIX + "{name}")
    own: Schema = dict(found.pop(reference["$ref"].rpartition("/")[2]))
    components.update(found)
    properties = {name: _nullable(each) for name, each in own["properties"].items() if name != "sampling"}
    required = own.get("required", [])
    for name in required:
        properties[name] = own["properties"][name]
    known: Schema = {"type": "object", "properties": properties, "required": [*required, *kind.needs]}
    if not kind.samples:
        return known
    components["Sampling"] = {"type": "object", "properties": sampling_schema()}
    idle, refused = ", ".join(sorted(IDLE)), ", ".join(sorted(UNSUPPORTED.keys() | REFUSED.keys()))
    return {
        "allOf": [{"$ref": f"{PREFIX}Sampling"}, known],
        "description": f"Accepted without effect: {idle}. Refused by name where they ask for something: {refused}.",
    }


def _nullable(schema: Schema) -> Schema:
    """null is "not given" for every field that need not be given."""
    if _NULL in schema.get("anyOf", ()):
        return schema
    default = {name: schema[name] for name in ("default",) if name in schema}
    return {"anyOf": [{name: part for name, part in schema.items() if name not in default}, _NULL], **default}


def _error(shape: Shape) -> Schema:
    """What docs/spec/clients.md 3.5 says of the shape."""
    told: dict[str, Schema] = {"message": _STRING, "type": _STRING}
    if shape == "openai":
        told |= {name: {"anyOf": [_STRING, _NULL]} for name in ("param", "code")}
    elif shape == "native":
        told |= {"code": {"type": "integer"}}
    error: Schema = {"type": "object", "required": sorted(told), "properties": told}
    above: dict[str, Schema] = {"error": error, "request_id": _STRING}
    if shape == "anthropic":
        above["type"] = {"const": "error"}
    return {"type": "object", "required": sorted(above.keys() - {"request_id"}), "properties": above}


ROUTES: Final = [Route("/openapi.json", document)]
