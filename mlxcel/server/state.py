"""What all parts of a running server share. Routes find it as `request.app.state.server`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from mlxcel.errors import EngineUnhealthy, MlxcelError, ShuttingDown
from mlxcel.server.record import LiveRequests
from mlxcel.server.refusals import ModelLoading
from mlxcel.server.settings import ServerSettings

if TYPE_CHECKING:
    from mlxcel.server.served import ServedModel

Phase = Literal["loading", "ready", "draining", "failed"]


class ServerState:
    """`served` is there from "ready" on. The phase changes on the event loop alone; `settled` is set when loading is
    over, whatever came of it, `over` when the engine is gone though nobody asked for that.

    `started` is Unix time, whole seconds; `clock` counts seconds for durations.
    """

    def __init__(self, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.clock = clock
        self.started = int(time.time())
        self.phase: Phase = "loading"
        self.served: ServedModel | None = None
        self.failure: MlxcelError | None = None
        self.requests = LiveRequests()
        self.settled = asyncio.Event()
        self.over = asyncio.Event()

    def refusal(self) -> MlxcelError | None:
        """Why no request is taken now; None where it is, but for the queue's bound."""
        if self.phase == "loading":
            return ModelLoading()
        if self.phase == "draining":
            return ShuttingDown("Shutting down", hint="ask another server, or this one once it is back")
        if self.phase == "failed" or self.served is None or not self.served.serving.scheduler.healthy:
            return EngineUnhealthy("Engine unhealthy", hint="the server has to be started again; its log says why")
        return None

    def ready(self, served: ServedModel) -> None:
        self.served = served
        if self.phase == "loading":
            self.phase = "ready"
        self.settled.set()

    def fail(self, error: MlxcelError) -> None:
        """The model could not be loaded, or its engine is gone."""
        if self.failure is None:
            self.failure = error
        self.phase = "failed"
        self.settled.set()
        self.over.set()

    def drain(self) -> None:
        """From now on no request is taken; those that are here go on."""
        if self.phase != "failed":
            self.phase = "draining"
