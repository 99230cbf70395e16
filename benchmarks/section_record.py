"""What a long run finds, section by section and row by row: printed, and written to a file after each row, so that a
run that is ended early has left what it had."""

from __future__ import annotations

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

ROW_SECONDS = 200
"""Seconds for one row, after which the process ends: what hangs on a device leaves no traceback of its own."""

Rows = Iterator[dict[str, Any]]


class SectionRecord:
    """`seconds` bounds the run: no row begins behind them."""

    def __init__(self, facts: Mapping[str, str], file: Path | None, seconds: float) -> None:
        self.found: dict[str, Any] = {**facts, "left_out": [], "failed": {}, "seconds": {}, "sections": {}}
        self._file, self._ends = file, time.perf_counter() + seconds
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)

    def take(self, section: str, rows: Rows) -> bool:
        """All rows of a section, unless the time is over. Whether it raised nothing: an error is recorded."""
        began, kept = time.perf_counter(), self.found["sections"].setdefault(section, [])
        print(f"--- {section}", flush=True)
        try:
            while time.perf_counter() < self._ends:
                faulthandler.dump_traceback_later(ROW_SECONDS, exit=True)
                row = next(rows, None)
                if row is None:
                    break
                kept.append(row)
                print("  ".join(f"{name} {_shown(name, value)}" for name, value in row.items()), flush=True)
                self._write()
            else:
                self.found["left_out"].append(section)
                print("the rest is left out: the time is over", flush=True)
        except Exception as error:
            traceback.print_exc()
            self.found["failed"][section] = f"{type(error).__name__}: {error}"
        faulthandler.cancel_dump_traceback_later()
        self.found["seconds"][section] = time.perf_counter() - began
        print(f"    {self.found['seconds'][section]:.1f} s", flush=True)
        self._write()
        return section not in self.found["failed"]

    def end(self, wrong: int = 0) -> NoReturn:
        """The process, at once: threads of a section that failed may be left. `wrong` rows say that something is."""
        print(f"failed: {', '.join(self.found['failed']) or 'none'}", flush=True)
        os._exit(1 if wrong or self.found["failed"] else 0)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if name.startswith(("of_", "over_")) else f"{value:.4g}"
    if value is False and name.endswith("_met"):
        return "MISSED"
    return "…".join(f"{each:.4g}" for each in value) if isinstance(value, list) else str(value)
