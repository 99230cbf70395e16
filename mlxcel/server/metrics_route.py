"""GET /metrics, for Prometheus (docs/spec/clients.md 3.8)."""

from __future__ import annotations

from typing import Final

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.server.metrics_page import Page, families
from mlxcel.server.refusals import SwitchedOff
from mlxcel.server.state import ServerState


async def metrics(request: Request) -> Response:
    """In the form that the scraper asks for."""
    state: ServerState = request.app.state.server
    if not state.settings.metrics:
        raise SwitchedOff("/metrics is switched off by --no-metrics", hint="start the server without it")
    snapshot = None if state.snapshots is None else await state.snapshots.newest()
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(Page(families(state, snapshot))), media_type=None, headers={"Content-Type": kind})


ROUTES: Final = [Route("/metrics", metrics)]
