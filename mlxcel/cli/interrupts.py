"""Ctrl-C: the first one asks, the second one ends the program at once (docs/spec/clients.md 1.4)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

INTERRUPTED: Final = 130


@contextmanager
def two_interrupts() -> Iterator[None]:
    """KeyboardInterrupt at the first SIGINT inside; a second one ends the process with 130, whatever it is doing.

    Does nothing where Python's own handler is not in force: a parent that ignores SIGINT (nohup) is obeyed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def first(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, second)
        raise KeyboardInterrupt

    def second(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
