"""Which pages are free, and who holds the others: a free list and counts of holders (spec V3)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class PagePool:
    """Pages 0 … `total` - 1. A page is held by rows' tables and by others, each any number of times; without a holder
    it is free. `retain` and `release` are the only ways to change that.

    `owned` pages are in the table of a row, `cached` ones are held by others alone, `pinned` ones have more than one
    holder. Nothing here grows with `total` before pages are used.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.owned = self.cached = self.pinned = 0
        self.taken = self.given_back = 0  # so far
        self._rows = np.zeros(total, np.int32)  # holds of each page by tables of rows
        self._others = np.zeros(total, np.int32)
        self._returned: list[int] = []  # free pages that were held before, the next one last
        self._fresh = 0  # pages from here on were never held

    @property
    def free(self) -> int:
        return self.total - self.owned - self.cached

    def holders(self, page: int) -> int:
        return int(self._rows[page]) + int(self._others[page])

    def take(self) -> int:
        """A free page, held by one row now. The caller has looked at `free`."""
        if self._returned:
            page = self._returned.pop()
        elif self._fresh < self.total:
            page = self._fresh
            self._fresh += 1
        else:
            raise RuntimeError(f"a page was taken, and all {self.total} are held")
        self._change(page, rows=1)
        self.taken += 1
        return page

    def retain(self, pages: Iterable[int], *, row: bool) -> None:
        """One more hold of each: by a row's table, or by somebody else. RuntimeError for a page that nobody holds."""
        for page in pages:
            if not self.holders(page):
                raise RuntimeError(f"page {page} is retained, and nobody holds it")
            self._change(page, rows=int(row), others=int(not row))

    def release(self, pages: Iterable[int], *, row: bool) -> None:
        """One hold less of each. RuntimeError for a hold that was never taken."""
        for page in pages:
            self._change(page, rows=-int(row), others=-int(not row))
            if not self.holders(page):
                self._returned.append(page)
                self.given_back += 1

    def check(self) -> None:
        """RuntimeError unless the counters are what the counts of the pages come to. For tests: looks at all pages."""
        holders = self._rows + self._others
        counted = (
            int((self._rows > 0).sum()),
            int(((self._others > 0) & (self._rows == 0)).sum()),
            int((holders > 1).sum()),
        )
        if counted != (self.owned, self.cached, self.pinned):
            raise RuntimeError(f"owned, cached and pinned are {self.owned, self.cached, self.pinned}, not {counted}")
        listed = {*self._returned, *range(self._fresh, self.total)}
        if listed != set(np.flatnonzero(holders == 0).tolist()) or len(listed) != self.free:
            raise RuntimeError(f"{sorted(listed)} are listed as free, and {self.free} pages are")

    def _change(self, page: int, *, rows: int = 0, others: int = 0) -> None:
        had_rows, had_others = int(self._rows[page]), int(self._others[page])
        has_rows, has_others = had_rows + rows, had_others + others
        if has_rows < 0 or has_others < 0:
            raise RuntimeError(f"page {page} is released more often than it was held")
        self._rows[page], self._others[page] = has_rows, has_others
        self.owned += (has_rows > 0) - (had_rows > 0)
        self.cached += (has_rows == 0 < has_others) - (had_rows == 0 < had_others)
        self.pinned += (has_rows + has_others > 1) - (had_rows + had_others > 1)
