"""Where the program begins: Ctrl-C while it is still being imported ends it without a trace."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> int:
    """Import the program and run it; its exit code. Until it can catch an interrupt itself, one exits with 130.

    Where Python's own handler is not in force, a parent ignores interrupts (nohup) and is obeyed.
    """
    inherited = signal.getsignal(signal.SIGINT)
    if inherited is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from mlxcel.cli.leaving import leave
    from mlxcel.cli.main import main as run

    signal.signal(signal.SIGINT, inherited)
    return leave(run(), ignored=inherited is signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(130)
