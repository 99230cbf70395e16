"""Conformance of a KV store: `check_kv_store(MyStore)` in a test of its own distribution.

A walk of seeded calls against a plain account of what was asked for. No array is touched: a store is bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from mlxcel.core.kv import BLOCK, FullKV, KVSpec, KVStats, KVStore
from mlxcel.errors import CapacityError, UnknownSequence
from mlxcel.testing.laws import broken
from mlxcel.testing.store_handover import check_handover

SPEC = KVSpec((FullKV(kv_heads=2, k_dim=8, v_dim=8), FullKV(kv_heads=1, k_dim=8, v_dim=4)))
SLOTS, CONTEXT, PAGE_SIZE = 4, 300, 16
CALLS = 600
LARGEST = 90
"""Most positions that one call of the walk asks for: a row of CONTEXT takes a few, and crosses pages and a block."""


@attrs.define
class _Account:
    """What the calls so far come to for one row."""

    capacity: int
    written: int = 0
    reserved: int = 0
    table: tuple[int, ...] = ()  # pages of the written positions


def check_kv_store(make: Callable[..., KVStore], *, seed: int = 0, calls: int = CALLS) -> None:
    """All laws of a store, over one walk. `make` is what `mlxcel_kv_stores` names: it is called as the loader calls it,
    with `kv_spec`, `slots`, `context` and `page_size` by keyword. AssertionError says which law broke, and where.

    - stats: `free + owned + cached == total` after each call, and all is free when every row is gone.
    - open: a row gets room, or CapacityError and nothing changed.
    - reserve: all of the positions or none, and the one before is replaced.
    - advance: no position that is not reserved.
    - trim: keeps the first n positions, says how many, and ends the reservation.
    - table: covers the positions, on pages that no other row has; a written position keeps its page.
    - unknown: a row that is not open is UnknownSequence.
    - detach, adopt, retain, holders: pages outlive their row, are held by as many as took hold, and come free with the
      last; where they are not shared they move.
    - copy: nobody writes into a page that somebody else holds; the copy before it is planned with its positions.
    """
    walk = _Walk(make(kv_spec=SPEC, slots=SLOTS, context=CONTEXT, page_size=PAGE_SIZE), np.random.default_rng(seed))
    walk.check_borders()
    for _ in range(calls):
        walk.call()
        walk.check()
    for row in list(walk.rows):
        walk.free(row)
        walk.check()
    if walk.kv.stats().free != walk.kv.stats().total:
        raise broken("stats", f"every row is gone, and {walk.kv.stats()} has pages that are not free")
    walk.check_unknown()
    check_handover(walk.kv, CONTEXT)


class _Walk:
    def __init__(self, kv: KVStore, rng: np.random.Generator) -> None:
        self.kv = kv
        self.rng = rng
        self.rows: dict[int, _Account] = {}
        self.next_id = 1

    def check_borders(self) -> None:
        if not self.kv.name or self.kv.num_pages < 1:
            raise broken("stats", f"the store is named {self.kv.name!r} and has {self.kv.num_pages} pages")
        size = self.kv.page_size
        if size < 1 or (size % BLOCK and BLOCK % size):
            raise broken("table", f"a page of {size} positions ends inside a block of {BLOCK}")

    def call(self) -> None:
        rows = list(self.rows)
        choice = self.rng.choice(
            ["open", "free", "trim", "shortage", "write", "again"], p=[0.2, 0.06, 0.1, 0.14, 0.4, 0.1]
        )
        if choice == "open" or not rows:
            self.open()
            return
        row = int(self.rng.choice(rows))
        if choice == "free":
            self.free(row)
        elif choice == "trim":
            self.trim(row, int(self.rng.integers(0, self.rows[row].written + 20)))
        elif choice == "shortage":
            self.shortage(row)
        else:
            self.write(again=choice == "again")

    def open(self) -> None:
        before, capacity = self.kv.stats(), int(self.rng.integers(1, CONTEXT + 1))
        try:
            self.kv.open(self.next_id, capacity)
        except CapacityError:
            if not self.rows:
                raise broken("open", f"no row is open, and one of {capacity} positions finds no room") from None
            if self.kv.stats() != before:
                raise broken("open", f"refused, and {before} became {self.kv.stats()}") from None
        else:
            self.rows[self.next_id] = _Account(capacity)
        self.next_id += 1

    def free(self, row: int) -> None:
        self.kv.free(row)
        del self.rows[row]

    def write(self, *, again: bool) -> None:
        """Reserve for some rows and advance some of them by all or by a part; with `again` only the second of two
        reservations counts."""
        if again:
            self.reserve()
        wants = self.reserve()
        for row, count in wants.items():
            taken = int(self.rng.integers(0, count + 1)) if self.rng.random() < 0.3 else count
            try:
                self.kv.advance(row, taken)
            except CapacityError as error:
                raise broken("advance", f"row {row} may not write {taken} of {count} reserved positions") from error
            account = self.rows[row]
            account.written += taken
            account.reserved -= taken
        row = int(self.rng.choice(list(self.rows)))
        self.refused_advance(row)

    def reserve(self) -> dict[int, int]:
        """A reservation, by row: empty where the store has no room for all of it."""
        wants: dict[int, int] = {}
        for row, account in self.rows.items():
            room = account.capacity - account.written
            if room and self.rng.random() < 0.6:
                wants[row] = int(self.rng.integers(1, min(room, LARGEST) + 1))
        for account in self.rows.values():
            account.reserved = 0
        try:
            self.kv.reserve(list(wants.items()))
        except CapacityError:
            if len(self.rows) == 1:
                raise broken("reserve", f"{wants} is refused to the only row, which may have {self.rows}") from None
            self.check_nothing_reserved()
            return {}
        for row, count in wants.items():
            self.rows[row].reserved = count
        return wants

    def shortage(self, row: int) -> None:
        """One row asks for more than the whole store has: the others get nothing either."""
        wants = [(other, 1) for other in self.rows if other != row]
        wants.insert(int(self.rng.integers(0, len(wants) + 1)), (row, self.kv.num_pages * self.kv.page_size + 1))
        for account in self.rows.values():
            account.reserved = 0
        try:
            self.kv.reserve(wants)
        except CapacityError:
            self.check_nothing_reserved()
            return
        raise broken("reserve", f"{wants} is granted by a store of {self.kv.stats()}")

    def check_nothing_reserved(self) -> None:
        for row in self.rows:
            self.refused_advance(row)
        held = self.kv.stats()
        self.kv.reserve([])
        if self.kv.stats() != held:
            raise broken("reserve", f"refused, and pages were held all the same: {held}, then {self.kv.stats()}")

    def refused_advance(self, row: int) -> None:
        reserved = self.rows[row].reserved
        try:
            self.kv.advance(row, reserved + 1)
        except CapacityError:
            return
        raise broken("advance", f"row {row} writes {reserved + 1} positions where {reserved} are reserved")

    def trim(self, row: int, length: int) -> None:
        account = self.rows[row]
        wanted, kept = min(length, account.written), self.kv.trim(row, length)
        if kept != wanted:
            raise broken("trim", f"row {row} has {account.written} positions; trimmed to {length} it keeps {kept}")
        account.written, account.reserved = wanted, 0
        account.table = account.table[: -(-wanted // self.kv.page_size)]
        self.refused_advance(row)

    def check(self) -> None:
        stats = self.kv.stats()
        counts = (stats.free, stats.owned, stats.cached)
        if sum(counts) != stats.total or min(counts) < 0:
            raise broken("stats", f"free and owned of {stats} do not add up")
        if (stats.total, stats.page_size) != (self.kv.num_pages, self.kv.page_size):
            raise broken("stats", f"{stats} of a store of {self.kv.num_pages} pages of {self.kv.page_size}")
        holders: dict[int, int] = {}
        for row, account in self.rows.items():
            for page in self.check_table(row, account, stats):
                if holders.setdefault(page, row) != row:
                    raise broken("table", f"rows {holders[page]} and {row} both write page {page}")

    def check_table(self, row: int, account: _Account, stats: KVStats) -> tuple[int, ...]:
        """The pages that hold the row's positions, reserved ones too."""
        table = self.kv.page_table(row)
        if table.dtype != np.int32 or table.ndim != 1:
            raise broken("table", f"of row {row} is {table.dtype} {list(table.shape)}, wanted int32 [P]")
        positions = account.written + account.reserved
        if len(table) * stats.page_size < positions:
            raise broken("table", f"row {row} has {positions} positions and the pages {table.tolist()}")
        if len(set(table.tolist())) != len(table) or not all(0 <= page < stats.total for page in table.tolist()):
            raise broken("table", f"of row {row} is {table.tolist()}, of {stats.total} pages")
        pages = tuple(table.tolist())
        if pages[: len(account.table)] != account.table:
            raise broken("table", f"row {row} wrote the pages {list(account.table)}, and its table is {table.tolist()}")
        account.table = pages[: -(-account.written // stats.page_size)]
        return pages[: -(-positions // stats.page_size)]

    def check_unknown(self) -> None:
        for what, call in (
            ("free", lambda: self.kv.free(self.next_id)),
            ("trim", lambda: self.kv.trim(self.next_id, 0)),
            ("page_table", lambda: self.kv.page_table(self.next_id)),
            ("advance", lambda: self.kv.advance(self.next_id, 1)),
            ("reserve", lambda: self.kv.reserve([(self.next_id, 1)])),
        ):
            try:
                call()
            except UnknownSequence:
                continue
            raise broken("unknown", f"{what} of a row that was never open is taken")
