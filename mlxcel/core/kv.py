"""KV storage: what a family declares of it, and the host's bookkeeping of positions. No device array is held here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np

BLOCK = 128
"""Anchor of the attention blocks: keys are reduced in blocks [0, 128), [128, 256) … of absolute positions."""


UNWIND = 16
"""Positions that a row may be taken back by with exact bits; a ring keeps that many more than its window needs."""


def ceil_block(positions: int) -> int:
    """`positions` rounded up to whole attention blocks, so that no page and no ring ends inside one."""
    return -(-positions // BLOCK) * BLOCK


@attrs.frozen
class FullKV:
    """One layer that keeps every position: K heads of key width dk and value width dv."""

    kv_heads: int
    k_dim: int
    v_dim: int


@attrs.frozen
class SlidingKV:
    """One layer whose token at position q sees positions q - window + 1 … q. It keeps a ring a row, owned by the
    backend, and costs the page pool nothing (spec V9, V10)."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int

    def ring(self, *, context: int, chunk: int) -> int:
        """Positions of the ring of a row of at most `context`, fed in pieces of at most `chunk` tokens. Position q
        lives at q modulo this; a multiple of 128 keeps the absolute blocks whole."""
        return min(ceil_block(self.window + chunk - 1 + UNWIND), ceil_block(context))


@attrs.frozen
class RecurrentKV:
    """One layer that keeps arrays of these shapes instead of positions: two copies a row, owned by the backend and
    written in turn, so that the last step can be taken back (spec V11). They are zeros before position 0."""

    shapes: tuple[tuple[int, ...], ...]


LayerKV = FullKV | SlidingKV | RecurrentKV


@attrs.frozen
class KVSpec:
    """One entry per layer; storage follows from it alone."""

    layers: tuple[LayerKV, ...]

    @property
    def windowed(self) -> bool:
        """Whether a layer keeps a ring, which holds no piece longer than the chunk it was made for."""
        return any(isinstance(layer, SlidingKV) for layer in self.layers)

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer, RecurrentKV) for layer in self.layers)

    def bytes_per_position(self, itemsize: int) -> int:
        """Bytes that one position takes in the pages, K and V over all layers that keep every position."""
        full = [layer for layer in self.layers if isinstance(layer, FullKV)]
        return itemsize * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in full)

    def bytes_per_row(self, itemsize: int, *, context: int, chunk: int) -> int:
        """Bytes of rings and recurrent state that a row owns beside its pages, however short it is (spec V12)."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, SlidingKV):
                total += layer.ring(context=context, chunk=chunk) * layer.kv_heads * (layer.k_dim + layer.v_dim)
            elif isinstance(layer, RecurrentKV):
                total += 2 * sum(math.prod(shape) for shape in layer.shapes)
        return itemsize * total


@attrs.frozen
class KVLayout:
    """What a backend makes its arrays from: the layers, the pages of a store, and the bounds of an engine."""

    spec: KVSpec
    pages: int
    page_size: int  # positions
    paged: bool  # many pages a row, not one big one
    slots: int  # rows open at once
    context: int  # N
    chunk: int  # most tokens of a piece where a layer keeps a ring


@attrs.frozen
class KVStats:
    """Counters of a store, in pages. `free + owned + cached == total` at all times."""

    total: int
    free: int
    owned: int  # in the table of a row
    page_size: int
    cached: int = 0  # held, and by no row
    pinned: int = 0  # with more than one holder
    taken: int = attrs.field(default=0, eq=False)  # pages that were given out so far; these never go down
    returned: int = attrs.field(default=0, eq=False)  # pages that came free
    copied: int = attrs.field(default=0, eq=False)  # before a row wrote to them


@runtime_checkable
class KVStore(Protocol):
    """Which positions of which sequence live on which page. Page p of the store is page p of every layer's arrays.

    A row's table covers its written positions and those reserved for a step that is about to be submitted. A page is
    held by tables of rows and by whoever called `retain` or `detach`, each once or more; without a holder it is free.
    """

    @property
    def name(self) -> str: ...

    @property
    def page_size(self) -> int:
        """Positions a page holds."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def paged(self) -> bool:
        """Whether a row's positions lie on many pages, rather than on one that is as long as the context."""
        ...

    @property
    def shares(self) -> bool:
        """Whether rows can hold the same pages. If not, a page that is adopted moves."""
        ...

    def open(self, sequence_id: int, capacity: int) -> None:
        """Begin a row that will never hold more than `capacity` positions. CapacityError when there is no room."""
        ...

    def adopt(self, sequence_id: int, capacity: int, pages: Sequence[int], length: int) -> None:
        """Begin a row whose first `length` positions are written already, on `pages` (spec V14). Its table holds them
        from now on beside their holders; where pages are not shared, instead of their one holder. It never writes into
        a page that it shares: `reserve` plans a copy. CapacityError when there is no room."""
        ...

    def detach(self, sequence_id: int, length: int) -> tuple[int, ...]:
        """End a row and keep its first `length` positions: the pages they are on, held by the caller, who owes a
        `release` or hands them to one `adopt` that moves. The other pages are given back."""
        ...

    def retain(self, pages: Sequence[int]) -> None:
        """One more hold of each of these pages, by the caller, who owes a `release`. ValueError where pages are not
        shared."""
        ...

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold of each of these pages."""
        ...

    def holders(self, page: int) -> int:
        """How many holds there are of a page, 0 for a free one."""
        ...

    def reserve(self, wants: Sequence[tuple[int, int]]) -> None:
        """Reserve n more positions for each (sequence_id, n): all of them, or none and CapacityError. Replaces every
        reservation that no `advance` has taken (spec V17)."""
        ...

    def page_copy(self, sequence_id: int) -> tuple[int, int, int] | None:
        """(from, to, positions) of the copy that the row's reservation needs before the step writes (spec V5), or None.
        The table names the new page already. It is planned for a step over all rows of the reservation: once one of
        them has advanced, every copy of it has to be made."""
        ...

    def advance(self, sequence_id: int, count: int) -> None:
        """`count` reserved positions are now being written by a submitted step."""
        ...

    def trim(self, sequence_id: int, length: int) -> int:
        """Keep the first `length` positions; returns how many are kept, which the caller compares."""
        ...

    def page_table(self, sequence_id: int) -> np.ndarray:
        """int32 [P], pages in the order of the positions they hold."""
        ...

    def free(self, sequence_id: int) -> None:
        """Give the row's pages back."""
        ...

    def stats(self) -> KVStats: ...
