"""API keys: who may ask, and whose cached prompts a request may share (docs/spec/clients.md 3.7, 3.12)."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcel.server.errors import error_response, shape_of
from mlxcel.server.record import RequestRecord
from mlxcel.server.refusals import InvalidKey
from mlxcel.server.settings import ServerSettings

OPEN: Final = frozenset({"/", "/health", "/v1/health"})
ASSETS: Final = "/assets/"
METRICS: Final = "/metrics"
BLANKS: Final = " \t"
"""Of a header. Bytes of UTF-8 are among what else Python takes for blanks."""


def digest(key: bytes) -> bytes:
    """What stands for a key wherever it is remembered."""
    return hashlib.sha256(key).digest()


class Keys:
    """Refuses what comes without a key that is known. Compares in constant time, always with every key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._known = tuple(digest(key.encode()) for key in settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._known:
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        found = self._found(Headers(scope=scope))
        if found is not None:
            record.key = found.hex()[:6]
            if self._settings.cache_isolation == "key":
                record.isolation = found
        elif not self._open(scope["path"]):
            response = error_response(InvalidKey(), shape_of(scope["path"]), record.id)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _found(self, headers: Headers) -> bytes | None:
        """The digest of a key that the request has and the server knows."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip(BLANKS)] if scheme.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        found = None
        for key in (digest(text.encode("latin-1")) for text in given):
            for known in self._known:
                if hmac.compare_digest(key, known):
                    found = known
        return found

    def _open(self, path: str) -> bool:
        if path == METRICS:
            return self._settings.public_metrics
        return path in OPEN or path.startswith(ASSETS)
