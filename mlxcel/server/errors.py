"""Errors as the clients of each route know them: one table of statuses, one body for each of three shapes
(docs/spec/clients.md 3.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from starlette.responses import Response

from mlxcel.errors import (
    BackendFault,
    CapacityError,
    ContextTooLong,
    EngineError,
    EngineUnhealthy,
    MlxcelError,
    QueueFull,
    RequestError,
    RequestTimeout,
    RowError,
    ShuttingDown,
)
from mlxcel.server.json_out import Json
from mlxcel.server.refusals import Refusal

Shape = Literal["openai", "native", "anthropic"]

NATIVE: Final = frozenset(
    {
        "/completion",
        "/completions",
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/props",
        "/slots",
        "/health",
        "/v1/health",
        "/metrics",
    }
)
ANTHROPIC: Final = "/v1/messages"

STATUSES: Final[tuple[tuple[type[EngineError], int], ...]] = (
    (QueueFull, 503),
    (CapacityError, 503),
    (ShuttingDown, 503),
    (EngineUnhealthy, 503),
    (RequestTimeout, 504),
)

OPENAI_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "server_busy",
    504: "server_timeout",
}
NATIVE_TYPES: Final[Mapping[int, str]] = {**OPENAI_TYPES, 503: "unavailable_error"}
ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    **OPENAI_TYPES,
    413: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    504: "api_error",
}

WAIT: Final = 5
"""Seconds after which to ask again, where nothing better is known."""

ROW_CODES: Final = frozenset({"numeric", "no_token_allowed", "structured", "trim", "rewind", "backend_fault"})
"""Codes of the engine that a client is told; of others it hears `internal_error`."""

CODE_HEADER: Final = "X-Error-Code"
"""OpenAI's `code` whatever the shape, `invalid_request` where that is null: for clients that turn it into a class."""

NUMBERS: Final = ("n_prompt_tokens", "n_ctx")


class UnknownField(RequestError):
    """A field that nobody here knows, where `--strict` refuses such."""

    code = "unknown_field"


def shape_of(path: str) -> Shape:
    """Whose clients ask there."""
    if path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/"):
        return "anthropic"
    return "native" if path in NATIVE else "openai"


def status_of(error: BaseException) -> int:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, RequestError):
        return 400
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def code_of(error: BaseException) -> str | None:
    """OpenAI's `code`."""
    status = status_of(error)
    if status == 500:
        told = isinstance(error, RowError | BackendFault) and error.code in ROW_CODES
        return str(getattr(error, "code", None)) if told else "internal_error"
    code = error.code if isinstance(error, MlxcelError) else None
    return None if code == RequestError.code else code


def error_body(error: BaseException, shape: Shape, request_id: str | None, route: str | None = None) -> dict[str, Any]:
    """The object that is sent. Of a fault of ours it has the request's id and nothing more: the log has the rest.

    `route`, as "POST /v1/completions", is named where a field of the request is at fault.
    """
    status = status_of(error)
    message = _message(error, status, request_id, route)
    field = getattr(error, "field", None)
    values = getattr(error, "values", {})
    numbers = {name: values[name] for name in NUMBERS if name in values}
    above = {} if request_id is None else {"request_id": request_id}
    if shape == "anthropic":
        told = {"type": ANTHROPIC_TYPES[status], "message": message, **numbers}
        return {"type": "error", "error": told, **above}
    if shape == "native":
        kind = "exceed_context_size_error" if isinstance(error, ContextTooLong) else NATIVE_TYPES[status]
        param = {} if field is None else {"param": field}
        return {"error": {"code": status, "message": message, "type": kind, **param, **numbers}, **above}
    told = {"message": message, "type": OPENAI_TYPES[status], "param": field, "code": code_of(error), **numbers}
    return {"error": told, **above}


def error_response(error: BaseException, shape: Shape, request_id: str | None, route: str | None = None) -> Response:
    """With `Retry-After` where it is worth asking again, and what else belongs in the headers."""
    status = status_of(error)
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    headers[CODE_HEADER] = code_of(error) or RequestError.code
    if status == 503:
        headers.setdefault("Retry-After", str(retry_after(error)))
    return Json(error_body(error, shape, request_id, route), status_code=status, headers=headers)


def retry_after(error: BaseException) -> int:
    """Seconds, 1 to 60."""
    wanted: float = getattr(error, "values", {}).get("retry_after", WAIT)
    return min(60, max(1, math.ceil(wanted)))


def _message(error: BaseException, status: int, request_id: str | None, route: str | None) -> str:
    if status == 500 or not isinstance(error, MlxcelError):
        code = code_of(error)
        asked = "the request" if request_id is None else f"request {request_id}"
        return f"{asked} failed ({code}) through no fault of its own: the server's log says why"
    parts = [error.message, error.hint or ""]
    if isinstance(error, RequestError) and route is not None:
        parts.append(f"this is {route}")
    return "; ".join(part for part in parts if part)
