"""When requests are due: a plan that the seed fixes and no reply can change."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is due, the first at 0.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 gives Poisson arrivals, less gives bursts. They
    are scaled so that their mean is exactly 1 / `rate`. All are 0 for an infinite rate.
    """
    if math.isinf(rate):
        return [0.0] * count
    chance = random.Random(f"arrivals {seed}")
    gaps = [chance.gammavariate(burstiness, 1.0) for _ in range(count - 1)]
    drawn = math.fsum(gaps)
    scale = len(gaps) / rate / drawn if drawn else 0.0
    return [0.0, *accumulate(gap * scale for gap in gaps)]
