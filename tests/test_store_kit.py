"""The kit for KV stores: the tree's own pass it, and a store that breaks a law is told which."""

import numpy as np
import pytest

from mlxcel.core.kv import KVStats
from mlxcel.errors import CapacityError, UnknownSequence
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.testing.store_kit import check_kv_store

STORES = {"dense": DenseKV, "paged": PagedKV}
LAST = 60
"""A row that the walk opens late: near the end of it."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("store", STORES)
def test_the_stores_of_the_tree_keep_all_laws(store, seed):
    check_kv_store(STORES[store], seed=seed)


def broken_by(**methods):
    """What the kit says of a DenseKV with these methods."""
    with pytest.raises(AssertionError) as caught:
        check_kv_store(type("Broken", (DenseKV,), methods))
    return str(caught.value)


def half_reserve(self, wants):
    """Grants the rows in order until one does not fit."""
    try:
        DenseKV.reserve(self, wants)
    except CapacityError:
        DenseKV.reserve(self, wants[:1])
        raise


def keeping_reserve(self, wants):
    """Adds to the reservation before it."""
    before = {row: kept.reserved for row, kept in self._rows.items()}
    DenseKV.reserve(self, wants)
    for row, kept in self._rows.items():
        kept.reserved = max(kept.reserved, before[row])


def leaking_open(self, sequence_id, capacity):
    """A page that nobody can find again goes with each refusal."""
    try:
        DenseKV.open(self, sequence_id, capacity)
    except CapacityError:
        self.num_pages += 1
        raise


def long_advance(self, sequence_id, count):
    row = self._row(sequence_id)
    row.reserved = max(row.reserved, count)
    DenseKV.advance(self, sequence_id, count)


def short_trim(self, sequence_id, length):
    return DenseKV.trim(self, sequence_id, max(0, length - 1))


def keeping_trim(self, sequence_id, length):
    """Its reservation outlives it."""
    reserved = self._row(sequence_id).reserved
    kept = DenseKV.trim(self, sequence_id, length)
    self._row(sequence_id).reserved = max(reserved, 1)
    return kept


def forgetful_free(self, sequence_id):
    DenseKV.free(self, sequence_id)
    self._free.pop()


def swallowing_reserve(self, wants):
    """Grants what it cannot."""
    try:
        DenseKV.reserve(self, wants)
    except CapacityError:
        DenseKV.reserve(self, [])


def derived_stats(self):
    return KVStats(self.num_pages, len(self._free), self.num_pages - len(self._free), self.page_size)


def moving_table(self, sequence_id):
    row = self._row(sequence_id)
    return np.array([(row.page + (row.written > 100)) % self.num_pages], np.int32)


LIES = [
    ({"name": ""}, "stats: the store is named ''"),
    ({"num_pages": property(lambda self: 0, lambda self, pages: None)}, "stats: the store is named 'dense' and has 0"),
    ({"page_size": property(lambda self: 200, lambda self, size: None)}, "table: a page of 200 positions ends inside"),
    ({"stats": lambda self: KVStats(4, 4, 1, 384)}, "stats: free and owned of"),
    ({"stats": lambda self: KVStats(8, 8, 0, 384)}, "stats: "),
    ({"free": forgetful_free}, "stats: free and owned of"),
    ({"open": lambda self, row, capacity: self.nowhere(row)}, "open: no row is open"),
    ({"open": leaking_open}, "open: refused, and KVStats("),
    ({"reserve": half_reserve}, "advance: row"),
    ({"reserve": keeping_reserve}, "advance: row"),
    ({"reserve": lambda self, wants: None}, "advance: row"),
    ({"reserve": swallowing_reserve}, "reserve: "),
    ({"free": forgetful_free, "stats": derived_stats}, "open: no row is open"),
    ({"advance": long_advance}, "advance: row"),
    ({"trim": short_trim}, "trim: row"),
    ({"trim": keeping_trim}, "advance: row"),
    ({"page_table": lambda self, row: np.array([0], np.int32)}, "table: rows"),
    ({"page_table": lambda self, row: np.array([4], np.int32)}, "table: of row 1 is [4], of 4 pages"),
    ({"page_table": lambda self, row: np.zeros(0, np.int32)}, "table: row"),
    ({"page_table": lambda self, row: DenseKV.page_table(self, row).astype(np.int64)}, "table: of row 1 is int64 [1]"),
    ({"page_table": moving_table}, "table: "),
]


@pytest.mark.parametrize(("methods", "words"), LIES)
def test_a_store_that_breaks_a_law_is_told_which(methods, words):
    def nowhere(self, row):
        raise CapacityError("no room")

    assert broken_by(**{"nowhere": nowhere, **methods}).startswith(words)


@pytest.mark.parametrize("method", ["free", "trim", "page_table", "advance", "reserve"])
def test_a_row_that_was_never_open_must_be_refused(method):
    def forgiving(self, *args):
        try:
            return getattr(DenseKV, method)(self, *args)
        except UnknownSequence:
            return 0

    assert broken_by(**{method: forgiving}) == f"unknown: {method} of a row that was never open is taken"


def test_a_store_whose_reservation_holds_pages_after_a_refusal_is_caught():
    """All or none, by the counts of pages too."""

    class Holding(DenseKV):
        held = 0

        def reserve(self, wants):
            self.held = 0
            try:
                super().reserve(wants)
            except CapacityError:
                self.held = min(1, len(self._free))
                raise

        def stats(self):
            stats = super().stats()
            return KVStats(stats.total, stats.free - self.held, stats.owned + self.held, stats.page_size)

    with pytest.raises(AssertionError, match="reserve: refused, and pages were held all the same"):
        check_kv_store(Holding)


def test_a_lone_row_that_does_not_get_its_capacity_is_caught():
    """Spec V20: so a lone row can always reach N."""

    class Tight(DenseKV):
        def reserve(self, wants):
            if sum(count for _row, count in wants) > 40:
                super().reserve([])
                raise CapacityError("no room")
            super().reserve(wants)

    with pytest.raises(AssertionError, match="is refused to the only row"):
        check_kv_store(Tight)


def test_pages_that_are_lost_with_the_last_row_are_caught():
    class Losing(DenseKV):
        def free(self, sequence_id):
            super().free(sequence_id)
            if len(self._free) == self.num_pages and sequence_id > LAST:
                self._free.pop()

        stats = derived_stats

    with pytest.raises(AssertionError, match="stats: every row is gone, and KVStats"):
        check_kv_store(Losing)


def broken_pages(**methods):
    """What the kit says of a PagedKV with these methods."""
    with pytest.raises(AssertionError) as caught:
        check_kv_store(type("Broken", (PagedKV,), methods))
    return str(caught.value)


def letting_detach(self, sequence_id, length):
    """Its pages are free at once."""
    pages = PagedKV.detach(self, sequence_id, length)
    PagedKV.release(self, pages)
    return pages


def long_detach(self, sequence_id, length):
    """All that the row has, whatever was asked for."""
    row = self._row(sequence_id)
    return PagedKV.detach(self, sequence_id, row.written)


def staying_detach(self, sequence_id, length):
    row = self._row(sequence_id)
    if length > row.written:
        raise CapacityError("not written")
    pages = tuple(row.held[: -(-length // self.page_size)])
    self.retain(pages)
    return pages


def copies_of_none(self, sequence_id):
    PagedKV.page_copy(self, sequence_id)


def moving_adopt(self, sequence_id, capacity, pages, length):
    PagedKV.adopt(self, sequence_id, capacity, pages, length)
    self.release(pages)


def short_adopt(self, sequence_id, capacity, pages, length):
    PagedKV.adopt(self, sequence_id, capacity, pages, length - 1)


def copying_too_much(self, sequence_id):
    copy = PagedKV.page_copy(self, sequence_id)
    return copy and (*copy[:2], self.page_size)


HANDOVER_LIES = [
    ({"detach": letting_detach}, "stats: 24 positions were detached"),
    ({"detach": long_detach}, "detach: 26 positions go"),
    ({"detach": staying_detach}, "detach: the row is still there"),
    ({"adopt": moving_adopt}, "holders: of pages"),
    ({"adopt": short_adopt}, "adopt: 24 positions were adopted"),
    ({"page_copy": copies_of_none}, "copy: row 10002"),
    ({"page_copy": copying_too_much}, "copy: row 10002"),
    ({"holders": lambda self, page: 1}, "holders: of pages"),
    ({"retain": lambda self, pages: None}, "holders: of pages"),
]


@pytest.mark.parametrize(("methods", "words"), HANDOVER_LIES)
def test_a_store_that_breaks_a_law_of_handing_over_is_told_which(methods, words):
    assert broken_pages(**methods).startswith(words)


def test_a_dense_store_that_takes_a_second_hold_is_told_so():
    assert broken_by(retain=lambda self, pages: None) == "retain: is taken by a store that shares nothing"
