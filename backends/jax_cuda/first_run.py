"""The first run of a program on a GPU, in a warm-up: one that does not end is an error, and no start stands still.

Blocks of a kernel that wait for one another can wait without an end, and XLA waits with them, in a call that nothing
interrupts. Nor does the runtime's own clean-up end then, when the process does.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from mlxcel.errors import BackendFault

SECONDS = 60.0
"""For what takes milliseconds, on a GPU that others may use as well."""

LOOK_SECONDS = 0.0005


class DeviceHangs(BackendFault):
    """A program does not end. Nothing else will run on the device in this process."""

    def __init__(self, program: str, seconds: float) -> None:
        super().__init__(
            f"program {program!r} runs for {seconds:g} s and does not end: a kernel hangs on the device, and this "
            "process can only be ended",
            kv_intact=False,
        )


def await_end(program: str, arrays: Iterable[Any], seconds: float = SECONDS) -> None:
    """Until all of a program's arrays are there. DeviceHangs where that takes longer; the process then ends without the
    runtime's clean-up. Errors of the program are for whoever reads the arrays."""
    ends = time.monotonic() + seconds
    for array in arrays:
        while not array.is_ready():
            if time.monotonic() > ends:
                atexit.register(_leave)
                raise DeviceHangs(program, seconds)
            time.sleep(LOOK_SECONDS)


def _leave() -> None:
    """The last to be registered is the first to be called."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # of a pipe that nobody reads, or of a stream that is not there
                stream.flush()
    finally:
        os._exit(DeviceHangs.exit_code)
