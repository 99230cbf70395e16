"""Progress on stderr: bars on a terminal, lines elsewhere. Nothing here may disturb the work it tells of."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

import attrs

PREFILL_DELAY: Final = 0.5
"""Seconds before a prefill is worth a bar."""

WORDS: Final = {
    "download": "downloading",
    "verify": "verifying",
    "wait": "waiting for another process",
    "load": "loading the weights",
    "compile": "compiling",
    "prefill": "reading the prompt",
    "generate": "answering",
}


def console_progress(*, no_color: bool) -> BarProgress | LineProgress:
    return BarProgress(no_color=no_color) if sys.stderr.isatty() else LineProgress(sys.stderr)


def amount(value: int, unit: str) -> str:
    """ "92.9 MB", "272 tensors"."""
    if unit != "bytes":
        return f"{value} {unit}"
    return f"{value / 1e6:.1f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"


@attrs.define
class LineProgress:
    """One line when a phase begins and one when it is over. A prefill is told of only once it takes long."""

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _phase: str | None = None
    _begun: float = 0.0
    _told: bool = False
    _total: int | None = None
    _unit: str = ""

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self._phase, self._begun, self._told = phase, self.clock(), False
        self._total, self._unit = total, unit
        if phase != "prefill":
            self._tell()

    def advance(self, done: int) -> None:
        late = self.clock() - self._begun >= PREFILL_DELAY and done != self._total
        if self._phase is not None and not self._told and late:
            self._tell()

    def finish(self) -> None:
        if self._phase is not None and self._told:
            self._print(f"{self._words()}: done in {self.clock() - self._begun:.1f} s")
        self._phase = None

    def drop(self) -> None:
        """What is under way will not be finished, and nothing is said of that."""
        self._phase = None

    def _tell(self) -> None:
        self._told = True
        size = "" if self._total is None else f" ({amount(self._total, self._unit)})"
        self._print(f"{self._words()}{size} ...")

    def _words(self) -> str:
        return WORDS.get(self._phase or "", self._phase or "")

    def _print(self, line: str) -> None:
        try:
            print(line, file=self.stream, flush=True)
        except OSError:
            return  # nobody reads stderr: the work goes on


class BarProgress:
    """One bar at a time, gone when its phase is over; a download's stays."""

    def __init__(self, *, no_color: bool) -> None:
        self._no_color = no_color
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None
        self._console: Any = None
        self._timer: threading.Timer | None = None

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self.finish()
        self._bar, self._task = self._made(phase, total, unit)
        if phase == "prefill":
            self._timer = threading.Timer(PREFILL_DELAY, self._show, [self._bar])
            self._timer.daemon = True
            self._timer.start()
        else:
            self._bar.start()

    def advance(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def finish(self) -> None:
        with self._lock:
            bar, timer = self._bar, self._timer
            self._bar = self._timer = None
        if timer is not None:
            timer.cancel()
        if bar is not None:
            bar.stop()

    def drop(self) -> None:
        """What is under way will not be finished. A bar that is left as it is would keep the terminal's cursor, and so
        would one whose end a terminal that Ctrl-C is typed at has thrown away with all that it had not shown yet."""
        self.finish()
        if self._console is not None:
            self._console.show_cursor()

    def _show(self, bar: Any) -> None:
        with self._lock:
            if self._bar is bar:
                bar.start()

    def _made(self, phase: str, total: int | None, unit: str) -> tuple[Any, Any]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TransferSpeedColumn,
        )

        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
        columns += [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        self._console = console = Console(stderr=True, no_color=self._no_color or None)
        bar = Progress(*columns, console=console, transient=phase != "download", redirect_stdout=False)
        return bar, bar.add_task(WORDS.get(phase, phase), total=total)
