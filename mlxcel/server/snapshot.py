"""What the engine's thread knows of one moment, for whoever asks from outside: never a reason for it to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs

from mlxcel.core.backend import Compilations, DeviceMemory
from mlxcel.core.counters import Counters
from mlxcel.core.kv import KVStats
from mlxcel.core.prompt_cache import CacheStats
from mlxcel.core.row_view import RowView
from mlxcel.errors import EngineUnhealthy

if TYPE_CHECKING:
    from mlxcel.serve_engine import Serving

PATIENCE: Final = 1.0
"""Seconds that a reader waits for a step to end before it gets the numbers of a moment ago."""


@attrs.frozen
class Snapshot:
    """`cache` is None where prompts are not kept, `memory` where the device has none of its own."""

    counters: Counters
    kv: KVStats
    cache: CacheStats | None
    rows: tuple[RowView, ...]
    observer_errors: Mapping[str, int]
    compilations: Compilations
    memory: DeviceMemory | None

    @classmethod
    def take(cls, serving: Serving) -> Snapshot:
        """Between two ticks of the scheduler; waits for that. EngineUnhealthy while the engine hangs."""

        def look() -> Snapshot:
            scheduler, engine, cache = serving.scheduler, serving.model.engine, serving.cache
            return cls(
                counters=scheduler.stats(),
                kv=engine.kv_stats,
                cache=None if cache is None else cache.stats(),
                rows=tuple(scheduler.rows()),
                observer_errors=dict(serving.model.observers.failures),
                compilations=engine.compilations or Compilations(0, 0),
                memory=engine.device_memory,
            )

        return serving.scheduler.call(look)


class Snapshots:
    """The newest one, for the event loop. At most one look is on its way, whoever waits for it."""

    def __init__(self, serving: Serving, first: Snapshot) -> None:
        self._serving, self._last = serving, first
        self._looking: asyncio.Task[None] | None = None

    async def newest(self) -> Snapshot:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        done, _ = await asyncio.wait([self._looking], timeout=PATIENCE)
        for look in done:
            look.result()
        return self._last

    async def _look(self) -> None:
        try:
            self._last = await asyncio.to_thread(Snapshot.take, self._serving)
        except EngineUnhealthy:
            return  # what it was at the end stays true
