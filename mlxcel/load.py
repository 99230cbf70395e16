"""From a configuration to an engine with a model in it: find, read, choose, load, bound."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.choose_backend import Chosen, choose_backend
from mlxcel.core.backend import BackendCaps, Remarks, WarmsUp
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.engine import Engine
from mlxcel.core.finish import FinishStep
from mlxcel.core.kv import KVSpec, KVStore
from mlxcel.core.named import load_target
from mlxcel.core.observe import Observers
from mlxcel.core.piecework import Planner
from mlxcel.core.prompt_cache import PromptCache
from mlxcel.core.sampling import LogitsProcessor, Sampler
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import Progress
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import CheckpointError, PluginError
from mlxcel.finite_weights import FiniteWeights
from mlxcel.footprint import Footprint
from mlxcel.kept_weights import KeptWeights
from mlxcel.kv_allocation import start_with_kv
from mlxcel.kv_setup import Rows, make_cache, make_store, page_size, plan_rows, save_cache
from mlxcel.memory_plan import MemoryPlan, MemorySettings, memory_here, storage_name
from mlxcel.model_identity import identify
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.resolve import ResolvedModel, resolve_model
from mlxcel.store import ModelStore
from mlxcel.text.chat_template import ChatTemplate, select_template
from mlxcel.text.echo import reply_stream
from mlxcel.text.end_ids import EndIds, end_ids
from mlxcel.text.generation_config import GenerationDefaults
from mlxcel.unused_tensors import unused_line, unused_tensors

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.plugins.manager import PluginManager

log = logging.getLogger("mlxcel.load")


@attrs.frozen
class ModelFacts:
    """What was loaded, for reports. `sha256` is known for models of the store, `context` is N."""

    name: str
    source: str
    path: str
    format: str
    family: str
    quantisation: str
    context: int
    sha256: str | None
    vocab: int
    window: int  # positions the model was made for
    parameters: int
    file_bytes: int  # of the weights in the checkpoint
    weight_bytes: int  # as the backend holds them
    position_bytes: int  # of KV in pages that one position takes
    row_bytes: int  # of rings and recurrent state that one row owns


@attrs.frozen
class LoadTimes:
    """Seconds. `download` is None when nothing was fetched."""

    load: float
    download: float | None


@attrs.frozen(eq=False)
class LoadedModel:
    """An engine and what a client needs around it. `close` frees all of it."""

    engine: Engine
    cache: PromptCache | None
    planner: Planner
    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: EndIds
    defaults: GenerationDefaults
    observers: Observers
    backend: str
    caps: BackendCaps
    kv_storage: str
    prefill_chunk: int
    facts: ModelFacts
    times: LoadTimes
    _held: ExitStack

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


@attrs.frozen
class _Parts:
    """Choices by name, made and imported before anything of the model is read."""

    chosen: Chosen
    rows: Rows
    page_size: int
    served: bool  # to many requests, of which none should wait for a program
    cached: bool  # with a prompt cache
    kv_stores: Mapping[str, Callable[..., KVStore]]  # those that may be taken, by name
    planner: Callable[..., Planner]
    sampler: Callable[..., Sampler]
    steps: Mapping[str, Any]


def load_model(
    config: EngineConfig,
    manager: PluginManager,
    progress: Progress,
    *,
    slots: int = 1,
    scheduled: bool = False,
    checkpoint: Checkpoint | None = None,
    tokenizer: Tokenizer | None = None,
    kept: KeptWeights | None = None,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> LoadedModel:
    """Everything of `config` that names something is looked up before the model is; then the model is found, fetched
    where it has to be, and loaded. `say` gets lines for people: the backend and why, a licence that asks something, a
    context that was lowered. `slots` rows can be open at once; `scheduled`, as many as `--parallel` says, with a prompt
    cache unless that is off. `checkpoint` takes the place of the model that `config` names, and is closed with what is
    returned; `tokenizer` that of the checkpoint's own. `kept` has this model's weights, or keeps them from now on.

    Raises the errors of mlxcel/errors.py; nothing stays open then.
    """
    parts = _choose(config, manager, slots, scheduled)
    say(parts.chosen.line)
    timed = _Timed(progress, clock)
    with ExitStack() as held:
        held.callback(parts.chosen.backend.close)
        if checkpoint is None:
            found = _found(config, manager, timed, say, held)
            started = clock()
            checkpoint = open_checkpoint(found.path, manager)
        else:
            found = ResolvedModel(checkpoint.path, checkpoint.path.name, checkpoint.format, None)
            started = clock()
        held.callback(checkpoint.close)
        model = _assemble(config, manager, parts, found, checkpoint, tokenizer, kept, timed, say, clock, held)
        times = LoadTimes(clock() - started, timed.seconds.get("download"))
        return LoadedModel(**model, times=times, held=held.pop_all())


def _found(
    config: EngineConfig, manager: PluginManager, progress: Progress, say: Callable[[str], None], held: ExitStack
) -> ResolvedModel:
    """The model that is named, kept from being deleted while it is held."""
    store = ModelStore(config.store_root)
    found = resolve_model(
        config.model,
        sources=manager.model_sources(),
        store=store,
        offline=config.offline,
        progress=progress,
        say=say,
    )
    if found.stored is not None:
        held.enter_context(store.use(found.stored.name))
    return found


def open_checkpoint(path: Path, manager: PluginManager) -> Checkpoint:
    """By the first format whose detector says yes. CheckpointError when none does."""
    formats = manager.formats()
    try:
        for name, spec in formats.items():
            if load_target(spec.detect)(path):
                opened: Checkpoint = formats.load(name)(path)
                return opened
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be read: {error.strerror or error}", hint="check its owner and mode"
        ) from error
    known = ", ".join(f"{spec.name} ({spec.summary})" for spec in formats.values())
    failed = f"; {formats.failed()}" if formats.failures else ""
    raise CheckpointError(f"{path} holds no checkpoint that can be read{failed}", hint=f"known formats: {known}")


def choose_tokenizer(checkpoint: Checkpoint, manager: PluginManager) -> Tokenizer:
    """By the assets there are, highest priority first (spec T21). CheckpointError when no factory can read them."""
    registry = manager.tokenizers()
    able = [spec for spec in registry.values() if spec.reads(checkpoint)]
    if not able:
        needs = ", ".join(sorted({spec.needs for spec in registry.values()}))
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer that can be read", hint=f"one of these must be there: {needs}"
        )
    made: Tokenizer = registry.load(max(able, key=lambda spec: spec.priority).name)(checkpoint)
    return made


def read_tokenizer(path: Path, manager: PluginManager) -> Tokenizer:
    """Of a checkpoint alone. Raises as `load_model` does."""
    checkpoint = open_checkpoint(path, manager)
    try:
        return choose_tokenizer(checkpoint, manager)
    finally:
        checkpoint.close()


def _choose(config: EngineConfig, manager: PluginManager, slots: int, scheduled: bool) -> _Parts:
    steps = manager.finish_steps()
    chosen = choose_backend(config, manager)
    caps = chosen.backend.caps
    rows = Rows.of(config, caps) if scheduled else Rows(slots, fewer=False)
    stores = {storage_name(config, count) for count in (1, rows.most)}
    return _Parts(
        chosen=chosen,
        rows=rows,
        page_size=page_size(config, caps),
        served=scheduled,
        cached=scheduled and config.enable_prefix_caching is not False,
        kv_stores={name: manager.kv_stores().maker(name, KVStore) for name in stores},
        planner=manager.prefill_planners().maker(config.prefill_planner, Planner),
        sampler=manager.samplers().maker(config.sampler, Sampler),
        steps={name: steps.maker(name, FinishStep)() for name in steps},
    )


def _assemble(
    config: EngineConfig,
    manager: PluginManager,
    parts: _Parts,
    found: ResolvedModel,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    kept: KeptWeights | None,
    progress: Progress,
    say: Callable[[str], None],
    clock: Callable[[], float],
    held: ExitStack,
) -> dict[str, Any]:
    """The fields of LoadedModel. What is cheap and can be refused comes before the weights."""
    spec = manager.family_for(checkpoint.naming, checkpoint.architecture)
    family = manager.families().load(spec.name)()
    model_config = family.parse_config(checkpoint)
    given, tokenizer = tokenizer is not None, tokenizer or choose_tokenizer(checkpoint, manager)
    template = select_template(
        checkpoint,
        flag_text=config.chat_template,
        flag_file=config.chat_template_file,
        flag_kwargs=config.chat_template_kwargs,
    )
    defaults = GenerationDefaults.read(config.generation_config, checkpoint)
    vocab: int = model_config.vocab_size
    if given and tokenizer.size > vocab:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.size} tokens, the model's vocabulary holds {vocab}",
            hint="take the tokenizer that belongs to the model",
        )
    ends = end_ids(
        checkpoint.config if checkpoint.naming == "hf" else {},
        None if config.generation_config == "none" else defaults,
        tokenizer,
        family.eos_ids(model_config),
        vocab,
    )
    for warning in ends.warnings:
        log.warning("%s", warning)
    backend = parts.chosen.backend
    kv_spec: KVSpec = family.kv_spec(model_config)
    chunk = config.prefill_chunk

    dtype = backend.caps.dtype
    footprint = Footprint.of(family, model_config)
    memory = memory_here(MemorySettings.of(config, rows=parts.rows.most, dtype=dtype), backend.memory())
    if kept is not None:
        memory = kept.beside(memory)
    plan = partial(plan_rows, footprint, config, parts.rows, memory, dtype=dtype, cached=parts.cached)
    plan().admitted()  # before a weight is read
    weights = FiniteWeights(checkpoint) if config.debug_numerics else checkpoint
    read = partial(backend.load, family, model_config, weights, progress)
    if kept is None:
        read()
    else:
        kept.load(backend, read, lambda: choose_backend(config, manager).backend)
    replan = partial(plan, weights=backend.weight_bytes)
    sampler = parts.sampler(vocab=vocab, tokenizer=tokenizer, processors=_processors(manager, vocab, tokenizer))
    observers = Observers(tuple(manager.observers().values()))

    def store_of(plan: MemoryPlan) -> KVStore:
        make = parts.kv_stores[storage_name(config, plan.settings.rows)]
        return make_store(make, plan, kv_spec, size=parts.page_size, cached=parts.cached)

    def engine_of(plan: MemoryPlan, kv: KVStore) -> Engine:
        positions = plan.admitted().positions
        return Engine(
            backend=backend,
            kv_spec=kv_spec,
            kv=kv,
            sampler=sampler,
            finish=StandardFinish(
                stream=lambda row: reply_stream(tokenizer, row),
                steps=parts.steps,
                clock=clock,
            ),
            settings=EngineSettings(
                vocab,
                positions,
                plan.settings.rows,
                chunk,
                config.max_consecutive_faults,
                config.max_logprobs,
                identity=attrs.evolve(identify(checkpoint, positions), backend=parts.chosen.name),
            ),
            observers=observers,
        )

    planned = replan()
    planned.admitted()
    memory_plan, kv, engine = start_with_kv(planned, store_of, engine_of, lambda most: replan(kv_most=most))
    context = memory_plan.admitted()
    if context.lowered:
        say(context.lowered)
    if isinstance(backend, Remarks) and (remark := backend.remark) is not None:
        say(remark)
    held.callback(engine.shutdown)
    if parts.served and not config.no_warmup and isinstance(backend, WarmsUp):
        backend.warm_up(progress)
    cache: PromptCache | None = None
    if parts.cached:
        cache = make_cache(config, engine, kv, kv_spec, memory_plan, clock)
        held.callback(save_cache, config, engine, cache)
    facts = ModelFacts(
        name=config.served_model_name[0] if config.served_model_name else found.name,
        source=found.source,
        path=str(found.path),
        format=checkpoint.format,
        family=spec.name,
        quantisation=checkpoint.quantisation,
        context=context.positions,
        sha256=_sha256(found),
        vocab=vocab,
        window=footprint.window,
        parameters=footprint.parameters,
        file_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        weight_bytes=backend.weight_bytes,
        position_bytes=memory_plan.position_bytes,
        row_bytes=memory_plan.row_bytes(context.positions),
    )
    if unused := unused_tensors(family.schema(model_config), checkpoint):
        log.info("%s", unused_line(unused))
    log.info("model: %s", ", ".join(f"{name}={value}" for name, value in attrs.asdict(facts).items()))
    most = memory_plan.kv_bytes(context.positions)
    log.info("KV: at most %d bytes of %d positions a row", most, context.positions)
    return {
        "engine": engine,
        "cache": cache,
        "planner": parts.planner(chunk=chunk, level=engine.level, caps=backend.caps),
        "tokenizer": tokenizer,
        "template": template,
        "ends": ends,
        "defaults": defaults,
        "observers": observers,
        "backend": parts.chosen.name,
        "caps": backend.caps,
        "kv_storage": kv.name,
        "prefill_chunk": chunk,
        "facts": facts,
    }


def _processors(manager: PluginManager, vocab: int, tokenizer: Tokenizer) -> dict[str, LogitsProcessor]:
    """Logits processors by name. One that cannot be made is missed only by requests that ask for it."""
    registry = manager.logits_processors()
    made: dict[str, LogitsProcessor] = {}
    for name in registry:
        try:
            made[name] = registry.maker(name, LogitsProcessor)(vocab=vocab, tokenizer=tokenizer)
        except PluginError as error:
            log.warning("%s", error)
    return made


def _sha256(found: ResolvedModel) -> str | None:
    """Of the one weights file of a stored model."""
    if found.stored is None:
        return None
    return next((file.sha256 for file in found.stored.files if file.name == found.path.name), None)


class _Timed:
    """Passes progress on and remembers how long each phase took, in seconds."""

    def __init__(self, progress: Progress, clock: Callable[[], float]) -> None:
        self._progress, self._clock = progress, clock
        self._running: tuple[str, float] | None = None
        self.seconds: dict[str, float] = {}

    def start(self, phase: str, total: int | None, unit: str) -> None:
        self._running = (phase, self._clock())
        self._progress.start(phase, total, unit)

    def advance(self, done: int) -> None:
        self._progress.advance(done)

    def finish(self) -> None:
        if self._running is not None:
            phase, started = self._running
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._clock() - started
            self._running = None
        self._progress.finish()
