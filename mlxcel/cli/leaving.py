"""How the process ends once the program has said what it had to say."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

from mlxcel.cli.interrupts import INTERRUPTED

OURS: Final = "mlxcel-"
"""What the names of all our threads begin with."""

PATIENCE: Final = 2.0
"""Seconds that threads get to end by themselves: enough for a file that is being written."""


LOOK: Final = 0.05
"""Seconds from one look for a signal to the next."""


def leave(code: int, *, ignored: bool) -> int:
    """The exit code, where Python may end as it does; otherwise the process ends here.

    Python's end takes the interpreter away under threads that compile, and under what an interrupt left half done: C++
    answers that with an abort. An interrupted process, and one in which a thread of ours is still busy, ends without
    it. A signal while threads are waited for ends the process at once, but for interrupts that are `ignored`; behind
    that the code stands.
    """
    if not ignored:
        signal.signal(signal.SIGINT, _at_once)
    terminated = signal.getsignal(signal.SIGTERM)
    if terminated is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _at_once)
    if _still_busy() or code == INTERRUPTED:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # in Python's end it would be a death by the signal, without a code
    return code


def _at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _still_busy() -> bool:
    """Whether a thread of ours is, waited for."""
    end = time.monotonic() + PATIENCE
    for thread in threading.enumerate():
        if thread.name.startswith(OURS):
            # A signal right before a wait begins does not end it, and is heard behind it: so waits are short.
            while thread.is_alive() and (left := end - time.monotonic()) > 0:
                thread.join(min(left, LOOK))
            if thread.is_alive():
                return True
    return False
