"""Events on their way to one client. The engine thread puts and never waits (spec C15)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mlxcel.core.events import Delta, Ended, Event, Progressed, Started

log = logging.getLogger("mlxcel.scheduler")

MAX_UNREAD = 256
"""Events that may wait one by one. Beyond, a delta joins the newest unread one of its choice."""

MAX_BYTES = 4 << 20
"""What unread deltas may hold before their reader counts as too slow."""

_ID_BYTES = 8
_LOGPROB_BYTES = 64
"""Rough sizes of what is not text: they bound memory, nothing is reported by them."""


_Unread = list[Delta]
"""A delta that waits, and those that joined it."""


def _merged(deltas: _Unread) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        deltas[0].choice,
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        tuple(entry for delta in deltas for entry in delta.logprobs),
    )


def _size(delta: Delta) -> int:
    size = len(delta.text.encode()) + _ID_BYTES * len(delta.token_ids)
    if delta.reasoning:
        size += len(delta.reasoning.encode())
    if delta.logprobs:
        size += _LOGPROB_BYTES * sum(1 + len(token.top) for token in delta.logprobs)
    return size


class Outbox:
    """The events of one request with `choices` choices. Any thread may read, any may put an end: the first one counts.

    Holds MAX_UNREAD events, or one of each kind a choice where these are more, and MAX_BYTES of deltas with one more.
    """

    def __init__(self, choices: int) -> None:
        self._lock = threading.RLock()  # taken by itself where nobody waits: each token comes by
        self._changed = threading.Condition(self._lock)
        self._unread: deque[Started | Progressed | _Unread | Ended] = deque()
        self._newest: dict[int, _Unread] = {}  # by choice, the newest delta that was not read
        self._open = set(range(choices))
        self._bytes = 0
        self._readers = 0  # threads that wait for an event
        self._listener: Callable[[], None] | None = None

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def put(self, event: Started | Progressed | Delta) -> bool:
        """Whether the reader keeps up. Of a choice that ended nothing is taken."""
        with self._lock:
            if event.choice not in self._open:
                return True
            if not isinstance(event, Delta):
                self._unread.append(event)
            else:
                self._bytes += _size(event)
                joined = self._newest.get(event.choice) if len(self._unread) >= MAX_UNREAD else None
                if joined is None:
                    unread = self._newest[event.choice] = [event]
                    self._unread.append(unread)
                else:
                    joined.append(event)
            fine = self._bytes <= MAX_BYTES
            if self._readers:
                self._changed.notify_all()
        return fine if self._listener is None else self._tell() and fine

    @property
    def slow(self) -> bool:
        """Whether more is unread than is kept for a reader."""
        with self._changed:
            return self._bytes > MAX_BYTES

    def end(self, event: Ended) -> bool:
        """Whether this is the end of its choice: a second one is not taken."""
        with self._changed:
            if event.choice not in self._open:
                return False
            self._open.remove(event.choice)
            self._newest.pop(event.choice, None)
            self._unread.append(event)
            self._changed.notify_all()
        self._tell()
        return True

    def _tell(self) -> bool:
        """A listener that raises is a client that left."""
        try:
            if self._listener is not None:
                self._listener()
        except Exception as error:
            log.debug("a client's listener raised", exc_info=error)
            return False
        return True

    # --- the client's side ------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether every choice ended and every event was read."""
        with self._changed:
            return not self._open and not self._unread

    @property
    def over(self) -> bool:
        """Whether every choice ended, read or not."""
        with self._changed:
            return not self._open

    def get(self, timeout: float | None = None) -> Event | None:
        """The next event; None once `timeout` seconds passed without one, or when none will come. None waits for ever,
        0 not at all."""
        with self._lock:
            if not self._unread and self._open and timeout != 0:  # a wait of no time is long: each event ends in one
                self._readers += 1
                try:
                    self._changed.wait_for(lambda: self._unread or not self._open, timeout)
                finally:
                    self._readers -= 1
            if not self._unread:
                return None
            event = self._unread.popleft()
            if not isinstance(event, list):
                return event
            self._bytes = self._bytes - sum(map(_size, event)) if self._unread else 0
            choice = event[0].choice
            if self._newest.get(choice) is event:
                del self._newest[choice]
        return _merged(event)

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called whenever an event came, from the thread that put it, which it must not hold up; at
        once if one is there. It gets no event: it wakes whoever does `get(0)` until there is none."""
        with self._changed:
            self._listener = listener
            waiting = bool(self._unread)
        if waiting:
            self._tell()
