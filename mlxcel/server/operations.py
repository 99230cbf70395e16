"""Routes for whoever runs the server (docs/spec/clients.md 3.2)."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.server.json_out import Json
from mlxcel.server.refusals import Refusal
from mlxcel.server.state import ServerState
from mlxcel.version import commit, version


async def health(request: Request) -> Response:
    """200 once a request would be answered; a full queue does not change it."""
    state: ServerState = request.app.state.server
    refusal = state.refusal()
    if refusal is None:
        return Json({"status": "ok"})
    headers = refusal.headers if isinstance(refusal, Refusal) else {"Retry-After": "5"}
    error = {"code": 503, "message": refusal.message, "type": "unavailable_error"}
    return Json({"error": error}, status_code=503, headers=headers)


async def software(request: Request) -> Response:
    return Json({"version": version(), "commit": commit()})


ROUTES: Final = [
    Route("/health", health),
    Route("/v1/health", health),
    Route("/version", software),
]
