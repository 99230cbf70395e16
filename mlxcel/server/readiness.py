"""Nothing that needs the model is asked before it is there, or once the server is going (docs/spec/clients.md 3.11)."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcel.server.errors import error_response, shape_of
from mlxcel.server.keys import ASSETS
from mlxcel.server.state import ServerState

ALWAYS: Final = frozenset({"/", "/health", "/v1/health", "/metrics", "/version"})


class Readiness:
    """Answers 503 in place of the routes that need a model which is ready."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (scope["path"] in ALWAYS or scope["path"].startswith(ASSETS)):
            refusal = self._state.refusal()
            if refusal is not None:
                response = error_response(refusal, shape_of(scope["path"]), scope["state"]["request_id"])
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
