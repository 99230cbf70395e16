"""A request of the Python API on its way, with the places it holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from mlxcel.core.events import Event
from mlxcel.core.reply import Reply
from mlxcel.places import Places, Ring


class Running:
    """Gives its places back when its last choice ended, read or not. `ring` is called whenever an event came."""

    def __init__(self, reply: Reply, places: Places, held: int, ring: Ring | None = None) -> None:
        self._reply, self._places, self._held, self._ring = reply, places, held, ring
        self._lock = threading.RLock()
        reply.listen(self._heard)

    @property
    def ended(self) -> bool:
        """Whether every choice ended and every event was read."""
        return self._reply.ended

    def events(self) -> Iterator[Event]:
        """Those that are there."""
        while (event := self._reply.get(0)) is not None:
            yield event

    def __iter__(self) -> Iterator[Event]:
        """All to the end, waiting for each."""
        return iter(self._reply)

    def cancel(self) -> None:
        """End what still runs; harmless behind the end. Does not wait."""
        if not self._reply.over:
            self._reply.cancel()

    def _heard(self) -> None:
        if self._reply.over:
            with self._lock:
                held, self._held = self._held, 0
            if held:
                self._places.give(held)
        if self._ring is not None:
            self._ring()
