"""Where the time of a measuring process goes, beside what it measures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from mlxcel.tools.bench.watch import Clock


@attrs.define
class Spent:
    """Seconds by phase, in the order in which they began."""

    clock: Clock
    seconds: dict[str, float] = attrs.field(factory=dict)

    @contextmanager
    def on(self, phase: str) -> Iterator[None]:
        self.seconds.setdefault(phase, 0.0)
        began = self.clock()
        try:
            yield
        finally:
            self.seconds[phase] += (self.clock() - began) / 1e9

    @property
    def line(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())


def process_age() -> float | None:
    """Seconds since this process was started, None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine was
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None
