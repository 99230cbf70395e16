"""A reply that repeats itself (spec 5.5)."""

from __future__ import annotations

from collections import deque

from mlxcel.core.params import LoopDetection


class LoopDetector:
    """Fires when, for some period p of the settings, the newest p * min_count tokens are min_count equal blocks.

    `run_p` is how many newest tokens in a row equal the token p before them; p * (min_count - 1) of them are those
    blocks (spec F17). A token costs one comparison a period, and max_pattern tokens are remembered.
    """

    def __init__(self, settings: LoopDetection) -> None:
        self._periods = range(max(1, settings.min_pattern), settings.max_pattern + 1)
        self._count = settings.min_count
        self._recent: deque[int] = deque(maxlen=settings.max_pattern)
        self._runs = [0] * len(self._periods)

    def push(self, token: int, *, forced: bool = False) -> int | None:
        """The smallest period that fires with this token, or None. Behind a `forced` token everything begins anew: no
        block with one in it counts (spec F18)."""
        if forced:
            self._recent.clear()
            self._runs = [0] * len(self._periods)
            return None
        fired = None
        for place, period in enumerate(self._periods):
            if period <= len(self._recent) and self._recent[-period] == token:
                self._runs[place] += 1
                if fired is None and self._runs[place] >= period * (self._count - 1):
                    fired = period
            else:
                self._runs[place] = 0
        self._recent.append(token)
        return fired
