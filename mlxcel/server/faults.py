"""What becomes of an exception that a route did not answer itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxcel.errors import MlxcelError, shown
from mlxcel.server.errors import error_response, shape_of
from mlxcel.server.refusals import MethodNotAllowed, NotFound

log = logging.getLogger("mlxcel.server")


def answered(request: Request, error: Exception) -> Response:
    path = request.url.path
    return error_response(error, shape_of(path), request.state.request_id, f"{request.method} {path}")


async def _known(request: Request, error: Exception) -> Response:
    return answered(request, error)


async def _http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not by this method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    if status == 405:
        allowed: set[str] = set()
        for route in request.app.routes:
            if route.matches(request.scope)[0] is not Match.NONE:
                allowed |= set(getattr(route, "methods", None) or ())
        return answered(request, MethodNotAllowed(request.method, request.url.path, sorted(allowed)))
    return answered(
        request, NotFound(f"there is no {shown(request.url.path)}", hint="GET /openapi.json lists what there is")
    )


EXCEPTION_HANDLERS: Final[Mapping[Any, Any]] = {MlxcelError: _known, HTTPException: _http}
"""For Starlette, by class."""


class Faults:
    """Whatever else is raised is a mistake of ours: the log has it, the client gets 500 and the request's id. But a
    send that fails is a client that is gone: what the system says of it may come here before the server hears of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = gone = False

        async def answer(message: Message) -> None:
            nonlocal begun, gone
            begun = True
            try:
                await send(message)
            except OSError:
                gone = True
                raise

        try:
            await self._app(scope, receive, answer)
        except ClientDisconnect:
            return
        except Exception as error:
            if gone and isinstance(error, OSError):
                return
            request_id = scope["state"]["request_id"]
            log.error("request %s failed", request_id, exc_info=error)
            if not begun:
                response = error_response(error, shape_of(scope["path"]), request_id)
                await response(scope, receive, send)
