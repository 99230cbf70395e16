"""What all parts of a running server share. Routes find it as `request.app.state.server`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from mlxcel.errors import EngineUnhealthy, MlxcelError, ShuttingDown
from mlxcel.server.access_log import AccessLog
from mlxcel.server.metrics import Metrics
from mlxcel.server.record import LiveRequests, RequestRecord
from mlxcel.server.refusals import ModelLoading
from mlxcel.server.settings import ServerSettings
from mlxcel.server.snapshot import Snapshot, Snapshots
from mlxcel.server.unknown_fields import UnknownFields

if TYPE_CHECKING:
    from mlxcel.core.plan import StepReport
    from mlxcel.core.result import RequestResult
    from mlxcel.server.served import ServedModel

Phase = Literal["loading", "ready", "draining", "failed"]


class ServerState:
    """`served` is there from "ready" on. The phase changes on the event loop alone; `settled` is set when loading is
    over, whatever came of it, `over` when the engine is gone though nobody asked for that.

    `started` is Unix time, whole seconds; `clock` counts seconds for durations. Who holds `long_bodies` may read one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.started = int(time.time())
        self.phase: Phase = "loading"
        self.served: ServedModel | None = None
        self.failure: MlxcelError | None = None
        self.metrics = Metrics(clock)
        self.log = AccessLog(settings, write)
        self.requests = LiveRequests(self._done)
        self.snapshots: Snapshots | None = None
        self.unknown = UnknownFields()
        self.long_bodies = asyncio.Semaphore()
        self.settled = asyncio.Event()
        self.over = asyncio.Event()

    @property
    def model(self) -> ServedModel:
        """For routes that need it. Raises what `refusal` returns where there is none."""
        if self.served is None:
            raise self.refusal() or ModelLoading()
        return self.served

    async def snapshot(self) -> Snapshot:
        """What the engine's thread knows now, or knew a moment ago while it is in a long step. Raises as `model`."""
        if self.snapshots is None:
            raise self.refusal() or ModelLoading()
        return await self.snapshots.newest()

    def refusal(self) -> MlxcelError | None:
        """Why no request is taken now; None where it is, but for the queue's bound."""
        if self.phase == "loading":
            return ModelLoading()
        if self.phase == "draining":
            return ShuttingDown("Shutting down", hint="ask another server, or this one once it is back")
        if self.phase == "failed" or self.served is None or not self.served.serving.scheduler.healthy:
            return EngineUnhealthy("Engine unhealthy", hint="the server has to be started again; its log says why")
        return None

    def ready(self, served: ServedModel, first: Snapshot) -> None:
        self.served, self.snapshots = served, Snapshots(served.serving, first)
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

    def step_finished(self, report: StepReport) -> None:
        """As an observer of the engine, on its thread."""
        self.metrics.step_finished(report)

    def request_finished(self, result: RequestResult) -> None:
        """As an observer of the engine, on whichever thread ends a row."""
        self.metrics.request_finished(result)
        self.requests.ended(result)

    def _done(self, record: RequestRecord) -> None:
        self.metrics.request_done(record)
        self.log.request(record, None if self.served is None else self.served.tokenizer)

    def drain(self) -> None:
        """From now on no request is taken; those that are here go on."""
        if self.phase != "failed":
            self.phase = "draining"
