"""How many programs XLA has been asked for in this process: once an engine is ready the number stands still."""

from __future__ import annotations

import functools
import threading

import attrs
from jax import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@attrs.define
class Compilations:
    """Programs compiled, or taken from the compile cache, since the first look."""

    count: int = 0
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def heard(self, event: str, duration_secs: float, **details: str | int) -> None:
        """Told on whichever thread compiles."""
        if event == _EVENT:
            with self._lock:
                self.count += 1


@functools.cache
def compilations() -> Compilations:
    """The one counter of the process: jax has no way to take a listener away again."""
    counter = Compilations()
    monitoring.register_event_duration_secs_listener(counter.heard)
    return counter
