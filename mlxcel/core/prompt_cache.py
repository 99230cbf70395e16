"""The prompt cache as a scheduler sees it: what a row could begin with, and what becomes of its KV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import attrs
import numpy as np

from mlxcel.core.prefix import DetachedKV, Reject
from mlxcel.core.request import SequenceSpec

if TYPE_CHECKING:
    from mlxcel.core.engine import Engine

Eviction = Literal["lru", "ttl", "capacity", "fault", "reset"]


@attrs.frozen(eq=False)
class Match:
    """What of a prompt is there. `prefix` is lent: it is good until the cache's next call, and held by the cache.

    `length` is A, 0 for a miss, which has a `reject`. `prefilled`: every adopted position was computed by a piece of a
    plan (spec V15), as `PrefillPlanner.build` wants to know.
    """

    length: int = 0
    prefix: DetachedKV | None = None
    reject: Reject | None = None
    prefilled: bool = True


@attrs.frozen
class CacheStats:
    """What spec X17 lists. Numbers of pages and bytes are of what the cache alone holds."""

    enabled: bool
    page_size: int
    entries: int
    pages: int
    bytes: int
    capacity: int | None  # bytes; None: every page that nobody else needs
    lookups: int
    hits: int
    tokens_reused: int
    inserts: int
    evictions: Mapping[Eviction, int]
    rejects: Mapping[str, int]
    last_reject: Reject | None

    @property
    def hit_rate(self) -> float:
        """Hits a lookup, 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0


@attrs.frozen
class Freed:
    """What a reset gave back."""

    entries: int
    pages: int
    bytes: int


class PromptCache(Protocol):
    """KV of prompts that were, by their ids. It holds pages and no device array. One thread at a time, that of the
    engine. `allowed` is the request's `cache_prompt`: False neither reads nor fills."""

    def match(self, spec: SequenceSpec, ids: np.ndarray | None = None, *, allowed: bool = True) -> Match:
        """What `open` or, with `ids` of prompt ++ output[:-1], `resume` would adopt now. Counts nothing."""
        ...

    def open(self, engine: Engine, spec: SequenceSpec, *, allowed: bool = True) -> tuple[int, Match]:
        """`Engine.adopt` on a hit, else `Engine.open`; raises as that does. Counts one lookup. The plan of the row is
        `build(ids, adopted=match.length, adopted_prefilled=match.prefilled)`."""
        ...

    def resume(self, engine: Engine, sequence_id: int, *, allowed: bool = True) -> Match:
        """`Engine.resume` of a preempted row, with what is there of its prompt and output. CapacityError when no slot
        is free. Counts one lookup."""
        ...

    def donate(self, engine: Engine, sequence_id: int, *, allowed: bool = True) -> int:
        """Take over the KV of a row that finished or was cancelled, before it is closed (spec X10); the row has none
        afterwards. Returns how many positions were kept, 0 with a reject counted. The row must have nothing in
        flight."""
        ...

    def share(self, engine: Engine, sequence_id: int, *, allowed: bool = True) -> int:
        """Take the full pages of what a running row has stored of its prompt, so that equal prompts in flight share
        them. Returns how many positions; 0 where that cannot be done, which counts nothing."""
        ...

    def reclaim(self, pages: int) -> int:
        """Evict, least recently used first, until so many pages came free (spec C23); returns how many did."""
        ...

    def sweep(self) -> None:
        """Let go of what was not used for its lifetime. Looks at most once a second; call it every tick."""
        ...

    def lost(self) -> None:
        """The KV arrays were lost (spec E18): forget everything."""
        ...

    def reset(self) -> Freed:
        """Forget everything; rows that use pages keep them (spec X18)."""
        ...

    def stats(self) -> CacheStats: ...

    def save(self, engine: Engine, path: Path) -> int:
        """Write what is held to a file, mode 0600, under a temporary name first. Returns the positions written."""
        ...

    def load(self, engine: Engine, path: Path) -> int:
        """Take over what a file holds of this very model and settings. Returns the positions read. CacheFileError when
        it is damaged or another model's, and nothing is taken then."""
        ...
