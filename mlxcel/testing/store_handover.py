"""Laws of pages that go from row to row: part of `check_kv_store`, on a store that no row is open in."""

from __future__ import annotations

from mlxcel.core.kv import KVStore
from mlxcel.errors import CapacityError, UnknownSequence
from mlxcel.testing.laws import broken

GIVER, TAKER, SECOND = 10_001, 10_002, 10_003
"""Ids that the walk before does not come to."""


def check_handover(kv: KVStore, capacity: int) -> None:
    """detach, adopt, retain, release, holders and page_copy, by rows of up to `capacity` positions that end inside a
    page. All is free afterwards."""
    length = min(capacity - 2, kv.page_size + kv.page_size // 2)
    pages = _detached(kv, capacity, length)
    _check_counts(kv, owned=0, cached=len(pages), what=f"{length} positions were detached")
    kv.release(pages)
    _check_counts(kv, owned=0, cached=0, what="what was detached is released")
    pages = _detached(kv, capacity, length)
    kv.adopt(TAKER, capacity, pages, length)
    if kv.page_table(TAKER).tolist() != list(pages):
        raise broken("adopt", f"pages {list(pages)} were adopted, the table is {kv.page_table(TAKER).tolist()}")
    if kv.trim(TAKER, length + 1) != length:
        raise broken("adopt", f"{length} positions were adopted, and the row has written others")
    if kv.shares:
        _check_shared(kv, capacity, pages, length)
    else:
        _check_moved(kv, capacity, pages, length)
    _check_counts(kv, owned=0, cached=0, what="every row is gone and every hold given up")


def _check_shared(kv: KVStore, capacity: int, pages: tuple[int, ...], length: int) -> None:
    """The first hold is still there, beside the row's."""
    _check_holders(kv, pages, 2)
    kv.retain(pages)
    _check_holders(kv, pages, 3)
    kv.release(pages)
    kv.adopt(SECOND, capacity, pages, length)
    kv.reserve([(TAKER, 1), (SECOND, 1)])
    for row in (TAKER, SECOND):
        written = int(kv.page_table(row)[length // kv.page_size])
        wanted = (pages[-1], written, length % kv.page_size)
        if written in pages or kv.page_copy(row) != wanted:
            raise broken("copy", f"row {row} would write into page {written}, by the copy {kv.page_copy(row)}")
    for row in (TAKER, SECOND):
        kv.advance(row, 1)
    if kv.page_copy(TAKER) is not None:
        raise broken("copy", "one that was made is asked for again")
    if kv.page_table(TAKER)[-1] == kv.page_table(SECOND)[-1]:
        raise broken("copy", f"two rows write into page {kv.page_table(TAKER)[-1]}")
    for row in (TAKER, SECOND):
        kv.free(row)
    _check_counts(kv, owned=0, cached=len(pages), what="the rows are gone, and the hold is not")
    kv.release(pages)


def _check_moved(kv: KVStore, capacity: int, pages: tuple[int, ...], length: int) -> None:
    """The hold has become the row's."""
    _check_holders(kv, pages, 1)
    _check_counts(kv, owned=len(pages), cached=0, what="the pages moved into a row")
    try:
        kv.retain(pages)
    except ValueError:
        kv.free(TAKER)
        return
    raise broken("retain", "is taken by a store that shares nothing")


def _detached(kv: KVStore, capacity: int, length: int) -> tuple[int, ...]:
    kv.open(GIVER, capacity)
    kv.reserve([(GIVER, length + 1)])
    kv.advance(GIVER, length + 1)
    try:
        kv.detach(GIVER, length + 2)
    except CapacityError:
        pages = kv.detach(GIVER, length)
    else:
        raise broken("detach", f"{length + 2} positions go, and {length + 1} were written")
    if len(pages) != -(-length // kv.page_size):
        raise broken("detach", f"{length} positions are on {len(pages)} pages of {kv.page_size}")
    try:
        kv.page_table(GIVER)
    except UnknownSequence:
        return pages
    raise broken("detach", "the row is still there")


def _check_holders(kv: KVStore, pages: tuple[int, ...], count: int) -> None:
    found = [kv.holders(page) for page in pages]
    if found != [count] * len(pages):
        raise broken("holders", f"of pages {list(pages)} are {found}, each has {count}")


def _check_counts(kv: KVStore, *, owned: int, cached: int, what: str) -> None:
    stats = kv.stats()
    if (stats.owned, stats.cached, stats.free) != (owned, cached, stats.total - owned - cached):
        raise broken("stats", f"{what}: wanted {owned} owned and {cached} cached of {stats}")
