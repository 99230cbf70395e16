"""How much a template may do: everything it computes is charged before, or as, it is computed. No clock is read.

A unit is about a nanosecond. What would take more than the bounds is refused before memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any, Final, NoReturn

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_STEPS: Final = 300_000  # turns of loops and calls of macros, about a second; 4,096 messages take a few each
MAX_CHARACTERS: Final = 1 << 25  # printed in one render, also into variables, and of any one text
MAX_WORK: Final = 1 << 31  # a few seconds at most; 4,096 messages in a template of 1,500 nodes come to a third
MAX_NESTING: Final = 100  # of lists in lists: C code follows them without a bound of its own
NODE, CALL, ITEM, WEIGHED_ITEM, CHARACTER = 64, 1024, 128, 512, 8
"""Units for a node of a loop's body, a call or filter, an item of a list as it is made and as it is looked into, and a
character of a text."""


class Meter:
    """Of one render."""

    def __init__(self) -> None:
        self._steps = 0
        self._characters = 0
        self._work = 0

    def charge(self, units: int) -> None:
        self._work += units
        if self._work > MAX_WORK:
            raise SecurityError("the template does more work than a prompt may take")

    def step(self, units: int) -> None:
        """A turn of a loop or a call of a macro, whose body takes `units`."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        self.charge(units)

    def write(self, text: str) -> None:
        """A text that is printed."""
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            refuse_size()

    def room(self, characters: int) -> None:
        """For a text that is about to be made."""
        if characters > MAX_CHARACTERS:
            refuse_size()
        self.charge(CHARACTER * characters)

    def grown(self, value: Any) -> Any:
        """The value, which an operation made; what it holds is not looked into."""
        if isinstance(value, str | bytes):
            self.room(len(value))
        elif isinstance(value, list | tuple | dict | set):
            self.charge(ITEM * len(value))
        return value

    def weigh(self, value: Any) -> int:
        """Characters that the value would have as text, at least; charged with every item in it, however deep. What
        compares, hashes or prints a value goes through all of that, once for each place it stands in."""
        characters, depth, level = 0, 0, [value]
        while level:
            if depth > MAX_NESTING:
                raise SecurityError(f"the template nests lists deeper than {MAX_NESTING}")
            deeper: list[Any] = []
            for item in level:
                if isinstance(item, str | bytes):
                    characters += len(item)
                    self.charge(CHARACTER * len(item))
                elif isinstance(item, int):
                    characters += 1 + item.bit_length() // 3
                elif (inner := _inside(item)) is None:
                    characters += 24
                else:
                    self.charge(WEIGHED_ITEM * (1 + len(inner)))
                    characters += 4 * len(inner)
                    deeper += inner
            depth, level = depth + 1, deeper
        return characters

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, charged as they are taken."""
        for item in items:
            self.charge(ITEM)
            yield item


def _inside(value: Any) -> Collection[Any] | None:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | range | set | frozenset | KeysView | ValuesView | ItemsView):
        return value
    if isinstance(value, Namespace):  # its own text shows what it holds
        return [*object.__getattribute__(value, "_Namespace__attrs").values()]
    return None


def refuse_size() -> NoReturn:
    raise SecurityError(f"the template writes more than {MAX_CHARACTERS} characters")
