"""The standard streams, in whatever state the parent process left them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxcel.errors import MlxcelError


def open_missing() -> None:
    """Gives the numbers of closed standard streams to files that cannot be read or written.

    Otherwise Python has None in their place, and the next file that is opened, a model or a lock, gets their number.
    """
    for number, name, flags, mode in (
        (0, "stdin", os.O_WRONLY, "r"),
        (1, "stdout", os.O_RDONLY, "w"),
        (2, "stderr", os.O_WRONLY, "w"),  # what nobody can read is no error
    ):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def tell(line: str) -> None:
    """A line on stderr. Where it cannot be written the work goes on: the exit code still says how it ended."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def tell_error(error: MlxcelError) -> None:
    """Of a program that goes on: what is wrong, and the next step where there is one."""
    tell(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))


def give_up_stdout() -> None:
    """Drops what is still in the buffers: Python flushes them when it ends, and would complain about it."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
