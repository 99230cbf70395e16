"""A child process that writes files, watched by the bytes it has written and ended where they stop coming."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs

PATIENCE = 120.0  # seconds without a new byte
_POLL = 0.1  # seconds between two looks
_LINES = 50  # of the child's output, the last of which tell why it failed
_LINE_CHARACTERS = 500
_NOISE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        ...


class MonotonicClock:
    """The machine's."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@attrs.frozen
class Ended:
    """How a child ended: its exit status, or None where it made no progress and was killed; its last lines."""

    status: int | None
    lines: tuple[str, ...]

    @property
    def last_line(self) -> str:
        return self.lines[-1] if self.lines else "(no output)"


def run_watched(
    command: Sequence[str],
    folder: Path,
    *,
    clock: Clock,
    bytes_told: Callable[[str], int | None] = lambda line: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Ended:
    """Runs `command` with TMPDIR = `folder`/tmp until it ends, or nothing has grown for PATIENCE seconds.

    What must grow: the bytes under `folder`, or those that `bytes_told` finds in a line of the output (None: an
    ordinary line, which is kept). `on_bytes` hears the bytes told, or those under `folder`/tmp where none are.
    The child has a process group of its own, killed as a whole when this is left early, also by Ctrl-C.
    Raises OSError where nothing can be started.
    """
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    # The shell sets the one variable that differs; everything else of the user's environment goes through untouched.
    shell = ("sh", "-c", 'TMPDIR="$0"; export TMPDIR; exec "$@"', str(temporary))
    child = subprocess.Popen(
        [*shell, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        output = _Output(child.stdout.fileno(), bytes_told)
        before, since = (0, 0), clock.now()
        while True:
            status = child.poll()  # asked before the last read, so that no line is lost
            output.read()
            seen = (bytes_under(folder), output.told or 0)
            on_bytes(bytes_under(temporary) if output.told is None else output.told)
            if seen[0] > before[0] or seen[1] > before[1]:
                since = clock.now()
            before = seen
            if status is not None:
                return Ended(status, output.last_lines())
            if clock.now() - since >= PATIENCE:
                return Ended(None, output.last_lines())
            clock.sleep(_POLL)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def bytes_under(folder: Path) -> int:
    """Bytes of all files under a folder that another process is writing to. Of a file that is written in several places
    at once, those that are there, not where it ends."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            total += min(status.st_size, 512 * status.st_blocks)  # the unit of st_blocks, whatever the disk's
    return total


class _Output:
    """The lines of a pipe that is read without waiting: the last ones, and the bytes they tell of."""

    def __init__(self, descriptor: int, bytes_told: Callable[[str], int | None]) -> None:
        os.set_blocking(descriptor, False)
        self.told: int | None = None
        self._descriptor = descriptor
        self._bytes_told = bytes_told
        self._part = b""
        self._kept: deque[str] = deque(maxlen=_LINES)

    def read(self) -> None:
        """Takes what is there."""
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, rest = (self._part + data).split(b"\n")
            self._part = rest[-65536:]
            for line in lines:
                self._take(line)

    def last_lines(self) -> tuple[str, ...]:
        """The end of the output, the last line also where nothing ends it."""
        self._take(self._part)
        self._part = b""
        return tuple(self._kept)

    def _take(self, line: bytes) -> None:
        text = _NOISE.sub("", line.decode("utf-8", "replace")).strip()[:_LINE_CHARACTERS]
        if not text:
            return
        count = self._bytes_told(text)
        if count is None:
            self._kept.append(text)
        else:
            self.told = count
