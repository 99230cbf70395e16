"""Reads a checkpoint's headers and plans its memory: no weight is read and nothing is fetched (clients spec 1.8)."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.choose_backend import choose_backend
from mlxcel.core.backend import DeviceMemory
from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.family import WeightSchema
from mlxcel.core.kv import FullKV, KVSpec, RecurrentKV, SlidingKV
from mlxcel.core.named import load_target
from mlxcel.errors import CheckpointError, DeviceError, DownloadError, MlxcelError
from mlxcel.footprint import ITEM_SIZES, Footprint, only, top_k, window_token_bytes
from mlxcel.inspection import Fit, Inspection, KVBytes, MemoryFacts, Parameters, Shapes, Unsupported, Unused, Weights
from mlxcel.load import choose_tokenizer, open_checkpoint
from mlxcel.memory_plan import Memory, MemoryPlan, MemorySettings, memory_here, plan_memory
from mlxcel.resolve import ResolvedModel, resolve_model, stored_name
from mlxcel.store import HubName, ModelStore
from mlxcel.store.record import format_bytes
from mlxcel.tensor_check import check_tensors
from mlxcel.unused_tensors import NAMED, unused_tensors

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager


def inspect_model(
    config: EngineConfig, manager: PluginManager, progress: Progress, *, rows: int = 1, device_memory: int | None = None
) -> tuple[Inspection, MlxcelError | None]:
    """What can be read of the model that `config` names, and the first of the errors that its `unsupported` tells.

    `rows` are open at once; with `device_memory` the answer is for a device of so many bytes instead of this host.
    Raises the errors of `resolve_model`; DownloadError for a model that is not in the store; UsageError for a
    `max_model_len` above the model's window; DeviceError where "auto" finds no backend to take the type from.
    """
    dtype, device = _computed(config, manager)
    settings = MemorySettings.of(config, rows=rows, dtype=dtype)
    if device_memory is not None:
        device = DeviceMemory(device_memory, device_memory)
    memory = memory_here(settings, device)
    with ExitStack() as held:
        store = ModelStore(config.store_root)
        found = _find(config.model, manager, store, progress)
        if found.stored is not None:
            held.enter_context(store.use(found.stored.name))
        basics = Inspection(found.name, found.source, str(found.path), _disk_bytes(found.path))
        try:
            checkpoint = open_checkpoint(found.path, manager)
        except CheckpointError as error:
            return _explained(attrs.evolve(basics, format=_format(found.path, manager)), [("format", error)])
        held.callback(checkpoint.close)
        fields, failed = _read(checkpoint, manager, settings, memory)
        return _explained(attrs.evolve(basics, **fields), failed)


def _computed(config: EngineConfig, manager: PluginManager) -> tuple[str, DeviceMemory | None]:
    """The type that is asked for, whatever backend has it, else what the backend that would run here computes in; and
    the memory of its device, where one can run here."""
    if config.backend is not None:
        manager.backends().choose(config.backend)
    try:
        backend = choose_backend(attrs.evolve(config, dtype="auto"), manager).backend
    except DeviceError:
        if config.dtype == "auto":
            raise
        return config.dtype, None
    try:
        return (backend.caps.dtype if config.dtype == "auto" else config.dtype), backend.memory()
    finally:
        backend.close()


def _find(name_or_path: str, manager: PluginManager, store: ModelStore, progress: Progress) -> ResolvedModel:
    """As `resolve_model`, but a model that would have to be fetched is an error with its size and licence."""
    sources, stored = manager.model_sources(), None
    if not os.path.isdir(name_or_path) and not os.path.isfile(name_or_path):
        name = stored_name(name_or_path)
        stored, source = store.get(name), sources.get(name)
        if source is not None and stored is None:
            stored = store.adopt(source, progress)
        if stored is None and (source is not None or HubName.parse(name) is not None):
            size = "made here" if source is not None and source.bytes == 0 else "of a size only its origin knows"
            if source is not None and source.bytes:
                size = f"{format_bytes(source.bytes)} to fetch"
            licence = "" if source is None else f", licence {source.license}"
            raise DownloadError(
                f"{name} is not in the model store {store.root}: {size}{licence}",
                hint=f"`mlxcel download {name}` puts it there; inspect fetches nothing",
            )
    return resolve_model(
        name_or_path, sources={} if stored is not None else sources, store=store, offline=True, progress=progress
    )


def _disk_bytes(path: Path) -> int:
    """Of the file, or of the folder's own files: what lies deeper is no part of a checkpoint."""
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return 0  # opening it says why


def _format(path: Path, manager: PluginManager) -> str | None:
    return next((name for name, spec in manager.formats().items() if load_target(spec.detect)(path)), None)


def _explained(inspection: Inspection, failed: list[tuple[str, MlxcelError]]) -> tuple[Inspection, MlxcelError | None]:
    told = tuple(Unsupported(part, error.message, error.hint) for part, error in failed)
    return attrs.evolve(inspection, unsupported=told), failed[0][1] if failed else None


def _read(
    checkpoint: Checkpoint, manager: PluginManager, settings: MemorySettings, memory: Memory | None
) -> tuple[dict[str, Any], list[tuple[str, MlxcelError]]]:
    """Fields of an Inspection as far as they go, and what ended that by its part."""
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    fields: dict[str, Any] = {
        "format": checkpoint.format,
        "quantisation": checkpoint.quantisation,
        "architecture": checkpoint.architecture,
        "weights": Weights(len(checkpoint.tensors), stored, {}),
    }
    failed: list[tuple[str, MlxcelError]] = []
    part = "family"
    try:
        spec = manager.family_for(checkpoint.naming, checkpoint.architecture)
        fields["family"] = spec.name
        family = manager.families().load(spec.name)()
        part = "config"
        config = family.parse_config(checkpoint)
        schema: WeightSchema = family.schema(config)
        footprint = Footprint.of(family, config)
        plan = plan_memory(footprint, settings, memory)
        fields |= {
            "shapes": _shapes(config, schema, footprint),
            "parameters": Parameters(footprint.parameters, footprint.active),
            "weights": _weights(schema, checkpoint, footprint),
            "unused": _unused(schema, checkpoint),
            "kv": _kv_bytes(plan),
            "memory": _memory_facts(memory),
            "fit": _fit(plan),
        }
        part = "tensors"
        check_tensors(schema, checkpoint)
    except CheckpointError as error:
        failed.append((part, error))
    try:
        choose_tokenizer(checkpoint, manager)
    except CheckpointError as error:
        failed.append(("tokenizer", error))
    return fields, failed


def _shapes(config: Any, schema: WeightSchema, footprint: Footprint) -> Shapes:
    layers = footprint.kv.layers
    positions = [layer for layer in layers if not isinstance(layer, RecurrentKV)]
    windows = {layer.window for layer in layers if isinstance(layer, SlidingKV)}
    experts = [weight.shape[0] for weight in schema.weights if weight.role == "experts"]
    return Shapes(
        V=footprint.vocab,
        D=footprint.hidden,
        H=getattr(config, "heads", None),
        K=max((layer.kv_heads for layer in positions), default=None),
        d=max((layer.k_dim for layer in positions), default=None),
        F=getattr(config, "ffn", None),
        L=schema.layers,
        context=footprint.window,
        full_layers=sum(isinstance(layer, FullKV) for layer in layers),
        window_layers=sum(isinstance(layer, SlidingKV) for layer in layers),
        windows=tuple(sorted(windows)),
        recurrent_layers=sum(isinstance(layer, RecurrentKV) for layer in layers),
        experts=max(experts, default=None),
        experts_per_token=top_k(config) if experts else None,
    )


def _weights(schema: WeightSchema, checkpoint: Checkpoint, footprint: Footprint) -> Weights:
    used = [checkpoint.tensors[name] for name in schema.tensor_names(checkpoint.naming) if name in checkpoint.tensors]
    in_memory = {dtype: footprint.weight_bytes(dtype) for dtype in ITEM_SIZES}
    return Weights(len(used), sum(tensor.nbytes for tensor in used), in_memory)


def _unused(schema: WeightSchema, checkpoint: Checkpoint) -> Unused:
    names = unused_tensors(schema, checkpoint)
    return Unused(len(names), sum(checkpoint.tensors[name].nbytes for name in names), names[:NAMED])


def _kv_bytes(plan: MemoryPlan) -> KVBytes:
    kv, itemsize = plan.kv, ITEM_SIZES[plan.settings.dtype]

    def per_row(part: KVSpec) -> int:
        return part.bytes_per_row(itemsize, context=plan.wanted, chunk=plan.settings.chunk)

    return KVBytes(
        full_per_token=plan.position_bytes,
        window_per_token=window_token_bytes(kv, itemsize),
        window_per_row=per_row(only(kv, SlidingKV)),
        state_per_row=per_row(only(kv, RecurrentKV)),
        row=plan.full_row_bytes,
    )


def _memory_facts(memory: Memory | None) -> MemoryFacts | None:
    if memory is None:
        return None
    return MemoryFacts("device" if memory.device else "host", memory.total, memory.free, memory.share)


def _fit(plan: MemoryPlan) -> Fit:
    refusal = None if plan.refusal is None else plan.refusal.message
    return Fit(
        dtype=plan.settings.dtype,
        ctx_size=plan.wanted,
        prefill_chunk=plan.settings.chunk,
        parallel=plan.settings.rows,
        weight_bytes=plan.weights,
        workspace_bytes=plan.workspace,
        margin_bytes=plan.margin,
        kv_budget_bytes=plan.budget.bytes,
        needed_bytes=plan.needed,
        fits=plan.context is not None,
        context=None if plan.context is None else plan.context.positions,
        reason=refusal if plan.context is None else plan.context.lowered,
        hint=None if plan.refusal is None else plan.refusal.hint,
        tokens=plan.tokens,
        tokens_per_row=plan.tokens_per_row,
        rows_at_full_context=plan.rows_at_full_context,
    )
