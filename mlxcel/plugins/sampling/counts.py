"""How often each id occurs, kept while ids come and go (spec S11)."""

from __future__ import annotations

import numpy as np

_ROOM = 64


class TokenCounts:
    """A multiset of token ids. The distinct ones stand side by side, so that packing them is a copy."""

    def __init__(self, ids: np.ndarray) -> None:
        """ids: int32 [n], counted as they are."""
        distinct, counts = np.unique(ids, return_counts=True)
        self._size = len(distinct)
        self._ids = distinct.astype(np.int32)
        self._counts = counts.astype(np.int32)
        self._places = {int(token): place for place, token in enumerate(distinct)}

    @property
    def ids(self) -> np.ndarray:
        """int32 view [U] of the distinct ids, in no order that means anything."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """int32 view [U], each 1 or more, beside `ids`."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._size
            if place == len(self._ids):
                room = np.zeros(max(_ROOM, place), np.int32)
                self._ids, self._counts = np.concatenate([self._ids, room]), np.concatenate([self._counts, room])
            self._ids[place], self._counts[place], self._places[token] = token, 0, place
            self._size += 1
        self._counts[place] += 1

    def remove(self, token: int) -> None:
        """KeyError for an id that is not there."""
        place = self._places[token]
        self._counts[place] -= 1
        if self._counts[place] == 0:
            del self._places[token]
            self._size -= 1
            if place < self._size:
                moved = int(self._ids[self._size])
                self._ids[place], self._counts[place] = moved, self._counts[self._size]
                self._places[moved] = place
