"""Paged storage: a pool of fixed pages, shared by reference count and copied before they are written to.

The idea of PagedAttention, https://arxiv.org/abs/2309.06180, with pages that end where attention blocks do.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from mlxcel.core.kv import BLOCK, KVSpec, KVStats, ceil_block
from mlxcel.errors import CapacityError, UnknownSequence, UsageError
from mlxcel.plugins.kv.page_pool import PagePool


@attrs.define(eq=False)
class _Row:
    table: np.ndarray  # int32, room for the pages of `capacity` positions
    capacity: int
    pages: int = 0  # of the table, in use
    written: int = 0
    reserved: int = 0  # positions behind `written` that the next step may write
    copy: tuple[int, int, int] | None = None  # planned: (from, to, positions); both pages are held

    @property
    def held(self) -> list[int]:
        return [int(page) for page in self.table[: self.pages]]


class PagedKV:
    """Up to `slots` rows on `pages` pages of `page_size` positions; without `pages`, as many as rows of `context`
    positions need."""

    name = "paged"
    paged = True
    shares = True

    def __init__(self, *, kv_spec: KVSpec, slots: int, context: int, page_size: int, pages: int | None = None) -> None:
        """UsageError for a page that does not divide the attention block (spec V1)."""
        if page_size < 1 or BLOCK % page_size:
            raise UsageError(f"a page of {page_size} positions does not divide {BLOCK}", hint="--page-size 16, 32 …")
        self.page_size = page_size
        self.num_pages = slots * self._pages_of(ceil_block(context)) if pages is None else pages
        self.copies = 0
        """Pages that were copied before a row wrote to them."""
        self._slots = slots
        self._pool = PagePool(self.num_pages)
        self._rows: dict[int, _Row] = {}
        self._reserving: list[_Row] = []  # of the reservation that stands
        self._planned: list[_Row] = []  # those of them that need a copy

    # --- rows -----------------------------------------------------------------------------------------------------

    def open(self, sequence_id: int, capacity: int) -> None:
        self._rows[sequence_id] = self._new_row(capacity)

    def adopt(self, sequence_id: int, capacity: int, pages: Sequence[int], length: int) -> None:
        row = self._new_row(capacity)
        row.pages, row.written = self._pages_of(length), length
        used = pages[: row.pages]
        if len(used) < row.pages or length > capacity:
            raise CapacityError(f"{length} positions do not come on {len(pages)} pages, in a row of {capacity}")
        self._pool.retain(used, row=True)
        row.table[: row.pages] = used
        self._rows[sequence_id] = row

    def detach(self, sequence_id: int, length: int) -> tuple[int, ...]:
        row = self._row(sequence_id)
        if length > row.written:
            raise CapacityError(f"sequence {sequence_id} has not written {length} positions, but {row.written}")
        self._unplan(row)
        kept = tuple(row.held[: self._pages_of(length)])
        self._pool.retain(kept, row=False)
        self.free(sequence_id)
        return kept

    def free(self, sequence_id: int) -> None:
        row = self._row(sequence_id)
        self._unplan(row)
        self._pool.release(row.held, row=True)
        row.reserved = 0
        del self._rows[sequence_id]

    def retain(self, pages: Sequence[int]) -> None:
        self._pool.retain(pages, row=False)

    def release(self, pages: Sequence[int]) -> None:
        self._pool.release(pages, row=False)

    def holders(self, page: int) -> int:
        return self._pool.holders(page)

    # --- positions ------------------------------------------------------------------------------------------------

    def reserve(self, wants: Sequence[tuple[int, int]]) -> None:
        self._drop_reservation()
        size, shared = self.page_size, self._pool.pinned > 0
        rows = []
        needed = 0
        leaving: dict[int, int] = {}  # rows that stop holding a page, since they get a copy of it
        copying: list[_Row] = []
        growing: list[tuple[_Row, int]] = []
        for sequence_id, count in wants:
            row = self._row(sequence_id)
            written = row.written
            end = written + count
            if end > row.capacity:
                raise CapacityError(
                    f"sequence {sequence_id} has {written} of {row.capacity} positions, {count} more do not fit"
                )
            if end > row.pages * size:
                growing.append((row, self._pages_of(end)))
                needed += growing[-1][1] - row.pages
            if shared and count and written % size:
                page = int(row.table[written // size])
                if self._pool.holders(page) - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    copying.append(row)
            rows.append(row)
        needed += len(copying)
        if needed > self._pool.free:
            raise CapacityError(
                f"the step needs {needed} pages of {self.page_size} positions, {self._pool.free} of {self.num_pages} "
                "are free",
                hint="end a row, or give the KV more memory with --kv-cache-budget",
            )
        for row in copying:
            last, target = row.written // self.page_size, self._pool.take()
            row.copy = (int(row.table[last]), target, row.written % self.page_size)
            row.table[last] = target
        self._planned = copying
        for row, pages in growing:
            while row.pages < pages:
                row.table[row.pages] = self._pool.take()
                row.pages += 1
        for row, (_, count) in zip(rows, wants, strict=True):
            row.reserved = count
        self._reserving = rows

    def page_copy(self, sequence_id: int) -> tuple[int, int, int] | None:
        return self._row(sequence_id).copy

    def advance(self, sequence_id: int, count: int) -> None:
        row = self._row(sequence_id)
        if count > row.reserved:
            raise CapacityError(f"sequence {sequence_id} would write {count} positions, {row.reserved} are reserved")
        for planned in self._planned:
            if planned.copy is not None:
                self._pool.release([planned.copy[0]], row=True)
                planned.copy = None
                self.copies += 1
        self._planned = []
        row.reserved -= count
        row.written += count

    def trim(self, sequence_id: int, length: int) -> int:
        row = self._row(sequence_id)
        self._unplan(row)
        row.written, row.reserved = min(row.written, length), 0
        self._shrink(row)
        return row.written

    def page_table(self, sequence_id: int) -> np.ndarray:
        row = self._row(sequence_id)
        return row.table[: row.pages]

    def stats(self) -> KVStats:
        pool = self._pool
        return KVStats(
            self.num_pages,
            pool.free,
            pool.owned,
            self.page_size,
            pool.cached,
            pool.pinned,
            pool.taken,
            pool.given_back,
            self.copies,
        )

    def check(self) -> None:
        """RuntimeError unless all accounts of the pages agree, and no page that a row may write into is held by
        another. For tests: looks at everything."""
        self._pool.check()
        tables = [page for row in self._rows.values() for page in row.held]
        tables += [row.copy[0] for row in self._rows.values() if row.copy is not None]
        if len(set(tables)) != self._pool.owned:
            raise RuntimeError(f"{len(set(tables))} pages are in tables, the pool counts {self._pool.owned}")
        leaving = [row.copy[0] for row in self._planned if row.copy is not None]
        for sequence_id, row in self._rows.items():
            for place in range(row.written // self.page_size, row.pages):
                page = int(row.table[place])
                if row.reserved and self._pool.holders(page) - leaving.count(page) != 1:
                    raise RuntimeError(f"row {sequence_id} may write into page {page}, which others hold")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _new_row(self, capacity: int) -> _Row:
        if len(self._rows) >= self._slots:
            raise CapacityError(
                f"all {self._slots} rows of the KV storage are taken",
                hint="close a sequence, or open the engine with more rows",
            )
        if self._pages_of(capacity) > self.num_pages:
            raise CapacityError(
                f"a row of {capacity} positions was asked for, all {self.num_pages} pages hold "
                f"{self.num_pages * self.page_size}"
            )
        return _Row(np.zeros(self._pages_of(capacity), np.int32), capacity)

    def _pages_of(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def _shrink(self, row: _Row) -> None:
        """Give back the pages behind the written positions."""
        keep = self._pages_of(row.written)
        if keep < row.pages:
            self._pool.release([int(page) for page in row.table[keep : row.pages]], row=True)
            row.pages = keep

    def _unplan(self, row: _Row) -> None:
        """Before something happens to a row that a copy is planned for: the reservation, which other rows of it may
        rely on, is void."""
        if row.copy is not None:
            self._drop_reservation()

    def _drop_reservation(self) -> None:
        for row in self._planned:
            if row.copy is not None:
                source, target, _ = row.copy
                row.table[row.written // self.page_size] = source
                row.copy = None
                self._pool.release([target], row=True)
        self._planned = []
        for row in self._reserving:
            if row.reserved:
                row.reserved = 0
                self._shrink(row)
        self._reserving = []

    def _row(self, sequence_id: int) -> _Row:
        try:
            return self._rows[sequence_id]
        except KeyError:
            raise UnknownSequence(sequence_id) from None
