"""From a configuration to an engine that serves many requests: the model, its scheduler, its prompt cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.core.piecework import Planner
from mlxcel.core.prompt_cache import Freed, PromptCache
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.load import LoadedModel, load_model
from mlxcel.warm_up import warm_up_rows

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.checkpoint import Checkpoint
    from mlxcel.core.source import Progress
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.kept_weights import KeptWeights
    from mlxcel.plugins.manager import PluginManager


@attrs.frozen(eq=False)
class Serving:
    """A model with a scheduler that runs. `close` ends its threads and frees the model; it may be called again. In a
    process that was forked off it does nothing: neither is that process's."""

    model: LoadedModel
    scheduler: Scheduler
    plugins: PluginManager
    warm_up: float = 0.0  # seconds that rows took before it was ready

    @property
    def cache(self) -> PromptCache | None:
        return self.model.cache

    def close(self) -> None:
        if self.scheduler.here:
            self.scheduler.close()
            self.model.close()

    def stats(self) -> dict[str, Any]:
        """Plain numbers of one moment by name: of the `scheduler` (docs/spec/clients.md 3.8), of the `kv` pages, and of
        the `prompt_cache`, None where it is off. From any thread."""
        cache, engine, scheduler = self.cache, self.model.engine, self.scheduler
        counters, kv, prompts = scheduler.call(
            lambda: (scheduler.stats(), engine.kv_stats, None if cache is None else cache.stats())
        )
        return {
            "scheduler": _plain(counters),
            "kv": _plain(kv),
            "prompt_cache": None if prompts is None else {**_plain(prompts), "hit_rate": prompts.hit_rate},
        }

    def reset_cache(self) -> Freed:
        """Forget every kept prompt. From any thread."""
        cache = self.cache
        return Freed(0, 0, 0) if cache is None else self.scheduler.call(cache.reset)


def serve(
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    *,
    max_queue_depth: int,
    warm: bool = False,
    checkpoint: Checkpoint | None = None,
    tokenizer: Tokenizer | None = None,
    kept: KeptWeights | None = None,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Serving:
    """Load the model and start its scheduler; with `warm`, unless `--no-warmup` says otherwise, wait for rows that go
    all the way of a request. `checkpoint`, `tokenizer` and `kept` are as for `load_model`. Raises as that does;
    UsageError for a scheduler option that this backend or level cannot honour, EngineUnhealthy for one that does not
    get through the rows."""
    model = load_model(
        config,
        manager,
        progress,
        scheduled=True,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        kept=kept,
        say=say,
        clock=clock,
    )
    try:
        settings = scheduler_settings(config, model, max_queue_depth)
        busy: Planner | None = None
        if settings.chunk_busy is not None:
            make = manager.prefill_planners().maker(config.prefill_planner, Planner)
            busy = make(chunk=settings.chunk_busy, level=model.engine.level, caps=model.caps)
        scheduler = Scheduler(
            model.engine,
            planner=model.planner,
            busy_planner=busy,
            settings=settings,
            cache=model.cache,
            observers=model.observers,
            clock=clock,
        )
        started = clock()
        scheduler.start(warm_up_rows(model) if warm and not config.no_warmup else ())
        if warm:
            scheduler.wait_ready()
    except BaseException:
        model.close()
        raise
    return Serving(model, scheduler, manager, warm_up=clock() - started)


def scheduler_settings(config: EngineConfig, model: LoadedModel, max_queue_depth: int) -> SchedulerSettings:
    """The scheduler's options, checked against what was loaded."""
    return SchedulerSettings.resolve(
        model.caps,
        model.engine.level,
        chunk=model.prefill_chunk,
        chunk_busy=config.prefill_chunk_busy,
        adaptive=config.adaptive_prefill_chunk,
        mixed=config.mixed_step,
        force_sync=config.force_sync,
        max_queue_depth=max_queue_depth,
        grant_interval=config.prefill_grant_interval,
        max_prefill_tokens=config.max_batch_prefill_tokens,
        preemption=not config.no_preemption,
        watermark=config.kv_admission_watermark,
        ageing=config.priority_ageing_seconds,
        decode_timeout=config.decode_timeout,
    )


def _plain(record: Any) -> dict[str, Any]:
    """A record as names, numbers and texts."""
    values = attrs.asdict(record, recurse=False)
    return {
        name: {str(key): count for key, count in value.items()} if hasattr(value, "items") else value
        for name, value in values.items()
    }
