"""What the prompt cache keeps, and how it lets go: the least recently used first, leaves before what they stand on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final, get_args

import attrs
import numpy as np

from mlxcel.core.kv import KVStore
from mlxcel.core.prefix import DetachedKV
from mlxcel.core.prompt_cache import Eviction
from mlxcel.plugins.kv.prefix_index import Node, PrefixIndex

AUTO_BYTES: Final = 2 << 30
"""The most that `auto` allows where nothing is given back on demand: big pages, and copies of rings."""


@attrs.frozen
class CacheLimits:
    """Spec 8.1. `bytes` None: every page that nobody else needs, and `auto` bytes of the rest; 0: nothing is kept. Of
    the others 0 is no limit."""

    enabled: bool = True
    bytes: int | None = None
    auto: int = AUTO_BYTES
    entries: int = 0
    ttl: float = 3600.0  # seconds since last use
    min_prefix: int = 16  # tokens


class KeptPages:
    """The pages of an index: each is held once, and released when its node goes. `page_bytes` is what a page takes in
    all layers."""

    def __init__(
        self,
        index: PrefixIndex,
        kv: KVStore,
        limits: CacheLimits,
        *,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._index, self._kv, self._limits = index, kv, limits
        self._page_bytes = page_bytes
        self._clock = clock
        self.epoch = 0  # of the KV arrays that the pages are of
        self.evictions: dict[Eviction, int] = dict.fromkeys(get_args(Eviction), 0)

    @property
    def bytes(self) -> int:
        """Of pages that no row holds, and of copies of rings."""
        return self._kv.stats().cached * self._page_bytes + self._index.payload_bytes

    def oversized(self, prefix: DetachedKV) -> bool:
        """Whether a record alone is above the limit."""
        return self._above(len(prefix.pages), 0 if prefix.payload is None else prefix.payload.nbytes)

    def take(self, prefix: DetachedKV) -> None:
        """Put a record into the index, whatever the limits say. What is there already is given back."""
        self.epoch = prefix.epoch
        _, spare = self._index.insert(
            prefix.key,
            np.ascontiguousarray(prefix.ids, np.int32),
            prefix.pages,
            prefilled=prefix.prefilled,
            payload=prefix.payload,
            now=self._clock(),
        )
        self._kv.release(spare)

    def records(self) -> Iterator[DetachedKV]:
        """All chains, by their ends, and by what has a copy of rings, least recently used first. They are lent."""
        for node in list(self._index.by_age):
            if node.children and node.payload is None:
                continue
            path = node.path()
            ids = np.concatenate([each.ids for each in path])[: node.payload_length or None]
            yield DetachedKV(
                ids=ids,
                key=self._index.key_of(node),
                pages=tuple(each.page for each in path),
                prefilled=min(len(ids), sum(each.prefilled for each in itertools.takewhile(_whole, path))),
                epoch=self.epoch,
                payload=node.payload,
            )

    def reclaim(self, pages: int) -> int:
        """Evict until so many pages came free; returns how many did."""
        before = self._kv.stats().free
        while (freed := self._kv.stats().free - before) < pages and self._evict_oldest("lru"):
            pass
        return freed

    def expire(self) -> None:
        """Let go of what was not used for longer than its lifetime, unless a row uses it now."""
        if not self._limits.ttl:
            return
        oldest = self._clock() - self._limits.ttl
        for node in list(itertools.takewhile(lambda each: each.used < oldest, self._index.by_age)):
            if not node.children and self._kv.holders(node.page) == 1:
                self._evict(node, "ttl")

    def enforce(self) -> None:
        """The limits on entries, then on bytes (spec X12)."""
        while 0 < self._limits.entries < self._index.entries and self._evict_oldest("capacity"):
            pass
        while self._above(self._kv.stats().cached, self._index.payload_bytes) and self._evict_oldest("capacity"):
            pass

    def clear(self, cause: Eviction) -> None:
        """Let go of everything, of what rows use too: they have holds of their own."""
        for node in list(self._index.by_age):  # children before parents
            self._evict(node, cause)

    def _above(self, pages: int, state: int) -> bool:
        """Whether so many pages and bytes of rings are more than is allowed."""
        if self._limits.bytes is not None:
            return pages * self._page_bytes + state > self._limits.bytes
        return state + (0 if self._kv.shares else pages * self._page_bytes) > self._limits.auto

    def _evict_oldest(self, cause: Eviction) -> bool:
        """One step: the least recently used page that nobody else holds, or the copy of rings at one that somebody
        does. Where only ends of chains are left that rows hold too, one that pages of the cache alone stand before: the
        row computed its beginning twice. False when nothing is left to let go of."""
        barrier: Node | None = None
        for node in self._index.by_age:
            if node.children:
                continue
            if self._kv.holders(node.page) == 1:
                self._evict(node, cause)
                return True
            if node.payload is not None:
                self._index.drop_payload(node)
                self.evictions[cause] += 1
                return True
            if barrier is None and any(self._kv.holders(each.page) == 1 for each in node.path()):
                barrier = node
        if barrier is None:
            return False
        self._evict(barrier, cause)
        return True

    def _evict(self, node: Node, cause: Eviction) -> None:
        self._kv.release([self._index.remove(node)])
        self.evictions[cause] += 1


def _whole(node: Node) -> bool:
    """Whether pieces computed all of a page, so that what is behind it counts."""
    return node.prefilled == len(node.ids)
