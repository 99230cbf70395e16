"""The program in a pseudo-terminal, typed at and read as by a person; its stdout apart from what is shown there."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from other_threads import PATIENCE

_CONTROL = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])|\r")


class Terminal:
    """`seen` is what the program wrote to the terminal, control sequences left out; `said` what it wrote to stdout."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, out: int) -> None:
        self._process, self._master, self._out = process, master, out
        self._shown, self.said = b"", b""
        self._from = 0

    @property
    def seen(self) -> str:
        return _CONTROL.sub(b"", self._shown).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def line(self, text: str) -> None:
        self.type(f"{text}\r")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_for(self, text: str, *, out: bool = False) -> None:
        """Until it is shown (on stdout with `out`) behind all that was waited for before."""
        deadline = time.monotonic() + PATIENCE
        while True:
            all_of_it = self.said.decode("utf-8", "replace") if out else self.seen
            place = all_of_it.find(text, 0 if out else self._from)
            if place >= 0:
                self._from = self._from if out else place + len(text)
                return
            if not self._read(deadline):
                raise AssertionError(f"waited for {text!r}, saw {self.seen!r} and read {self.said!r}")

    def end(self) -> int:
        """The exit code, once it ended."""
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            if not self._read(deadline):
                assert time.monotonic() < deadline, f"still running, saw {self.seen!r}"
                time.sleep(0.01)
        while self._read(time.monotonic()):
            pass
        return self._process.returncode

    def _read(self, deadline: float) -> bool:
        """Whether something more came before the deadline."""
        waiting = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._master, self._out], [], [], min(waiting, PATIENCE))
        came = False
        for file in ready:
            try:
                data = os.read(file, 65536)
            except OSError:  # the other end of a terminal is closed
                data = b""
            came = came or bool(data)
            if file == self._master:
                self._shown += data
            else:
                self.said += data
        return came


PROGRAM = f"""
import sys
from mlxcel.cli import repl
from mlxcel.cli.start import main
repl.LEAVE_WITHIN = {PATIENCE}
sys.exit(main())
"""
"""Two interrupts of a test are one after the other, however slow the machine is."""

TAKES_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    f"os.execv(sys.executable, [sys.executable, '-c', {PROGRAM!r}, *sys.argv[1:]])"
)
"""stdin's terminal becomes the one whose Ctrl-C interrupts the program. Not in a fork of the tests: JAX has threads."""


@contextmanager
def terminal(*arguments: object, environ: Mapping[str, str], paths: tuple[Path, ...] = ()) -> Iterator[Terminal]:
    """`mlxcel ARGUMENTS` with stdin and stderr at a terminal and stdout in a pipe; `paths` are importable there."""
    master, slave = pty.openpty()
    out, into = os.pipe()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLXCEL_", "XDG_"))}
    own = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_TERMINAL, *map(str, arguments)],
        stdin=slave, stdout=into, stderr=slave, env={**kept, **own, **environ}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    os.close(into)
    try:
        yield Terminal(process, master, out)
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(out)
