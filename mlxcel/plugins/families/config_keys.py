"""Reading a checkpoint's config: every value is checked, and an error names its key and the file's own value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcel.errors import CheckpointError

LARGEST = 1 << 24
"""No size in a config of a real model is larger; a damaged one must not choose how much memory is asked for."""

REALS = (1e-30, 1e30)
"""What a number may be: inside float32, with room for a product."""


class ConfigKeys:
    """Typed access to one config mapping. `where` names it for errors ("config.json", "the GGUF metadata")."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw = raw
        self._where = where
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there; null counts as not there."""
        return self._get(key) is not None

    def refuse_unread(self, neutral: Mapping[str, tuple[Any, ...]], family: str) -> None:
        """CheckpointError when a key of `neutral` that nobody asked for has a value that is not a neutral one."""
        for key, values in neutral.items():
            if key not in self._asked and self._raw.get(key) not in values:
                known = " or ".join("left out" if value is None else repr(value) for value in values)
                raise self.wrong(key, f"{known}: the family {family} has no such thing")

    def value(self, key: str) -> Any:
        if not self.has(key):
            raise CheckpointError(f"{self._where} has no {key}", hint="the checkpoint is incomplete or of another kind")
        return self._raw[key]

    def size(self, key: str, default: int | None = None, *, largest: int = LARGEST) -> int:
        """An integer from 1 to `largest`."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise self.wrong(key, f"an integer from 1 to {largest}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """An integer of 0 or more."""
        value = self._get(key)
        if value is None:
            return default
        return 0 if value == 0 and not isinstance(value, bool) else self.size(key)

    def words(self, key: str, known: tuple[str, ...], length: int) -> tuple[str, ...]:
        """A list of `length` known words."""
        return tuple(self._list(key, length, lambda value: value in known, f"one of {', '.join(known)}"))

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        """A list of `length` values of true and false, or 1 and 0."""
        return tuple(bool(value) for value in self._list(key, length, lambda value: value in (0, 1), "1 or 0"))

    def indices(self, key: str, below: int) -> frozenset[int]:
        """A list of integers from 0 to `below` - 1; none where there is no list."""
        if not self.has(key):
            return frozenset()

        def known(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below

        return frozenset(self._list(key, None, known, f"an integer from 0 to {below - 1}"))

    def counts(self, key: str, length: int) -> tuple[int, ...]:
        """A list of `length` integers of 0 or more."""

        def known(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST

        return tuple(self._list(key, length, known, f"an integer from 0 to {LARGEST}"))

    def _list(self, key: str, length: int | None, known: Callable[[Any], bool], each: str) -> Sequence[Any]:
        values = self.value(key)
        if not isinstance(values, list | tuple) or (length is not None and len(values) != length):
            count = "" if length is None else f"{length} times "
            raise self.wrong(key, f"a list, {count}{each}")
        for place, value in enumerate(values):
            if not known(value):
                shown = ConfigKeys({f"{key}[{place}]": value}, self._where)
                raise shown.wrong(f"{key}[{place}]", f"{each}: nothing else is supported")
        return values

    def _get(self, key: str) -> Any:
        self._asked.add(key)
        return self._raw.get(key)

    def real(
        self, key: str, default: float | None = None, *, least: float = REALS[0], largest: float = REALS[1]
    ) -> float:
        """A number from `least`, above 0, to `largest`; by default one that float32 holds."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, "a number above 0")
        if not least <= value <= largest:
            raise self.wrong(key, f"a number from {least:g} to {largest:g}")
        return float(value)

    def real_or_zero(self, key: str) -> float:
        """A number above 0 that float32 holds, or 0: also where there is none."""
        return self.real(key) if self.has(key) and self.value(key) != 0 else 0.0

    def reals(self, key: str, length: int, *, largest: float = REALS[1]) -> tuple[float, ...]:
        """`length` numbers above 0, up to `largest`."""
        values = self.value(key)
        if not isinstance(values, list | tuple) or len(values) != length:
            shown = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise CheckpointError(f"{self._where} says {key} = {shown}: it must be a list of {length} numbers")
        each = ConfigKeys({f"{key}[{place}]": value for place, value in enumerate(values)}, self._where)
        return tuple(each.real(f"{key}[{place}]", largest=largest) for place in range(length))

    def names(self) -> tuple[str, ...]:
        """The keys that are there."""
        return tuple(key for key in self._raw if self.has(key))

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def word(self, key: str, known: tuple[str, ...], default: str | None = None) -> str:
        """One of the known words."""
        if default is not None and not self.has(key):
            return default
        value = self.value(key)
        if value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}: nothing else is supported")
        return str(value)

    def within(self, key: str) -> ConfigKeys | None:
        """A mapping inside this one, or None."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a mapping")
        return ConfigKeys(value, f"{self._where.removesuffix(',')}, {key},")

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        value = repr(self._raw.get(key))
        return CheckpointError(f"{self._where} says {key} = {value[:80]}: it must be {wanted}")
