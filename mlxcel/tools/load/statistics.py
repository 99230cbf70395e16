"""Mean, spread and percentiles, as NumPy computes them, of lists that are short enough to do without it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation, of the values themselves and not of what they were drawn from."""
    middle = mean(values)
    if middle is None:
        return None
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between two values it is on the line that joins them."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
