"""From what the user calls a model to where it is (docs/spec/clients.md 1.9)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import attrs

from mlxcel.core.source import ModelSource, NoProgress, Progress
from mlxcel.errors import CheckpointError, DownloadError, UnknownModel, UsageError
from mlxcel.store import ModelStore, StoredModel

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[^/\s]+)?")


@attrs.frozen
class ResolvedModel:
    """A model found. `path`: a file or folder; `name`: what it is served as; `source`: "path", or the record's;
    `stored`: what the store knows, for a model in it (hold `ModelStore.use(stored.name)` while it is loaded)."""

    path: Path
    name: str
    source: str
    stored: StoredModel | None


def resolve_model(
    name_or_path: str,
    *,
    sources: Mapping[str, ModelSource],
    store: ModelStore,
    offline: bool,
    progress: Progress | None = None,
) -> ResolvedModel:
    """The first that matches: an existing path, a registered name (fetched where it has to be), a name in the store.

    A model that is in the store costs no network call. Raises UnknownModel; CheckpointError for files that only
    unpickling could read (never opened); DownloadError where the model cannot be had, or may not with `offline`.
    """
    if os.path.isdir(name_or_path) or os.path.isfile(name_or_path):
        _refuse_pickles(name_or_path)
        path = Path(name_or_path)
        return ResolvedModel(path, _served_name(path), "path", None)
    stored = store.get(name_or_path)
    source = sources.get(name_or_path)
    if source is not None and stored is None:
        stored = store.adopt(source, progress)
    if stored is not None and (damage := stored.damage()) is None:
        return ResolvedModel(stored.path, stored.name, stored.source, stored)
    if source is None:
        if stored is not None:
            raise _damaged(stored, damage)
        raise unknown_model(name_or_path, sources=sources, store=store)
    if offline:
        raise _offline(source, store) if stored is None else _damaged(stored, damage)
    path = store.fetch(source, progress)
    return ResolvedModel(path, source.name, source.fetch, store.get(source.name))


def download_model(
    name: str,
    *,
    sources: Mapping[str, ModelSource],
    store: ModelStore,
    offline: bool,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The path of a model that is in the store and verified when this returns, fetched where it has to be.

    Raises what `resolve_model` and `ModelStore.fetch` raise; a path is no name here.
    """
    source, stored = sources.get(name), store.get(name)
    if offline and force:
        raise UsageError("--force fetches, and --offline forbids it", hint="leave one of them out")
    if source is not None and not offline:
        return store.fetch(source, progress, force=force)
    if source is not None and stored is None:
        stored = store.adopt(source, progress)
        if stored is None:
            raise _offline(source, store)
        return stored.path
    if stored is None:
        raise unknown_model(name, sources=sources, store=store)
    if force:
        raise UsageError(f"{name!r} cannot be fetched again: no plugin registers it", hint="leave --force out")
    if (damage := store.verify(stored, progress or NoProgress())) is not None:
        raise _damaged(stored, damage)
    return stored.path


def unknown_model(name: str, *, sources: Mapping[str, ModelSource], store: ModelStore) -> UnknownModel:
    """Why nothing is called so, with the names that come near."""
    _refuse_pickles(name)
    known = sorted({*sources, *(model.name for model in store.list())})
    names = near_names(name, known)
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return UnknownModel(
            f"{name!r} is no path here, and models of Hugging Face cannot be named yet",
            hint=f"download the model with another tool and name its local folder; {names}",
        )
    if os.path.lexists(name) and not os.path.exists(name):
        return UnknownModel(f"{name!r} is a link to nothing", hint=f"name what it should lead to; {names}")
    if os.path.isfile(name) or os.path.isdir(name):
        return UnknownModel(f"{name!r} is a path, and a name is needed", hint=f"it is here already: -m {name}; {names}")
    if os.path.exists(name):
        return UnknownModel(f"{name!r} is neither a file nor a folder", hint=f"name one; {names}")
    if os.sep in name or name.endswith(".gguf"):
        return UnknownModel(f"{name!r} does not exist", hint=f"name a folder or a .gguf file that does; {names}")
    return UnknownModel(f"no model is called {name!r}", hint=f"{names}; `mlxcel list` shows all, a path does too")


def near_names(name: str, known: Sequence[str]) -> str:
    """A hint with the known names that look like `name`, or all of them where none does."""
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known names: {', '.join(known) or 'none'}"


def _refuse_pickles(path: str) -> None:
    if path.lower().endswith(_PICKLES) and not os.path.isdir(path):
        raise CheckpointError(
            f"{path!r}: weights in {os.path.splitext(path)[1]} files are not read: unpickling them can run any code",
            hint="convert them to safetensors or GGUF, and name the converted file's folder or the .gguf file",
        )


def _served_name(path: Path) -> str:
    name = Path(os.path.abspath(path)).name
    return name.removesuffix(".gguf") or str(path)


def _damaged(stored: StoredModel, damage: str | None) -> DownloadError:
    return DownloadError(
        f"the stored model {stored.name} is damaged: {damage}",
        hint=f"`mlxcel rm {stored.name}` deletes it, `mlxcel download {stored.name}` fetches it again when online",
    )


def _offline(source: ModelSource, store: ModelStore) -> DownloadError:
    return DownloadError(
        f"{source.name} is not in the model store {store.root}, and offline nothing is fetched",
        hint=f"run `mlxcel download {source.name}` without --offline; or name a model of your own with -m PATH; "
        "or set MLXCEL_MODELS_DIR to a store that has it",
    )
