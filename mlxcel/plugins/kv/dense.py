"""Dense storage: one big page a row. The degenerate paged store, read by the same attention code (spec V7, V8)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from mlxcel.core.kv import KVSpec, KVStats, ceil_block
from mlxcel.errors import AdoptError, CapacityError, UnknownSequence


@attrs.define
class _Row:
    page: int
    capacity: int
    written: int = 0
    reserved: int = 0  # positions behind `written` that the next step may write


class DenseKV:
    """`slots` pages, each as long as the context. A row takes a page and may fill `capacity` positions of it."""

    name = "dense"
    paged = False
    shares = False

    def __init__(self, *, kv_spec: KVSpec, slots: int, context: int, page_size: int, pages: int | None = None) -> None:
        """`page_size` and `pages` are the paged stores' and mean nothing here: a page is the context, in whole blocks,
        and each row has one."""
        self.page_size = ceil_block(context)
        self.num_pages = slots
        self._free = list(range(slots - 1, -1, -1))
        self._rows: dict[int, _Row] = {}
        self._held: set[int] = set()  # pages that were detached
        self._taken = self._returned = 0  # so far

    def open(self, sequence_id: int, capacity: int) -> None:
        if not self._free:
            raise CapacityError(
                f"all {self.num_pages} rows of the KV storage are taken",
                hint="close a sequence, or open the engine with more rows",
            )
        if capacity > self.page_size:
            raise CapacityError(f"a row of {capacity} positions was asked for, a page holds {self.page_size}")
        self._rows[sequence_id] = _Row(self._free.pop(), ceil_block(capacity))
        self._taken += 1

    def adopt(self, sequence_id: int, capacity: int, pages: Sequence[int], length: int) -> None:
        """The page moves here. AdoptError when it has moved before, or was given back."""
        page = pages[0]
        if page not in self._held:
            raise AdoptError("a page can be adopted once, and this one is no longer held", reason="no_match")
        if capacity > self.page_size:
            raise CapacityError(f"a row of {capacity} positions was asked for, a page holds {self.page_size}")
        self._held.remove(page)
        self._rows[sequence_id] = _Row(page, ceil_block(capacity), length)

    def detach(self, sequence_id: int, length: int) -> tuple[int, ...]:
        if length > self._row(sequence_id).written:
            raise CapacityError(f"sequence {sequence_id} has not written {length} positions")
        page = self._rows.pop(sequence_id).page
        self._held.add(page)
        return (page,)

    def retain(self, pages: Sequence[int]) -> None:
        raise ValueError("dense pages are not shared")

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._held.remove(page)
            self._free.append(page)
            self._returned += 1

    def holders(self, page: int) -> int:
        return int(page in self._held or any(row.page == page for row in self._rows.values()))

    def reserve(self, wants: Sequence[tuple[int, int]]) -> None:
        for row in self._rows.values():
            row.reserved = 0
        rows = []
        for sequence_id, count in wants:
            row = self._row(sequence_id)
            if row.written + count > row.capacity:
                raise CapacityError(
                    f"sequence {sequence_id} has {row.written} of {row.capacity} positions, {count} more do not fit"
                )
            rows.append(row)
        for row, (_, count) in zip(rows, wants, strict=True):
            row.reserved = count

    def page_copy(self, sequence_id: int) -> None:
        """A row never writes into the page of another."""

    def advance(self, sequence_id: int, count: int) -> None:
        row = self._row(sequence_id)
        if count > row.reserved:
            raise CapacityError(f"sequence {sequence_id} would write {count} positions, {row.reserved} are reserved")
        row.reserved -= count
        row.written += count

    def trim(self, sequence_id: int, length: int) -> int:
        row = self._row(sequence_id)
        row.written = min(row.written, length)
        row.reserved = 0
        return row.written

    def page_table(self, sequence_id: int) -> np.ndarray:
        return np.array([self._row(sequence_id).page], np.int32)

    def free(self, sequence_id: int) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is None:
            raise UnknownSequence(sequence_id)
        self._free.append(row.page)
        self._returned += 1

    def stats(self) -> KVStats:
        return KVStats(
            self.num_pages,
            len(self._free),
            len(self._rows),
            self.page_size,
            len(self._held),
            taken=self._taken,
            returned=self._returned,
        )

    def _row(self, sequence_id: int) -> _Row:
        try:
            return self._rows[sequence_id]
        except KeyError:
            raise UnknownSequence(sequence_id) from None
