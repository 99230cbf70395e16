"""What the memory of a device gives: rates of reading and of copying, which shares of a limit are of.

One figure of one moment is none. On an H200 calls of 6 ms, timed from the host a few times, came to anything from 3.8
to 4.2 TB/s: calling and hearing of it is a thirtieth of so short a time, the clocks of a card that has done nothing
come up while it is measured, and one form of a kernel is not what the memory can do. So a call moves MOVED bytes,
calls that are not timed come before each round, rounds lie all along the run that they belong to, and what counts is
the best of the medians of several forms and sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import attrs

MOVED: Final = 96 << 30
"""Bytes of one timed call: 23 ms of an H200, whose host takes 0.2 ms to call and to hear."""
SIZES: Final = (4 << 30, 1 << 30)
"""Of the arrays that are read, both far above what caches hold; the first is what is copied too, by halves."""
WARMING: Final = 4
"""Calls before those that are timed."""
LANES: Final = 1 << 14
"""Words of a row, where each row is reduced by itself."""


@attrs.define
class Form:
    """One way to move `size` bytes, and GB/s of each call so far. `kind` is what it measures."""

    kind: str
    words: str
    size: int
    call: Callable[[], Any]
    rates: list[float] = attrs.field(factory=list)

    @property
    def row(self) -> dict[str, Any]:
        return {
            "what": self.kind, "form": self.words, "gb_per_s": statistics.median(self.rates),
            "gb_per_s_range": [min(self.rates), max(self.rates)], "rounds": len(self.rates),
        }  # fmt: skip


class Bandwidth:
    """Rounds of all forms. A round times each once."""

    def __init__(
        self, forms: Sequence[Form], wait: Callable[[Any], Any], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`wait` returns when what a call gave is there."""
        self._forms, self._wait, self._clock = list(forms), wait, clock

    def round(self) -> None:
        """The first round's calls compile, and none of them is timed before its form has run."""
        for form in self._forms:
            if not form.rates:
                self._wait(form.call())
        for _ in range(WARMING):
            self._wait(self._forms[0].call())
        for form in self._forms:
            began = self._clock()
            self._wait(form.call())
            form.rates.append(form.size / (self._clock() - began) / 1e9)

    @property
    def gb_per_s(self) -> dict[str, float]:
        """Of each kind the best of its forms' medians; empty before the first round."""
        return {row["what"]: row["gb_per_s"] for row in self.rows[: len(self._kinds)]}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """For a record: what counts of each kind, then every form."""
        measured = [form.row for form in self._forms if form.rates]
        best = []
        for kind in self._kinds if measured else ():
            top = max((row for row in measured if row["what"] == kind), key=lambda row: float(row["gb_per_s"]))
            best.append({**top, "counts": "best of the medians"})
        return [*best, *measured]

    @property
    def _kinds(self) -> list[str]:
        return list(dict.fromkeys(form.kind for form in self._forms))


def on_this_device(sizes: Sequence[int] = SIZES, moved: int = MOVED) -> Bandwidth:
    """Over random words, which stay random: memory that holds zeros is not read as one that holds data."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def read_all(turns: int, x: jax.Array) -> jax.Array:
        largest: jax.Array = lax.fori_loop(0, turns, lambda _, c: jnp.max(x ^ c), jnp.uint32(0))
        return largest

    def read_rows(turns: int, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, min(LANES, x.size))
        start = jnp.zeros((len(rows),), jnp.uint32)
        largest: jax.Array = lax.fori_loop(0, turns, lambda _, c: jnp.max(rows ^ c[:, None], axis=1), start)
        return largest

    @jax.jit
    def permuted(x: jax.Array) -> jax.Array:
        # One to one: a product with a power of two would leave zeros in the end.
        found: jax.Array = x * jnp.uint32(1664525) + jnp.uint32(1013904223)
        return found

    def copy(turns: int, x: jax.Array) -> jax.Array:
        # One after the other: a loop in one program would copy once more than it says, to begin with.
        for _ in range(turns):
            x = permuted(x)
        return x

    def copy_of_array(turns: int, x: jax.Array) -> jax.Array:
        for _ in range(turns):
            made = jnp.copy(x)
        return made

    forms = []
    for size in sizes:
        words = jax.random.bits(jax.random.key(size), (size // 4,), jnp.uint32)
        turns, said = max(1, moved // size), f"{size / (1 << 30):g} GiB"
        for name, reading in (("to one word", read_all), ("row by row", read_rows)):
            call = partial(jax.jit(partial(reading, turns)), words)
            forms.append(Form("read", f"{name}, {said}", turns * size, call))
        if size == sizes[0]:
            half = words[: words.size // 2]
            forms.append(Form("copy", f"word by word, {said}", turns * size, partial(copy, turns, half)))
            forms.append(Form("copy of an array", said, turns * size, partial(copy_of_array, turns, half)))
    return Bandwidth(forms, jax.block_until_ready)
