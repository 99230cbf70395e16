"""How many rows of one engine may be on their way at once: whoever asks for more waits, first come first served."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("mlxcel.client")

Ring = Callable[[], None]
"""Wakes whoever waits, from whichever thread; it must return at once."""


class Places:
    """`capacity` places. A request takes one for each of its choices, all of them if it has more than there are."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = capacity
        self._lock = threading.RLock()  # a finalizer may give a place back in the middle of a call
        self._waiting: deque[Ring] = deque()

    def size(self, choices: int) -> int:
        return min(choices, self._capacity)

    def take(self, count: int, ring: Ring) -> bool:
        """Whether `count` places were there for the taking. If not, `ring` is called once it is worth asking again."""
        with self._lock:
            first = not self._waiting or self._waiting[0] == ring
            if first and self._free >= count:
                self._free -= count
                if self._waiting:
                    self._waiting.popleft()
                taken = True
            else:
                if ring not in self._waiting:
                    self._waiting.append(ring)
                taken = False
        if taken:
            self._wake()
        return taken

    def leave(self, ring: Ring) -> None:
        """`ring` waits no more."""
        with self._lock:
            if ring in self._waiting:
                self._waiting.remove(ring)
        self._wake()

    def give(self, count: int) -> None:
        with self._lock:
            self._free += count
        self._wake()

    def _wake(self) -> None:
        """Ring the first one that waits. One that cannot be rung, as of an event loop that is closed, is gone."""
        while True:
            with self._lock:
                ring = self._waiting[0] if self._waiting and self._free else None
            if ring is None:
                return
            try:
                ring()
                return
            except Exception as error:
                log.debug("a waiting client is gone", exc_info=error)
                with self._lock:
                    if ring in self._waiting:
                        self._waiting.remove(ring)
