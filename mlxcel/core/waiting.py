"""Rows that wait for a place, in the order they are served (spec C7, C11)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from mlxcel.core.job import Row

_Key = tuple[float, int, int]


def virtual_arrival(enqueued: float, lane: int, ageing: float) -> float:
    """A lane lets a request arrive `ageing` seconds later than the one before it: newer work can pass it for 2 * ageing
    at most, and nothing is sorted again."""
    return enqueued + lane * ageing


class WaitingLine:
    """By virtual arrival, then by the number of the request, then by choice. A preempted row comes back to its place.

    The order of two rows never changes, so a sorted list is enough; it holds what the queue's bound lets in.
    """

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._rows: dict[_Key, Row] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Row]:
        return iter([self._rows[key] for key in self._keys])

    @property
    def head(self) -> Row | None:
        return self._rows[self._keys[0]] if self._keys else None

    def add(self, row: Row) -> None:
        key = _key(row)
        insort(self._keys, key)
        self._rows[key] = row

    def remove(self, row: Row) -> None:
        """KeyError unless it waits."""
        key = _key(row)
        del self._rows[key]
        del self._keys[bisect_left(self._keys, key)]


def _key(row: Row) -> _Key:
    return (row.job.virtual, row.job.number, row.spec.choice)
