"""The prompt cache: rows that end leave their pages behind, and rows that begin with the same ids take them up.

It holds page ids and copies of rings that a backend made; no device array (spec 8). A hit changes time and nothing
else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mlxcel.core.backend import Level
from mlxcel.core.kv import KVSpec, KVStore
from mlxcel.core.prefix import DetachedKV, KVKey, Reject
from mlxcel.core.prompt_cache import CacheStats, Freed, Match
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import AdoptError, CacheFileError, CapacityError
from mlxcel.plugins.kv.cache_counts import CacheCounts
from mlxcel.plugins.kv.kept_file import load_kept, save_kept
from mlxcel.plugins.kv.kept_pages import CacheLimits, KeptPages
from mlxcel.plugins.kv.prefix_index import Node, PrefixIndex
from mlxcel.plugins.kv.prefix_match import usable

if TYPE_CHECKING:
    from mlxcel.core.engine import Engine

SWEEP_SECONDS: Final = 1.0


class PrefixCache:
    """A `PromptCache` over one store. `key` is Engine.kv_key, `page_bytes` what a page takes in all layers."""

    def __init__(
        self,
        *,
        kv: KVStore,
        kv_spec: KVSpec,
        key: Callable[[SequenceSpec], KVKey],
        level: Level,
        chunk: int,
        page_bytes: int,
        limits: CacheLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        index: PrefixIndex | None = None,
    ) -> None:
        self._kv, self._kv_spec, self._key = kv, kv_spec, key
        self._granule = chunk if level == "R1" else 1
        self._replays = level != "R2"  # the output of a resumed row, token by token (spec C19)
        self._limits = limits or CacheLimits()
        self._clock = clock
        self._index = PrefixIndex(kv.page_size) if index is None else index
        self._kept = KeptPages(self._index, kv, self._limits, page_bytes=page_bytes, clock=clock)
        self._swept = clock()
        self._counts = CacheCounts()

    # --- reading --------------------------------------------------------------------------------------------------

    def match(self, spec: SequenceSpec, ids: np.ndarray | None = None, *, allowed: bool = True) -> Match:
        return self._find(spec, spec.prompt_ids if ids is None else ids, allowed)[0]

    def open(self, engine: Engine, spec: SequenceSpec, *, allowed: bool = True) -> tuple[int, Match]:
        def cold() -> int:
            return engine.open(spec)

        def warm(prefix: DetachedKV, length: int) -> int:
            return engine.adopt(spec, prefix, length)

        return self._begin(spec, spec.prompt_ids, allowed, cold, warm)

    def resume(self, engine: Engine, sequence_id: int, *, allowed: bool = True) -> Match:
        def cold() -> int:
            engine.resume(sequence_id)
            return sequence_id

        def warm(prefix: DetachedKV, length: int) -> int:
            engine.resume(sequence_id, prefix, length)
            return sequence_id

        view = engine.view(sequence_id)
        ids = view.spec.prompt_ids
        if view.output and not self._replays:
            ids = engine.tokens(sequence_id)[:-1]
        return self._begin(view.spec, ids, allowed, cold, warm)[1]

    def _begin(
        self,
        spec: SequenceSpec,
        ids: np.ndarray,
        allowed: bool,
        cold: Callable[[], int],
        warm: Callable[[DetachedKV, int], int],
    ) -> tuple[int, Match]:
        """Take up what is there of `ids`, else begin cold; one lookup is counted as soon as the row has its place."""
        found, last = self._find(spec, ids, allowed)
        if found.prefix is not None and last is not None:
            try:
                sequence_id = warm(found.prefix, found.length)
            except AdoptError as error:
                found = Match(reject=Reject(error.reason))
            else:
                self._counts.hit(found.length)
                self._index.touch(last, self._clock())
                if not self._kv.shares:  # the page has moved into the row
                    self._index.remove(last)
                return sequence_id, found
        sequence_id = self._with_room(cold)
        self._counts.miss(found.reject)
        return sequence_id, found

    def _with_room(self, begin: Callable[[], int]) -> int:
        """On big pages a row needs one of its own before its first step: what is kept makes room."""
        try:
            return begin()
        except CapacityError:
            if self._kv.shares or self._kv.stats().free or not self.reclaim(1):
                raise
            return begin()

    def _find(self, spec: SequenceSpec, ids: np.ndarray, allowed: bool) -> tuple[Match, Node | None]:
        """What can be adopted of `ids`, and the node it is reached by. Reasons come from the request's own key
        space alone (spec X16): other keys' entries are not even counted."""
        if not allowed or not self._limits.enabled:
            return Match(reject=Reject.DISABLED), None
        if self._kv_spec.recurrent:
            return Match(reject=Reject.MODEL_OWNED_STATE), None
        if spec.prompt_scores is not None:
            return Match(reject=Reject.NEEDS_PROMPT_LOGITS), None
        self._kept.expire()
        key = self._key(spec)
        if not self._index.holds(key):
            return Match(reject=Reject.EMPTY_SET), None
        walk = self._index.walk(key, np.ascontiguousarray(ids, np.int32))
        return usable(
            walk,
            key,
            limit=len(ids) - 1,
            granule=self._granule,
            min_prefix=self._limits.min_prefix,
            windowed=self._kv_spec.windowed,
            epoch=self._kept.epoch,
        )

    # --- filling --------------------------------------------------------------------------------------------------

    def donate(self, engine: Engine, sequence_id: int, *, allowed: bool = True) -> int:
        view = engine.view(sequence_id)
        if view.state is not SequenceState.FINISHED or not view.stored:
            return 0
        if not allowed or not self._limits.enabled:
            return self._counts.reject(Reject.DISABLED)
        whole = self._floor(view.stored)
        length = whole if self._granule == 1 else self._floor(min(view.stored, view.prefilled))
        if not length:
            return self._counts.reject(Reject.DECODED_POSITIONS if whole else Reject.GRANULE_FLOOR)
        if length < self._limits.min_prefix:
            return self._counts.reject(Reject.PREFIX_TOO_SHORT)
        try:
            prefix = engine.detach(sequence_id, length)
        except AdoptError as error:
            return self._counts.reject(Reject(error.reason))
        return self._insert(prefix)

    def share(self, engine: Engine, sequence_id: int, *, allowed: bool = True) -> int:
        spec = self._kv_spec
        if not (allowed and self._limits.enabled and self._kv.shares) or spec.windowed or spec.recurrent:
            return 0
        view, size = engine.view(sequence_id), self._kv.page_size
        computed = view.stored if self._granule == 1 else view.prefilled
        length = self._floor(min(computed, view.prompt_tokens)) // size * size
        if length < max(1, self._limits.min_prefix):
            return 0
        walk = self._index.walk(self._key(view.spec), view.spec.prompt_ids[:length].astype(np.int32))
        if walk.length == length:
            return length
        try:
            return self._insert(engine.share(sequence_id, length), counted=False)
        except AdoptError:
            return 0

    def _insert(self, prefix: DetachedKV, *, counted: bool = True) -> int:
        """Take over a record; its pages are held by the index from now on, or given back."""
        if self._kept.oversized(prefix):
            self._kv.release(prefix.pages)
            return self._counts.reject(Reject.OVERSIZED) if counted else 0
        self._kept.take(prefix)
        self._counts.inserts += 1
        self._kept.enforce()
        return prefix.length

    def _floor(self, length: int) -> int:
        return length // self._granule * self._granule

    # --- letting go -----------------------------------------------------------------------------------------------

    def reclaim(self, pages: int) -> int:
        return self._kept.reclaim(pages)

    def sweep(self) -> None:
        now = self._clock()
        if now - self._swept >= SWEEP_SECONDS:
            self._swept = now
            self._kept.expire()
            self._kept.enforce()

    def lost(self) -> None:
        self._kept.clear("fault")

    def reset(self) -> Freed:
        before, had = self.stats(), self._kv.stats().free
        self._kept.clear("reset")
        return Freed(before.entries, self._kv.stats().free - had, before.bytes)

    # --- saying ---------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        counts = self._counts
        return CacheStats(
            enabled=self._limits.enabled,
            page_size=self._kv.page_size,
            entries=self._index.entries,
            pages=self._kv.stats().cached,
            bytes=self._kept.bytes,
            capacity=self._limits.bytes,
            lookups=counts.lookups,
            hits=counts.hits,
            tokens_reused=counts.reused,
            inserts=counts.inserts,
            evictions=dict(self._kept.evictions),
            rejects={reason.value: counts.rejects[reason] for reason in Reject},
            last_reject=counts.last_reject,
        )

    # --- the file -------------------------------------------------------------------------------------------------

    def save(self, engine: Engine, path: Path) -> int:
        return save_kept(self._kept, engine, path)

    def load(self, engine: Engine, path: Path) -> int:
        try:
            return load_kept(self._kept, engine, path)
        except AdoptError as error:
            self._counts.reject(Reject(error.reason))
            raise CacheFileError(
                f"{path} is the prompt cache of another model or other settings: {error.reason}",
                hint="give each model a --prompt-cache-file of its own",
            ) from None
