"""The OpenAPI document: every route, every field, and nothing that is not there (docs/spec/clients.md 3.2)."""

import json
import math
import re
from typing import Any

import msgspec
import pytest
from starlette.routing import Route
from test_server_parameters import RANGES

from mlxcel.core.named import load_target
from mlxcel.core.param_table import FIELDS
from mlxcel.server.app import create_app
from mlxcel.server.openapi import BODIES, openapi


@pytest.fixture(scope="module")
def routes() -> list[Any]:
    return list(create_app().routes)


@pytest.fixture(scope="module")
def document(routes: list[Any]) -> dict[str, Any]:
    made = openapi(routes)
    return dict(json.loads(json.dumps(made)))


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [each for part in value.values() for each in references(part)]
    return [each for part in value for each in references(part)] if isinstance(value, list) else []


def properties(document: dict[str, Any], name: str) -> dict[str, Any]:
    schema = document["components"]["schemas"][name]
    found: dict[str, Any] = {}
    for part in schema.get("allOf", [schema]):
        found |= properties(document, part["$ref"].rpartition("/")[2]) if "$ref" in part else part["properties"]
    return found


def test_every_route_is_there_with_its_methods(routes: list[Any], document: dict[str, Any]) -> None:
    wanted = {
        (re.sub(r"{(\w+):\w+}", r"{\1}", route.path), method.lower())
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == wanted
    assert ("/openapi.json", "get") in wanted
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"].strip() for operation in operations)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    found = references(document)
    assert found
    assert {reference.removeprefix("#/components/schemas/") for reference in found} <= set(schemas)


@pytest.mark.parametrize("path", BODIES)
def test_a_body_has_the_fields_that_are_read(document: dict[str, Any], path: str) -> None:
    """Generated from the record that reads it, sampling fields under all of their names."""
    kind = load_target(BODIES[path])
    operation = document["paths"][path]["post"]
    (reference,) = references(operation["requestBody"])
    found = properties(document, reference.rpartition("/")[2])
    own = {field.encode_name: field for field in msgspec.structs.fields(kind) if field.name != "sampling"}
    sampling = {name for field in FIELDS for name in (field.name, *field.other)} if kind.samples else set()
    assert set(found) == own.keys() | sampling
    streams = "text/event-stream" in operation["responses"]["200"]["content"]
    assert streams is ("stream" in own)
    for name, field in own.items():
        nullable = {"type": "null"} in found[name].get("anyOf", ())
        assert nullable is not field.required or name in ("prompt", "messages")


def test_failures_are_told_in_the_shape_of_the_route(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            statuses = set(operation["responses"])
            assert {"200", "400", "401", "404", "405", "413", "415", "500", "503"} <= statuses
            shape = "anthropic" if path.startswith("/v1/messages") else None
            for status in statuses - {"200"}:
                (reference,) = references(operation["responses"][status])
                assert shape is None or reference.endswith(f"error_{shape}")


@pytest.mark.parametrize("field", [field for field in RANGES if "logprobs" not in field])
def test_ranges_are_those_that_hold(document: dict[str, Any], field: str) -> None:
    """What the schema of a number takes is taken, and the ends of the range are in it."""
    kind = properties(document, "Sampling")[field]["anyOf"][0]
    if kind.get("type") not in ("integer", "number"):
        return
    low, high = kind.get("minimum", kind.get("exclusiveMinimum")), kind.get("maximum", math.inf)
    taken, refused = ([each for each in values if type(each) in (int, float)] for values in RANGES[field])
    assert taken
    assert all(low <= value <= high for value in taken)
    below = [value for value in refused if value < min(taken) and value == int(value)]
    assert all(value < low or ("exclusiveMinimum" in kind and value == low) for value in below)
