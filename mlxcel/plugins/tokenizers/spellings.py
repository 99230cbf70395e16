"""Tokens that are found in a text by their spelling before it is segmented."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

START: Final = 2  # characters that select which lengths are tried


class Spellings:
    """A set of spellings with their ids; `split` finds the first, and of those the longest, again and again.

    White space behind an id in `strips_after`, and in front of one in `strips_before`, belongs to the token.
    """

    def __init__(
        self, ids: Mapping[str, int], *, strips_before: Collection[int] = (), strips_after: Collection[int] = ()
    ) -> None:
        self._ids = {spelling: index for spelling, index in ids.items() if spelling}
        self._strips_before = frozenset(strips_before)
        self._strips_after = frozenset(strips_after)
        lengths: dict[str, set[int]] = {}
        for spelling in self._ids:
            lengths.setdefault(spelling[:START], set()).add(len(spelling))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        first = "".join(sorted({re.escape(spelling[0]) for spelling in self._ids}))
        self._first = re.compile(f"[{first}]") if first else None

    def split(self, text: str) -> Iterator[str | int]:
        """The ids found and the texts between them, in order; no text is empty. Time is linear in the text."""
        start = at = 0
        while self._first is not None and (candidate := self._first.search(text, at)):
            at = candidate.start()
            found = self._longest(text, at)
            if found is None:
                at += 1
                continue
            index, end = found
            before = text[start:at]
            if index in self._strips_before:
                before = before.rstrip()
            if before:
                yield before
            yield index
            start = at = self._behind_spaces(text, end) if index in self._strips_after else end
        if start < len(text):
            yield text[start:]

    def _longest(self, text: str, at: int) -> tuple[int, int] | None:
        """The id of the longest spelling at a place, and its end."""
        for length in self._lengths.get(text[at : at + START], ()):
            index = self._ids.get(text[at : at + length])
            if index is not None:
                return index, at + length
        index = self._ids.get(text[at])  # a spelling of one character, whatever follows it
        return None if index is None else (index, at + 1)

    @staticmethod
    def _behind_spaces(text: str, at: int) -> int:
        while at < len(text) and text[at].isspace():
            at += 1
        return at
