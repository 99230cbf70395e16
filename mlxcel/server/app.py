"""The server as an ASGI application, for our own command and for any other ASGI host."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from mlxcel.config import EngineConfig, plugin_limit
from mlxcel.core.named import load_target
from mlxcel.core.source import NoProgress, Progress
from mlxcel.plugins.manager import PluginManager
from mlxcel.serve_engine import Serving, serve
from mlxcel.server.arrival import Arrival
from mlxcel.server.body_limit import BodyLimit
from mlxcel.server.cors import Cors
from mlxcel.server.faults import EXCEPTION_HANDLERS, Faults
from mlxcel.server.keys import Keys
from mlxcel.server.loading import ModelThread, StoppableProgress
from mlxcel.server.readiness import Readiness
from mlxcel.server.request_id import RequestIds
from mlxcel.server.settings import ServerSettings, serving_config
from mlxcel.server.state import ServerState

log = logging.getLogger("mlxcel.server")

ROUTES: Final = (
    "openai_chat",
    "openai_completions",
    "native",
    "messages",
    "text_routes",
    "operations",
    "models",
    "props",
    "slots",
    "cache_routes",
    "metrics_route",
    "openapi",
    "page_routes",
)
"""Modules of this package that have `ROUTES`."""


def create_app(
    settings: ServerSettings | None = None,
    load: Callable[[], Serving] | None = None,
    *,
    give_up: Callable[[], None] = lambda: None,
    config: EngineConfig | None = None,
    write: Callable[[str], None] | None = None,
) -> Starlette:
    """An application whose lifespan loads the model, on a thread: until then routes that need it answer 503.

    Without arguments everything is as the environment has it (docs/spec/clients.md 0.2). `load` takes the place of
    loading what `config` names, and `give_up` is called when it may end early. `write` gets the line of each request,
    instead of the logger `mlxcel.access`.
    """
    settings = settings or ServerSettings()
    config = serving_config(config or EngineConfig.resolve())
    state = ServerState(settings, write=write)
    if load is None:
        progress = StoppableProgress(NoProgress())
        load, give_up = _loader(settings, config, progress), progress.stop
    model = ModelThread(state, load, config, give_up)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        model.start(app.router.routes)
        try:
            yield
        finally:
            state.drain()
            await model.stop()

    app = Starlette(
        routes=built_in_routes(),
        middleware=[
            Middleware(RequestIds, state=state),
            Middleware(Arrival),
            Middleware(Faults),
            Middleware(Cors, settings=settings),
            Middleware(Keys, settings=settings),
            Middleware(Readiness, state=state),
            Middleware(BodyLimit, limit=settings.max_body_size),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.server, app.state.model = state, model
    return app


def built_in_routes() -> list[BaseRoute]:
    """Of all modules, in the order in which they are asked."""
    return [route for name in ROUTES for route in _routes(name)]


def _routes(name: str) -> list[Route]:
    found: list[Route] = load_target(f"mlxcel.server.{name}:ROUTES")
    return found


def _loader(settings: ServerSettings, config: EngineConfig, progress: Progress) -> Callable[[], Serving]:
    def load() -> Serving:
        manager = PluginManager.load(only=plugin_limit(config.plugins), trace=log.info if config.trace_hooks else None)
        return serve(config, manager, progress, max_queue_depth=settings.max_queue_depth, warm=True, say=log.info)

    return load
