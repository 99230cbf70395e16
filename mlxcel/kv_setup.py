"""Where the KV of an engine lives: how many rows, which store, how many pages, and what keeps the KV of prompts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from mlxcel.core.backend import BackendCaps
from mlxcel.core.engine import Engine
from mlxcel.core.kv import KVSpec, KVStore, ceil_block
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.errors import CacheFileError, UsageError
from mlxcel.footprint import Footprint
from mlxcel.memory_plan import Memory, MemoryPlan, MemorySettings, plan_memory
from mlxcel.plugins.kv.cache_file import remove_unfinished
from mlxcel.plugins.kv.kept_pages import AUTO_BYTES, CacheLimits
from mlxcel.plugins.kv.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig

log = logging.getLogger("mlxcel.load")

ROWS_ON_CPU: Final = 4
ROWS_ON_GPU: Final = 32


@attrs.frozen
class Rows:
    """How many rows an engine decodes together; `fewer` may be taken where the memory holds fewer (spec C12)."""

    most: int
    fewer: bool

    @classmethod
    def of(cls, config: EngineConfig, caps: BackendCaps) -> Rows:
        if config.max_num_seqs is not None:
            return cls(config.max_num_seqs, fewer=False)
        return cls(ROWS_ON_CPU if caps.platform == "cpu" else ROWS_ON_GPU, fewer=True)


def page_size(config: EngineConfig, caps: BackendCaps) -> int:
    """UsageError for a size that the backend does not offer (spec V1)."""
    if config.page_size is None:
        return caps.page_sizes[0]
    if config.page_size not in caps.page_sizes:
        known = ", ".join(map(str, sorted(caps.page_sizes)))
        raise UsageError(f"--page-size {config.page_size} is not one of this backend's", hint=f"there are {known}")
    return config.page_size


SHORTER: Final = 16
"""One part in so many of a context is nothing to give up all other rows for: the workspace of a row takes less."""


def plan_rows(
    footprint: Footprint,
    config: EngineConfig,
    rows: Rows,
    memory: Memory | None,
    *,
    dtype: str,
    weights: int | None = None,
    kv_most: int | None = None,
    cached: bool = False,
) -> MemoryPlan:
    """The plan for `rows.most`, or for the most below it that the memory holds without a shorter context; where one row
    has a shorter context too, for the most that have about as long a one. It may be a refusal. `weights` and `kv_most`
    are as for `plan_memory`; `cached`: there is to be a prompt cache."""
    copies = _most_copied(config) if cached and footprint.kv.windowed else 0
    count, plans = rows.most, list[MemoryPlan]()
    while True:
        settings = attrs.evolve(MemorySettings.of(config, rows=count, dtype=dtype), copies=copies)
        plans.append(plan_memory(footprint, settings, memory, weights=weights, kv_most=kv_most))
        context = plans[-1].context
        short = context is None or context.lowered is not None
        if not (short and rows.fewer and count > 1):
            break
        count //= 2
    least = 0 if context is None else context.positions * (SHORTER - 1) // SHORTER
    as_long = (plan for plan in plans if plan.context is not None and plan.context.positions >= least)
    return next(as_long, plans[-1])


def _most_copied(config: EngineConfig) -> int:
    asked = config.prompt_cache_capacity_bytes
    return AUTO_BYTES if asked is None else asked


def make_store(make: Callable[..., KVStore], plan: MemoryPlan, kv_spec: KVSpec, *, size: int, cached: bool) -> KVStore:
    """A store for the rows and the context of a plan, with pages for all that the budget holds if prompts are kept in
    them, else for what the rows can fill."""
    rows, context = plan.settings.rows, plan.admitted().positions
    filled = rows * (ceil_block(context) // size)
    held = plan.pages(size)
    pages = filled if held is None else held if cached else min(filled, held)
    if pages == held and not plan.budget.explicit:
        digits = 6 if plan.memory is not None and plan.memory.device else 3
        pages = max(_few_digits(pages, digits), ceil_block(context) // size)
    store = make(kv_spec=kv_spec, slots=rows, context=context, page_size=size, pages=pages)
    tokens = store.num_pages * store.page_size
    log.info(
        "KV: %d pages of %d positions, %d tokens in all: %d a row while all of %d rows are full, at most %d",
        store.num_pages, store.page_size, tokens, min(context, tokens // rows), rows, context,
    )  # fmt: skip
    return store


def _few_digits(count: int, digits: int) -> int:
    """The nearest number below whose binary digits behind the first `digits` are 0. Free memory differs from start to
    start, of a device a little and of a host much, and another number of pages would be other programs
    (docs/adr/0023)."""
    rest = max(0, count.bit_length() - digits)
    return count >> rest << rest


def make_cache(
    config: EngineConfig, engine: Engine, kv: KVStore, kv_spec: KVSpec, plan: MemoryPlan, clock: Callable[[], float]
) -> PromptCache:
    """The prompt cache of an engine, filled from its file where there is one that can be used. Copies of rings lie
    beside the KV budget: they are a quarter of it at most."""
    cache = PrefixCache(
        kv=kv,
        kv_spec=kv_spec,
        key=engine.kv_key,
        level=engine.level,
        chunk=engine.settings.chunk,
        page_bytes=kv.page_size * plan.position_bytes,
        limits=CacheLimits(
            bytes=config.prompt_cache_capacity_bytes,
            auto=min(AUTO_BYTES, plan.budget.bytes // 4) if kv_spec.windowed else AUTO_BYTES,
            entries=config.prompt_cache_max_entries,
            ttl=config.prompt_cache_ttl,
            min_prefix=config.prompt_cache_min_prefix,
        ),
        clock=clock,
    )
    file = _cache_file(config)
    if file is not None:
        for left in remove_unfinished(file):
            log.info("prompt cache: %s, which was never finished, is removed", left)
    if file is not None and os.path.exists(file):  # False too where it cannot be
        try:
            log.info("prompt cache: %d positions from %s", cache.load(engine, file), file)
        except CacheFileError as error:
            log.warning("%s", error)
    return cache


def save_cache(config: EngineConfig, engine: Engine, cache: PromptCache) -> None:
    """At the end: to the file, where there is one to be. A failure is a warning."""
    if (file := _cache_file(config)) is not None:
        try:
            log.info("prompt cache: %d positions to %s", cache.save(engine, file), file)
        except Exception as error:  # nothing of the shutdown behind it may be lost
            log.warning("the prompt cache was not saved: %s", error)


def _cache_file(config: EngineConfig) -> Path | None:
    return None if config.prompt_cache_file is None else Path(config.prompt_cache_file)
