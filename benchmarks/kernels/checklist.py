"""Checks on a GPU in the order of their value, within a time. Nothing that was found is lost, and what is left out is
named."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

OVER_S = 10.0
"""Behind the time, for a check that has begun. Then the process ends."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """`rows` gives what it finds one by one; the first may take as long as its programs take to compile."""

    section: str
    what: str
    rows: Callable[[], Iterable[Row]]

    @property
    def name(self) -> str:
        return f"{self.section}: {self.what}"


class Checklist:
    """The record has a list of rows by section, what is `left_out` (all, until it has run), what `failed` with which
    error, and the `seconds` of each check. It is written to `file` after every row."""

    def __init__(self, record: Row, file: Path | None, seconds: float) -> None:
        self.record = {**record, "left_out": [], "failed": {}, "seconds": {}}
        self._file, self._ends = file, time.monotonic() + seconds
        print(record, flush=True)

    def run(self, checks: Sequence[Check], most_seconds: float) -> bool:
        """Whether none failed. A check that takes `most_seconds`, or longer than all have, ends the process: a kernel
        that hangs can be ended by nothing else."""
        left = self.record["left_out"] = [check.name for check in checks]
        watch = threading.Timer(self._ends + OVER_S - time.monotonic(), self._stop)
        watch.daemon = True
        watch.start()
        for check in checks:
            if time.monotonic() >= self._ends:
                break
            faulthandler.dump_traceback_later(most_seconds, exit=True)
            self._take(check)
            left.remove(check.name)
            self._write()
        faulthandler.cancel_dump_traceback_later()
        watch.cancel()
        self._write()
        self._tell_left()
        return not self.record["failed"]

    def _take(self, check: Check) -> None:
        kept, begun = self.record.setdefault(check.section, []), time.monotonic()
        try:
            for row in check.rows():
                kept.append(row)
                print(*(f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in row.values()), flush=True)
                self._write()
        except Exception as error:
            traceback.print_exc()
            self.record["failed"][check.name] = f"{type(error).__name__}: {error}"
        self.record["seconds"][check.name] = took = time.monotonic() - begun
        print(f"--- {check.name}, {took:.0f} s", flush=True)

    def _stop(self) -> None:
        self._tell_left()
        print("the time is over, and a check goes on: ended", flush=True)
        os._exit(3)

    def _tell_left(self) -> None:
        print("left out:", "; ".join(self.record["left_out"]) or "nothing", flush=True)

    def _write(self) -> None:
        if self._file is not None:
            part = self._file.with_name(self._file.name + ".part")
            part.write_text(json.dumps(self.record, indent=1) + "\n")
            part.replace(self._file)  # one that is ended while it writes leaves the record before


def arguments(description: str | None, sections: Sequence[str], default: Sequence[str]) -> argparse.Namespace:
    """commit, sections (the default ones unless some are named), seconds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="unknown")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}")
    parser.add_argument("--seconds", type=float, default=150.0, help="no check begins behind them")
    given = parser.parse_args()
    if unknown := [name for name in given.sections if name not in sections]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    given.sections = given.sections or list(default)
    return given


def facts(commit: str) -> Row:
    """What a record says of where it was made."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        driver = ""
    return {"gpu": jax.devices()[0].device_kind, "driver": driver, "jax": jax.__version__, "commit": commit}


def out_file(name: str) -> Path | None:
    """In the folder that OUT names."""
    return Path(os.environ["OUT"], name) if "OUT" in os.environ else None


def compile_all(lowered: Iterable[Any]) -> list[Any]:
    """Executables, made side by side: a compile holds no interpreter. A later call of the jitted function with such
    arguments finds them."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: each.compile(), lowered))
