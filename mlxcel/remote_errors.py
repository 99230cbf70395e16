"""What a server says of a failure, as the error that the same failure is in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from mlxcel.errors import (
    BackendFault,
    CapacityError,
    ContextTooLong,
    EmptyPrompt,
    EngineUnhealthy,
    MlxcelError,
    NoTokenAllowed,
    NumericFault,
    QueueFull,
    RequestError,
    RequestTimeout,
    RewindError,
    ServerError,
    ShuttingDown,
    TemplateError,
    TrimError,
    UnsupportedField,
)

CODE_HEADER: Final = "X-Error-Code"

CLASSES: Final[Mapping[str, type[MlxcelError]]] = {
    kind.code: kind
    for kind in (
        *(RequestError, UnsupportedField, TemplateError, EmptyPrompt, QueueFull, CapacityError, ShuttingDown),
        *(EngineUnhealthy, RequestTimeout, NumericFault, NoTokenAllowed, TrimError, RewindError, BackendFault),
    )
}
"""By the server's code. ContextTooLong has numbers of its own; the rest is ServerError."""

MOST: Final = 1 << 20
"""Bytes of an error that are read."""


def error_of_reply(status: int, headers: Mapping[str, str], body: bytes) -> MlxcelError:
    """Of a reply that is no success, from whatever server. `headers` by lower case."""
    told: Any = None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        told = json.loads(body)["error"]
    if not isinstance(told, dict):
        text = body.decode("utf-8", "replace").strip()
        return ServerError(f"the server answered {status}: {text[:200]!r}", status=status)
    code = headers.get(CODE_HEADER.lower())
    values: dict[str, Any] = {}
    if (after := headers.get("retry-after", "")).isdecimal():
        values["retry_after"] = int(after)
    return error_told({**told, "code": code or told.get("code")}, status, **values)


def error_told(told: Mapping[str, Any], status: int | None = None, **values: Any) -> MlxcelError:
    """Of an error object of OpenAI's shape, in a reply or in a stream that had begun."""
    code, message = told.get("code"), str(told.get("message"))
    prompt, context = told.get("n_prompt_tokens"), told.get("n_ctx")
    if isinstance(prompt, int) and isinstance(context, int):
        return ContextTooLong(prompt, context)
    kind = CLASSES.get(str(code))
    if kind is None and (status == 400 or told.get("type") == "invalid_request_error"):
        kind = RequestError
    if kind is None:
        return ServerError(message, code=None if code is None else str(code), status=status, **values)
    error = kind.__new__(kind)
    MlxcelError.__init__(error, message, **values)
    if isinstance(error, RequestError):
        error.field = told.get("param")
    if isinstance(error, BackendFault):
        error.kv_intact = True
    return error
