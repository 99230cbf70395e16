"""Counts of values by size, as Prometheus reads them. One thread writes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

TTFT: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
DURATION: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0,
)  # fmt: skip
ROWS: Final = tuple(float(1 << power) for power in range(10))
TOKENS: Final = tuple(float(1 << power) for power in range(14))


class Histogram:
    """`bounds` are the upper ends of the buckets, smallest first; one without an end is behind them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, how many values up to it), the last one of all values."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, None), list(self._counts), strict=True):
            total += count
            found.append(("+Inf" if bound is None else repr(bound), float(total)))
        return found
