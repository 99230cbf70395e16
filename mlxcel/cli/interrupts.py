"""Ctrl-C: what the first one does, and the second one (docs/spec/clients.md 1.4)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

INTERRUPTED: Final = 130

AGAIN: Final = 0.01
"""Seconds from an interrupt that was ignored to the next: time to come out of where errors are ignored."""


@contextmanager
def two_interrupts() -> Iterator[None]:
    """KeyboardInterrupt at the first SIGINT inside; a second one ends the process with 130, whatever it is doing.

    A KeyboardInterrupt that is raised where Python ignores errors, in a finalizer or a callback of the collector, is
    raised again. Does nothing where Python's own handler is not in force: a parent that ignores SIGINT (nohup) is
    obeyed.
    """
    main = threading.current_thread()
    if main is not threading.main_thread():
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

    def ignored(report: sys.UnraisableHookArgs) -> None:
        if not issubclass(report.exc_type, KeyboardInterrupt) or threading.current_thread() is not main:
            told(report)
            return
        signal.signal(signal.SIGINT, first)
        again = threading.Timer(AGAIN, signal.pthread_kill, (main.ident, signal.SIGINT))
        again.daemon = True
        again.start()

    told, sys.unraisablehook = sys.unraisablehook, ignored
    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = told


@contextmanager
def interrupts_to(heard: Callable[[], None], *, leave_at_second: bool) -> Iterator[None]:
    """SIGINT inside calls `heard`, from wherever the main thread is: it must take no lock. With `leave_at_second` a
    second one ends the process with 130.

    Does nothing in other threads, and where a parent ignores SIGINT.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os._exit(INTERRUPTED)

    def first(number: int, frame: FrameType | None) -> None:
        if leave_at_second:
            signal.signal(signal.SIGINT, leave)
        heard()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
