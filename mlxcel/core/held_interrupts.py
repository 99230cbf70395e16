"""Ctrl-C around native code that calls Python back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """SIGINT inside is heard behind it; with a second one both are heard at once.

    For calls that must be short: an exception at any moment of one is lost, or leaves objects that end the process
    with a fault. Does nothing in other threads than the main one, and where SIGINT has no handler of Python's.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        held.append(number)
        if len(held) > 1:
            deliver(frame)

    def deliver(frame: FrameType | None) -> None:
        """Each to the handler that is in force when it is its turn: the first may have left another one."""
        signal.signal(signal.SIGINT, handler)
        raised: KeyboardInterrupt | None = None
        while held:
            now = signal.getsignal(signal.SIGINT)
            number = held.pop()
            if callable(now):
                try:
                    now(number, frame)
                except KeyboardInterrupt as interrupt:
                    raised = interrupt
        if raised is not None:
            raise raised

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hear:
            deliver(None)
