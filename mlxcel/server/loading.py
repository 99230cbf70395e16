"""The model's way into a server that is up already: on a thread of its own, and out again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Route

from mlxcel.core.source import Progress
from mlxcel.errors import EngineUnhealthy, MlxcelError, PluginError, ShuttingDown
from mlxcel.server.served import ServedModel
from mlxcel.server.snapshot import Snapshot
from mlxcel.server.state import ServerState

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.serve_engine import Serving

log = logging.getLogger("mlxcel.server")

Load = Callable[[], "Serving"]


class StoppableProgress:
    """Passes progress on until `stop`, which whoever loads meets as ShuttingDown. `seconds` went into compiling."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._stopped = threading.Event()
        self._compiling: float | None = None
        self.seconds = 0.0

    def stop(self) -> None:
        self._stopped.set()

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self._check()
        self._compiling = self._clock() if phase == "compile" else None
        self._progress.start(phase, total, unit)

    def advance(self, done: int) -> None:
        self._check()
        self._progress.advance(done)

    def finish(self) -> None:
        if self._compiling is not None:
            self.seconds += self._clock() - self._compiling
            self._compiling = None
        self._progress.finish()

    def _check(self) -> None:
        if self._stopped.is_set():
            raise ShuttingDown("the server ended before its model was loaded")


def plugin_routes(serving: Serving, taken: Iterable[BaseRoute]) -> list[Route]:
    """Of all plugins. One that fails is left out, and named in the log; PluginError for a path that is `taken`."""
    found = serving.plugins.routes(serving)
    for failure in found.failures:
        log.warning("no routes: the plugin %s", failure)
    paths = {getattr(route, "path", None) for route in taken}
    for name, route in found.items():
        if route.path in paths:
            owner = found.plugin(name)
            raise PluginError(
                f"the route {name} of {owner.label} has the path of the server's own",
                hint=f"update or uninstall {owner.distribution}",
            )
    return list(found.values())


class ModelThread:
    """Loads, watches, and closes the model of a server. `start` and `stop` are called on its event loop. `give_up` asks
    `load` to end early."""

    def __init__(self, state: ServerState, load: Load, config: EngineConfig, give_up: Callable[[], None]) -> None:
        self._state, self._load, self._config, self._give_up = state, load, config, give_up
        self._serving: Serving | None = None
        self._stopped = threading.Event()

    def start(self, routes: list[BaseRoute]) -> None:
        """Begin to load; returns at once. `routes` are the server's; those of plugins come behind them.

        Python waits for this thread before it ends: under a program that is being compiled it must not.
        """
        self._loop, self._routes = asyncio.get_running_loop(), routes
        threading.Thread(target=self._run, name="mlxcel-model").start()

    async def stop(self) -> None:
        """Free the model, unless its engine hangs. One that is still being loaded is closed once it is there."""
        self._stopped.set()
        self._give_up()
        if self._serving is not None and self._state.phase != "failed":
            await asyncio.to_thread(self._serving.close)

    def _run(self) -> None:
        try:
            serving = self._serving = self._load()
            if self._stopped.is_set():
                serving.close()
                return
            state = self._state
            serving.model.observers.add(state)
            served = ServedModel(serving, self._config, state.settings, submitted=state.requests.submitted)
            first = Snapshot.take(serving)
            added = plugin_routes(serving, self._routes)
        except Exception as error:
            if self._serving is not None:
                self._serving.close()
            if self._stopped.is_set():
                log.debug("loading ended: %r", error)
                return
            if not isinstance(error, MlxcelError):
                log.error("the model could not be loaded", exc_info=error)
                error = EngineUnhealthy(f"the model could not be loaded: {error!r}", hint="-vv shows where")
            self._tell(self._state.fail, error)
            return
        self._tell(self._routes.extend, added)
        self._tell(state.ready, served, first)
        serving.scheduler.join()
        if (sick := serving.scheduler.sick) is not None and not self._stopped.is_set():
            self._tell(self._state.fail, sick)

    def _tell(self, change: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(change, *values)
        except RuntimeError:
            log.debug("the server ended before its model was told of", exc_info=True)
