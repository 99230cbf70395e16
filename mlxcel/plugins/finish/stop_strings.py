"""Stop strings in a text that comes in pieces (spec F8 to F12).

One automaton over all strings of a request, after Aho and Corasick, "Efficient string matching" (1975): a state is the
longest end of the text that begins a stop string. The work of a character is constant on average, since a step back
undoes one step forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import attrs

ROOT = 0


class StopStrings:
    """The automaton. States are numbers, ROOT is the empty text. `strings` are not empty; a later one that occurs
    before adds nothing."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        parent, character, length = [ROOT], [""], [0]
        words: dict[int, str] = {}
        for string in strings:
            state = ROOT
            for char in string:
                after = self._next.setdefault((state, char), len(length))
                if after == len(length):
                    parent.append(state)
                    character.append(char)
                    length.append(length[state] + 1)
                state = after
            words[state] = string
        size = len(length)
        begins = [False] * size  # whether a stop string goes on behind this state
        for state in range(1, size):
            begins[parent[state]] = True
        self._shorter = [ROOT] * size  # the longest state that is a proper end of this one
        self.ended: list[str | None] = [None] * size  # the longest stop string that ends with this state
        self.held = [0] * size  # length of the longest end of the text that is a proper beginning of a stop string
        for state in sorted(range(1, size), key=length.__getitem__):
            if length[state] > 1:
                self._shorter[state] = self.step(self._shorter[parent[state]], character[state])
            shorter = self._shorter[state]
            self.ended[state] = words.get(state) or self.ended[shorter]
            self.held[state] = length[state] if begins[state] else self.held[shorter]

    def step(self, state: int, char: str) -> int:
        """The state behind one more character."""
        following = self._next
        while (after := following.get((state, char))) is None:
            if state == ROOT:
                return ROOT
            state = self._shorter[state]
        return after


class StopStringTable:
    """Automata by their strings, each kept as long as a row uses it: the choices of a request share one."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()

    def of(self, strings: tuple[str, ...]) -> StopStrings:
        found = self._used.get(strings)
        if found is None:
            found = self._used[strings] = StopStrings(strings)
        return found


@attrs.frozen
class Match:
    """A stop string that ended behind `end` characters of the text that was pushed. Its beginning may be older."""

    string: str
    end: int


class StopMatcher:
    """One row's place in the automaton."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = ROOT

    @property
    def held(self) -> int:
        """How many of the newest characters may still become part of a match (spec F12)."""
        return self._strings.held[self._state]

    def push(self, text: str, *, armed: bool = True) -> Match | None:
        """The match that ends first, and of those the one that begins first (spec F10); what follows it in `text` is
        not read. Not `armed`, matches are ordinary text (spec F6)."""
        strings = self._strings
        state = self._state
        for place, char in enumerate(text):
            state = strings.step(state, char)
            if armed and (string := strings.ended[state]) is not None:
                self._state = state
                return Match(string, place + 1)
        self._state = state
        return None
