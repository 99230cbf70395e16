# mypy: disable-error-code="empty-body"
"""The hooks: what a plugin offers, by name. docs/hooks.md shows each with a plugin that implements it.

A plugin is a module of an installed distribution, named by an entry point of the group `mlxcel`, with functions marked
`@hookimpl`. Each hook is called at most once a process, before anything runs, and never per layer, step or token. It
returns a list of specs whose targets are lazy strings: importing and calling a plugin must cost next to nothing.
"""

# No `from __future__ import annotations` here: the signatures in docs/hooks.md are those of `inspect.signature`.

from typing import TYPE_CHECKING

import pluggy

from mlxcel.core.backend import BackendSpec
from mlxcel.core.checkpoint import FormatSpec
from mlxcel.core.family import FamilySpec
from mlxcel.core.named import Named
from mlxcel.core.observe import Observer
from mlxcel.core.source import ModelSource
from mlxcel.core.tokenizer import TokenizerSpec

if TYPE_CHECKING:
    from starlette.routing import Route

    from mlxcel.serve_engine import Serving

PROJECT = "mlxcel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook of its name."""


@hookspec
def mlxcel_backends() -> list[BackendSpec]:
    """Backends, chosen by `--backend NAME`, else the available one of highest priority.

    `load()` gives a class, called with `device` (str), `dtype` (str) and `deterministic` (bool) by keyword, whose
    instances are a `Backend`. `probe_target` names a function `(device: str) -> Probe` that imports nothing
    heavy, `prepare_target` one `(settings: BackendSettings) -> None` that runs before the class is imported, or None.
    """


@hookspec
def mlxcel_families() -> list[FamilySpec]:
    """Model families, chosen by the checkpoint's `model_type` or its GGUF architecture, each claimed by one family.

    `load()` gives a class, called without arguments, whose instances are a `ModelFamily`.
    """


@hookspec
def mlxcel_formats() -> list[FormatSpec]:
    """Checkpoint readers, chosen by what the path holds: the first in registered order whose `detect` says yes.

    `load()` gives `(path: Path) -> Checkpoint`, which raises CheckpointError. `detect` names a function
    `(path: Path) -> bool`.
    """


@hookspec
def mlxcel_tokenizers() -> list[TokenizerSpec]:
    """Tokenizer factories, chosen by the assets in the checkpoint: of those whose `needs` is there, the one of highest
    priority.

    `load()` gives `(checkpoint: Checkpoint) -> Tokenizer`, which raises CheckpointError.
    """


@hookspec
def mlxcel_model_sources() -> list[ModelSource]:
    """Models that can be fetched, chosen by the model's name.

    `fetch` names a function `(target: Path, progress: Progress) -> None` that fills the empty folder `target` or raises
    DownloadError.
    """


@hookspec
def mlxcel_kv_stores() -> list[Named]:
    """Bookkeeping of where the KV lives, chosen by `--kv-storage NAME`.

    `load()` gives a factory `(*, kv_spec: KVSpec, slots: int, context: int, page_size: int, pages: int) -> KVStore`;
    `slots` is the number of rows, `context` and `page_size` are in positions, `pages` is how many pages of that size
    the KV budget holds. A store holds no device array.
    """


@hookspec
def mlxcel_prefill_planners() -> list[Named]:
    """How prompts are cut into pieces, chosen by `--prefill-planner NAME`.

    `load()` gives a factory `(*, chunk: int, level: Level, caps: BackendCaps)`, `chunk` in tokens. What it makes has
    `build(ids, adopted=0, draw=True) -> PrefillPlan` for prompt ids [P] int32, `adopted` of which are in KV already.
    """


@hookspec
def mlxcel_samplers() -> list[Named]:
    """Sampling maths, chosen by `--sampler NAME`.

    `load()` gives a factory `(*, vocab: int, tokenizer: Tokenizer, processors: Mapping[str, LogitsProcessor]) ->
    Sampler`; `vocab` is V, the rows of the output, of which those at or above the tokenizer's size are padding, and
    `processors` are by registered name. `Sampler.draw` is pure array-API code that every backend runs.
    """


@hookspec
def mlxcel_logits_processors() -> list[Named]:
    """Changes to the logits, for rows that ask for them by name in `logits_processors`.

    `load()` gives a factory `(*, vocab: int, tokenizer: Tokenizer) -> LogitsProcessor`, which is a `BatchedProcessor`
    or, for masks alone, a `HostMask`.
    """


@hookspec
def mlxcel_finish_steps() -> list[Named]:
    """Rules that end a row, all of them asked, in registered order, after `context` and before `loop`.

    `load()` gives a factory `() -> FinishStep`. The cause of an ending is the registered name.
    """


@hookspec
def mlxcel_observers() -> list[Observer]:
    """Objects that are told of every step (`step_finished(report)`) and every ended request
    (`request_finished(result)`), all of them.

    The objects themselves, not specs. What one raises is logged and counted, and touches no row.
    """


@hookspec
def mlxcel_routes(engine: "Serving") -> "list[Route]":
    """HTTP routes of a server, behind its own and under the same keys, limits and log.

    Called by a server alone, once its model is there: `engine` has the `model` and the `scheduler`. The hook imports
    starlette when it is called, not before. A path that another plugin or the server itself has is an error.
    """
