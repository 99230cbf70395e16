"""What the server itself refuses, before or around a route. Each class carries its status and its code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mlxcel.errors import MlxcelError, shown


class Refusal(MlxcelError):
    """Base. `headers` go with the reply."""

    status: ClassVar[int]
    headers: Mapping[str, str]

    def __init__(
        self, message: str, *, hint: str | None = None, headers: Mapping[str, str] | None = None, **values: Any
    ) -> None:
        super().__init__(message, hint=hint, **values)
        self.headers = headers or {}


class InvalidKey(Refusal):
    """No API key, or a wrong one: they look the same."""

    status, code = 401, "invalid_api_key"

    def __init__(self) -> None:
        super().__init__(
            "this server needs an API key, and the request has none that it knows",
            hint="send `Authorization: Bearer KEY` or `x-api-key: KEY`",
            headers={"WWW-Authenticate": "Bearer"},
        )


class Forbidden(Refusal):
    """Refused by the operator's choice."""

    status, code = 403, "forbidden"


class NotFound(Refusal):
    """No route, or nothing of that name behind one."""

    status, code = 404, "not_found"


class ModelNotFound(Refusal):
    """A model that is not served."""

    status, code = 404, "model_not_found"

    def __init__(self, asked: object, served: Sequence[str]) -> None:
        super().__init__(
            f"no model {shown(asked)} is served here",
            hint=f"there is {', '.join(served)}; `model` may also be left out",
        )
        self.field = "model"


class MethodNotAllowed(Refusal):
    """A route that exists, asked in another way."""

    status, code = 405, "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(
            f"{shown(method)} is not what {shown(path)} takes",
            hint=f"it takes {', '.join(allowed)}",
            headers={"Allow": ", ".join(allowed)},
        )


class BodyTooSlow(Refusal):
    """A body that does not arrive."""

    status, code = 408, "request_timeout"

    def __init__(self, read: int, seconds: float) -> None:
        super().__init__(
            f"{read} bytes of the body came in {seconds:.0f} seconds, and then it was not waited for any more",
            hint="send it at once",
        )


class BodyTooLarge(Refusal):
    """More bytes than `--max-body-size`."""

    status, code = 413, "body_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body has more than {limit} bytes",
            hint="send less, or start the server with a larger --max-body-size",
            limit=limit,
        )


class HeadersTooLarge(Refusal):
    """More bytes of headers than are taken."""

    status, code = 431, "headers_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the headers have more than {limit} bytes", hint="send fewer, or shorter ones", limit=limit)


class UnsupportedMediaType(Refusal):
    """A body of another kind than JSON."""

    status, code = 415, "unsupported_media_type"


class SwitchedOff(Refusal):
    """A route that a flag turned off, or that this server does not have."""

    status, code = 501, "not_supported"


class ModelLoading(Refusal):
    """Asked before the model could answer."""

    status, code = 503, "model_loading"

    def __init__(self) -> None:
        super().__init__(
            "Loading model", hint="try again in a few seconds", headers={"Retry-After": "5"}, retry_after=5
        )


class NoSlotFree(Refusal):
    """Asked for by who would rather go elsewhere than wait."""

    status, code = 503, "queue_full"

    def __init__(self, count: int) -> None:
        super().__init__(f"all {count} rows are taken", hint="a request would wait", headers={"Retry-After": "1"})
