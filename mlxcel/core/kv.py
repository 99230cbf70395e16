"""KV storage: what a family declares of it, and the host's bookkeeping of positions. No device array is held here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs
import numpy as np

BLOCK = 128
"""Anchor of the attention blocks: keys are reduced in blocks [0, 128), [128, 256) … of absolute positions."""


@attrs.frozen
class FullKV:
    """One layer that keeps every position: K heads of key width dk and value width dv."""

    kv_heads: int
    k_dim: int
    v_dim: int


@attrs.frozen
class KVSpec:
    """One entry per layer; storage follows from it alone."""

    layers: tuple[FullKV, ...]

    def bytes_per_position(self, itemsize: int) -> int:
        """Bytes that one position takes over all layers, K and V."""
        return itemsize * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers)


@attrs.frozen
class KVStats:
    """Counters of a store, in pages. `free + owned == total` at all times."""

    total: int
    free: int
    owned: int
    page_size: int


@runtime_checkable
class KVStore(Protocol):
    """Which positions of which sequence live on which page. Page p of the store is page p of every layer's arrays.

    A row's table covers its written positions and those reserved for a step that is about to be submitted.
    """

    @property
    def name(self) -> str: ...

    @property
    def page_size(self) -> int:
        """Positions a page holds."""
        ...

    @property
    def num_pages(self) -> int: ...

    def open(self, sequence_id: int, capacity: int) -> None:
        """Begin a row that will never hold more than `capacity` positions. CapacityError when there is no room."""
        ...

    def reserve(self, wants: Sequence[tuple[int, int]]) -> None:
        """Reserve n more positions for each (sequence_id, n): all of them, or none and CapacityError. Replaces every
        reservation that no `advance` has taken (spec V17)."""
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
