"""What a long run finds, section by section and row by row: printed, and written to a file after each row, so that a
run that is ended early has left what it had."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mlxcel_jax_cuda.first_run import DeviceHangs

ROW_SECONDS = 200
"""Seconds for one row, after which the process ends: what hangs on a device leaves no traceback of its own."""
NOTE_SECONDS = 20.0
"""After so many, and again after as many, a row says where it stands: whoever ends the process before its time has
that."""

Rows = Iterator[dict[str, Any]]


class SectionRecord:
    """`seconds` bounds the run: no row begins behind them."""

    def __init__(self, facts: Mapping[str, str], file: Path | None, seconds: float) -> None:
        self.found: dict[str, Any] = {**facts, "left_out": [], "failed": {}, "seconds": {}, "sections": {}}
        self._file, self._ends = file, time.perf_counter() + seconds
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)

    def take(self, section: str, rows: Rows, *, seconds: float = math.inf, words: str = "") -> bool:
        """All rows of a section, or more of one that was taken before, unless the time is over: that of the run, or
        `seconds` for these. Whether it raised nothing: an error is recorded. `words` name it on the screen."""
        began, kept = time.perf_counter(), self.found["sections"].setdefault(section, [])
        words = words or section
        print(f"--- {words}", flush=True)
        try:
            while time.perf_counter() < min(self._ends, began + seconds):
                faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
                with _noted(words):
                    row = next(rows, None)
                if row is None:
                    break
                kept.append(row)
                print("  ".join(f"{name} {_shown(name, value)}" for name, value in row.items()), flush=True)
                self._write()
            else:
                self.found["left_out"].append(words)
                print("the rest is left out: the time is over", flush=True)
        except Exception as error:
            traceback.print_exc()
            self.found["failed"][words] = f"{type(error).__name__}: {error}"
            if isinstance(error, DeviceHangs):
                self._write()
                self.end()
        faulthandler.cancel_dump_traceback_later()
        took = time.perf_counter() - began
        self.found["seconds"][section] = self.found["seconds"].get(section, 0.0) + took
        print(f"    {took:.1f} s", flush=True)
        self._write()
        return words not in self.found["failed"]

    def put(self, section: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """In the place of what was taken of a section."""
        self.found["sections"][section] = list(rows)
        self._write()

    def table(self, columns: Sequence[str]) -> None:
        """All rows, a line each."""
        lines = [["section", *columns]]
        for section, rows in self.found["sections"].items():
            for row in rows:
                lines.append([section, *(_shown(name, row[name]) if name in row else "" for name in columns)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)

    def end(self, wrong: int = 0) -> NoReturn:
        """The process, at once: threads of a section that failed may be left. `wrong` rows say that something is."""
        print(f"failed: {', '.join(self.found['failed']) or 'none'}", flush=True)
        os._exit(1 if wrong or self.found["failed"] else 0)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")


@contextmanager
def _noted(words: str) -> Iterator[None]:
    """Says from time to time where the thread of the call is."""
    over, thread, began = threading.Event(), threading.get_ident(), time.perf_counter()

    def say() -> None:
        while not over.wait(NOTE_SECONDS):
            print(f"    {words} for {time.perf_counter() - began:.0f} s: {_place(thread)}", flush=True)

    noting = threading.Thread(target=say, daemon=True)
    noting.start()
    try:
        yield
    finally:
        over.set()
        noting.join()


def _place(thread: int) -> str:
    """The innermost calls of a thread, and those of its project's own files, from the inside out."""
    calls = traceback.extract_stack(sys._current_frames()[thread])[::-1]
    own = [call for call in calls[1:] if "site-packages" not in call.filename and "/lib/python" not in call.filename]
    return " < ".join(f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in [calls[0], *own[:5]])


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name.startswith(("of_", "over_")) else f"{value:.4g}"
    if value is False and name.endswith("_met"):
        return "MISSED"
    return "…".join(f"{each:.4g}" for each in value) if isinstance(value, list) else str(value)
