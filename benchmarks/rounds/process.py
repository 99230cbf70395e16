"""One program from its start to its end, with all that it started."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

GRACE_S = 5.0
"""From the request to end until the end."""
TAIL_LINES = 40
TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Ended:
    """`exit_code` is None for a process that ran over its time, negative for one that a signal ended. `errors` are the
    last lines of stderr."""

    exit_code: int | None
    errors: tuple[str, ...]


def run(command: Sequence[str], *, timeout_s: float, on_line: Callable[[str], None], grace_s: float = GRACE_S) -> Ended:
    """The command in a session of its own. Each line of its stdout goes to `on_line` when it comes, on this thread.

    Whatever ends this, be it the process, `timeout_s` seconds (0: no limit) or an exception, nothing of the process's
    group is left behind. OSError when it cannot be started.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        came: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Threads that block: a loop that looks now and then would take time from what is measured.
        watcher = threading.Thread(target=_watch, args=(child, came), daemon=True)
        reader = threading.Thread(target=_read, args=(child.stdout, came), daemon=True)
        over = False
        try:
            watcher.start()
            reader.start()
            ends = time.monotonic() + timeout_s
            while (line := came.get(timeout=max(ends - time.monotonic(), 0) if timeout_s else None)) is not None:
                on_line(line)
        except queue.Empty:
            over = True
        finally:
            _end_group(child, grace_s)
        reader.join(10.0)  # longer only if a process that left the group holds the pipe
        while not came.empty():
            if (line := came.get()) is not None:
                on_line(line)
        return Ended(None if over else child.returncode, _tail(errors))


def _watch(child: subprocess.Popen[bytes], came: queue.SimpleQueue[str | None]) -> None:
    child.wait()
    came.put(None)


def _read(pipe: IO[bytes], came: queue.SimpleQueue[str | None]) -> None:
    with pipe:
        for line in pipe:
            came.put(line.decode(errors="replace").rstrip("\r\n"))


def _end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """TERM, `grace_s` seconds, KILL; KILL at once for what a process that has ended left."""
    try:
        if child.poll() is None:
            _signal(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
    finally:
        _signal(child.pid, signal.SIGKILL)
        child.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _tail(file: IO[bytes]) -> tuple[str, ...]:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return tuple(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
