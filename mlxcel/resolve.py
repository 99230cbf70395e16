"""From what the user calls a model to where it is (docs/spec/clients.md 1.9)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import attrs

from mlxcel.core.source import ModelSource, NoProgress, Progress
from mlxcel.errors import CheckpointError, DownloadError, UnknownModel, UsageError
from mlxcel.store import HubName, ModelStore, StoredModel

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


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
    say: Callable[[str], None] = lambda line: None,
) -> ResolvedModel:
    """The first that matches: an existing path, a registered name (fetched where it has to be), a name in the store,
    a model of Hugging Face (fetched).

    A model that is in the store costs no network call. `say` is told the notice of a licence before anything is
    fetched. Raises UnknownModel; CheckpointError for files that only unpickling could read (never opened);
    DownloadError where the model cannot be had, or may not with `offline`.
    """
    if os.path.isdir(name_or_path) or os.path.isfile(name_or_path):
        _refuse_pickles(name_or_path)
        path = Path(name_or_path)
        return ResolvedModel(path, _served_name(path), "path", None)
    name = stored_name(name_or_path)
    stored, source = store.get(name), sources.get(name)
    if source is not None and stored is None:
        stored = store.adopt(source, progress)
    damage = None if stored is None else stored.damage()
    if stored is not None and damage is None:
        return ResolvedModel(stored.path, _last_part(stored.name), stored.source, stored)
    wanted = _to_fetch(name, stored, damage, sources=sources, store=store, offline=offline)
    path = store.fetch(wanted, progress, say=say)
    return ResolvedModel(path, _last_part(wanted.name), wanted.fetch, store.get(wanted.name))


def download_model(
    name: str,
    *,
    sources: Mapping[str, ModelSource],
    store: ModelStore,
    offline: bool,
    force: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """The path of a model that is in the store and verified when this returns, fetched where it has to be.

    Raises what `resolve_model` and `ModelStore.fetch` raise; a path is no name here.
    """
    if offline and force:
        raise UsageError("--force fetches, and --offline forbids it", hint="leave one of them out")
    name = stored_name(name)
    stored, source = store.get(name), sources.get(name)
    if source is not None and _may_be_fetched(source, offline):
        return store.fetch(source, progress, force=force, say=say)
    if source is not None and stored is None:
        stored = store.adopt(source, progress)
    if force and stored is not None and HubName.parse(name) is None:
        raise UsageError(f"{name!r} cannot be fetched again: no plugin registers it", hint="leave --force out")
    damage = None if stored is None or force else store.verify(stored, progress or NoProgress())
    if stored is not None and not force and damage is None:
        return stored.path
    wanted = _to_fetch(name, stored, damage, sources=sources, store=store, offline=offline)
    return store.fetch(wanted, progress, force=force, say=say)


def stored_name(name: str) -> str:
    """What the store calls a model: names of Hugging Face have several spellings."""
    hub = HubName.parse(name)
    return name if hub is None else hub.text


def _may_be_fetched(source: ModelSource, offline: bool) -> bool:
    return not offline or source.bytes == 0  # nothing of it comes over the network


def _to_fetch(
    name: str,
    stored: StoredModel | None,
    damage: str | None,
    *,
    sources: Mapping[str, ModelSource],
    store: ModelStore,
    offline: bool,
) -> ModelSource:
    """The source of a model that the store lacks, or holds damaged; else an error that says why there is none."""
    source = sources.get(name)
    if source is not None and _may_be_fetched(source, offline):
        return source
    hub = HubName.parse(name) if source is None else None
    if hub is not None and not offline:
        from mlxcel.plugins.sources.hub import Hub

        try:
            return Hub().find(hub)
        except UnknownModel as error:
            known = [*sources, *(model.name for model in store.list())]
            raise UnknownModel(error.message, hint=f"{error.hint}; {near_names(name, sorted(set(known)))}") from error
    if stored is not None:
        raise _damaged(stored, damage)
    if source is not None or hub is not None:
        raise _offline(name, store)
    raise unknown_model(name, sources=sources, store=store)


def unknown_model(name: str, *, sources: Mapping[str, ModelSource], store: ModelStore) -> UnknownModel:
    """Why nothing is called so, with the names that come near."""
    _refuse_pickles(name)
    known = sorted({*sources, *(model.name for model in store.list())})
    names = near_names(name, known)
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


def _last_part(name: str) -> str:
    """What a model is served as: the repository's own name, for one of Hugging Face."""
    hub = HubName.parse(name)
    return name if hub is None else hub.name


def _damaged(stored: StoredModel, damage: str | None) -> DownloadError:
    return DownloadError(
        f"the stored model {stored.name} is damaged: {damage}",
        hint=f"`mlxcel rm {stored.name}` deletes it, `mlxcel download {stored.name}` fetches it again when online",
    )


def _offline(name: str, store: ModelStore) -> DownloadError:
    neither = "" if HubName.parse(name) is None else " and no path here"
    return DownloadError(
        f"{name} is not in the model store {store.root}{neither}, and offline nothing is fetched",
        hint=f"run `mlxcel download {name}` without --offline; or name a model of your own with -m PATH; "
        "or set MLXCEL_MODELS_DIR to a store that has it",
    )
