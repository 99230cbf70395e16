"""Whether the head of the queue may begin, by pages (spec C10, C17, C21, V21). Arithmetic alone: nothing is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs

from mlxcel.core.job import Row
from mlxcel.core.kv import KVStats


@attrs.frozen
class Need:
    """What a row wants of the KV: `positions` at once, of which `adopted` are on `adopted_pages` of the prompt cache,
    and at most `capacity` in the end."""

    positions: int
    capacity: int
    adopted: int = 0
    adopted_pages: int = 0


class Admission:
    """`context` is N, `watermark` the share of all pages that growth keeps for itself while rows decode."""

    def __init__(self, *, context: int, watermark: float, preemption: bool) -> None:
        self._context, self._watermark, self._preemption = context, watermark, preemption

    def fits(self, need: Need, stats: KVStats, seated: Iterable[Row]) -> bool:
        """Whether there are pages for `need`, counting what the prompt cache could give up, beside the `seated` rows.

        A page that holds a whole row leaves nothing to grow into: then a row is one page and there is no watermark.
        """
        whole = stats.page_size >= self._context
        rows = list(seated)
        wanted = self._pages(need.positions if self._preemption else need.capacity, stats)
        wanted -= need.adopted_pages if whole else need.adopted // stats.page_size
        kept = 0
        if not whole and any(row.can_decode for row in rows):
            kept = math.ceil(self._watermark * stats.total)
        if not self._preemption:
            kept = max(kept, sum(self._promised(row, stats) for row in rows))
        return wanted + kept <= stats.free + stats.cached - need.adopted_pages

    def _promised(self, row: Row, stats: KVStats) -> int:
        """Pages that a row may still grow by."""
        return self._pages(row.prompt_length + row.max_new, stats) - self._pages(max(1, row.at), stats)

    @staticmethod
    def _pages(positions: int, stats: KVStats) -> int:
        return -(-positions // stats.page_size)
