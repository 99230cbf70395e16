"""The model store: one folder a model, fetched once, verified, never half there.

ROOT/NAME/mlxcel-model.json  written last; a folder without it is no model. Who uses the model holds a lock on it
ROOT/NAME/...                the model's files
ROOT/.locks/NAME             held while NAME is fetched or removed
ROOT/.tmp/NAME/...           what is being fetched or removed: on the same disk, so that a rename finishes it

NAME is the model's own name, or stands for it where that is none of a folder: `folder_of` in record.py.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import attrs

from mlxcel.core.source import Fetch, ModelSource, NoProgress, Progress
from mlxcel.errors import DownloadError, PluginError, UnknownModel, UsageError
from mlxcel.store.digest import hash_files
from mlxcel.store.faults import explained, require_space
from mlxcel.store.lock import FileLock, still_there, try_lock, wait_lock
from mlxcel.store.record import RECORD, StoredFile, StoredModel, folder_of, is_inside, read_record, write_record
from mlxcel.store.work import working_on


@attrs.frozen
class ModelStore:
    """The models under `root`. Holds no state of its own: every answer is read from the disk."""

    root: Path

    def list(self) -> builtins.list[StoredModel]:
        """All models by name, damaged ones too. Where there is no store there are none."""
        try:
            folders = sorted(self.root.iterdir())
        except OSError:
            return []
        models = [model for folder in folders if (model := read_record(folder)) is not None]
        return sorted(models, key=lambda model: model.name)

    def get(self, name: str) -> StoredModel | None:
        """The model of this name, as its record has it; whether its files are good is `StoredModel.damage`."""
        folder = folder_of(name)
        model = None if folder is None else read_record(self.root / folder)
        return model if model is not None and model.name == name else None

    def use(self, name: str) -> FileLock:
        """Marks the model as in use until the lock is closed: it can be neither removed nor replaced meanwhile."""
        folder = folder_of(name)
        while folder is not None:
            try:
                lock = wait_lock(self.root / folder / RECORD, shared=True)
            except (FileNotFoundError, NotADirectoryError):
                break
            except OSError as error:
                raise DownloadError(
                    f"the model {name!r} cannot be locked: {error}", hint="check who may read the model store"
                ) from error
            if still_there(lock):
                return lock
            lock.close()
        raise self._unknown(name)

    def verify(self, model: StoredModel, progress: Progress | None = None) -> str | None:
        """Reads every file of the model. What is wrong with it, or None."""
        if (damage := model.damage()) is not None:
            return damage
        found = hash_files([model.folder / file.name for file in model.files], progress or NoProgress())
        for file, sha256 in zip(model.files, found, strict=True):
            if sha256 != file.sha256:
                return f"{model.folder / file.name} has SHA-256 {sha256}, {file.sha256} was stored"
        return None

    def adopt(self, source: ModelSource, progress: Progress | None = None) -> StoredModel | None:
        """Takes the files of `source` that somebody put into ROOT/NAME by hand; None where they are not all there.

        Raises DownloadError where one of them is not what it should be: it is left for its owner to delete.
        """
        folder = self._folder(source)
        with explained(source, folder):
            return self._adopt(source, folder, progress or NoProgress())

    def fetch(
        self,
        source: ModelSource,
        progress: Progress | None = None,
        *,
        force: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> Path:
        """The model's path (`StoredModel.path`), fetched if it is not there.

        What is there is verified, and fetched anew only where it is damaged, has other hashes than `source` names, or
        `force` is set; `say` is told the source's notice just before. Nothing stays of a fetch that failed or was
        interrupted. Raises DownloadError; PluginError where the source's own code does not load; UsageError where a
        model in use would have to be replaced.
        """
        progress = progress or NoProgress()
        folder = self._folder(source)
        with explained(source, folder):
            before = self.get(source.name)
            if not force and before is not None and self._is_good(before, source, progress):
                return before.path
            self.root.mkdir(parents=True, exist_ok=True)
            with working_on(self.root, folder.name, progress) as temporary:
                if not force:
                    now = self.get(source.name)
                    if now is not None and now != before:
                        return now.path  # another process fetched it while this one waited
                    if (adopted := self._adopt(source, folder, progress)) is not None:
                        return adopted.path
                self._require_replaceable(folder)
                require_space(self.root, source.bytes)
                target = temporary / folder.name
                target.mkdir()
                fetch = _load_fetch(source)
                if source.notice is not None:
                    say(f"notice: {source.notice}")
                fetch(target, progress)
                names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
                model = _recorded(source, target, names, progress)
                if read_record(folder) is not None:
                    self._take_away(folder, temporary)
                target.rename(folder)
                return attrs.evolve(model, folder=folder).path

    def remove(self, name: str) -> None:
        """Deletes a model. UnknownModel where `list()` does not name it, UsageError where it is in use."""
        model = self.get(name)
        if model is None:
            raise self._unknown(name)
        try:
            with working_on(self.root, model.folder.name, NoProgress()) as temporary:
                self._take_away(model.folder, temporary)
        except FileNotFoundError as error:
            raise self._unknown(name) from error  # another process was faster
        except OSError as error:
            raise DownloadError(
                f"the model {name!r} cannot be removed: {error}", hint=f"check who may write to {self.root}"
            ) from error

    def _unknown(self, name: str) -> UnknownModel:
        return UnknownModel(
            f"{name!r} is not a name in the model store {self.root}", hint="`mlxcel list` shows the names that are"
        )

    def _folder(self, source: ModelSource) -> Path:
        folder = folder_of(source.name)
        borrowed = "/" in source.name and source.revision is None  # a name that only Hugging Face gives
        if folder is None or borrowed or not source.files or not all(is_inside(file.name) for file in source.files):
            raise PluginError(
                f"the model source {source.name!r} has no usable name, no file, or a file outside its own folder",
                hint="a name is up to 128 letters, digits, '.', '_' and '-'; tell the author of the plugin",
            )
        return self.root / folder

    def _is_good(self, model: StoredModel, source: ModelSource, progress: Progress) -> bool:
        stored = {file.name: file.sha256 for file in model.files}
        wanted = all(file.name in stored and file.sha256 in (None, stored[file.name]) for file in source.files)
        return wanted and self.verify(model, progress) is None

    def _adopt(self, source: ModelSource, folder: Path, progress: Progress) -> StoredModel | None:
        names = [file.name for file in source.files]
        known = all(file.sha256 is not None and (folder / file.name).is_file() for file in source.files)
        if not known or (folder / RECORD).exists():
            return None
        return _recorded(source, folder, names, progress, adopted=True)

    def _require_replaceable(self, folder: Path) -> None:
        """Known before the network is used. Only a model of the store is ever replaced, never a user's own folder."""
        if read_record(folder) is not None:
            _exclusive(folder).close()
        elif folder.is_symlink() or folder.exists():
            raise DownloadError(f"{folder} is in the way and is not a model of this store", hint="move it away")

    def _take_away(self, folder: Path, temporary: Path) -> None:
        with _exclusive(folder):
            folder.rename(temporary / "removed")


def _exclusive(folder: Path) -> FileLock:
    lock = try_lock(folder / RECORD)
    if lock is None:
        name = model.name if (model := read_record(folder)) is not None else folder.name
        raise UsageError(f"the model {name!r} is in use", hint="end the processes that have it loaded, then try again")
    return lock


def _load_fetch(source: ModelSource) -> Fetch:
    try:
        return source.load_fetch()
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"the source of the model {source.name!r} does not load: {source.fetch}: {error}",
            hint="`mlxcel plugins` shows which distribution it comes from",
        ) from error


def _recorded(
    source: ModelSource, folder: Path, names: Sequence[str], progress: Progress, *, adopted: bool = False
) -> StoredModel:
    """Makes `folder` a model: all files of the source are there, have their hashes, and are written down."""
    missing = [file.name for file in source.files if file.name not in names]
    if missing:
        raise DownloadError(f"the source of {source.name} delivered no {', '.join(missing)}")
    found = dict(zip(names, hash_files([folder / name for name in names], progress), strict=True))
    for file in source.files:
        if file.sha256 not in (None, found[file.name]):
            found_one = f"has SHA-256 {found[file.name]}, {source.name} needs {file.sha256}"
            if adopted:
                raise DownloadError(
                    f"{folder / file.name} {found_one}", hint="delete it: it is damaged or another file"
                )
            raise DownloadError(f"the fetched {file.name} {found_one}: deleted", hint="try again later")
    model = StoredModel(
        name=source.name,
        folder=folder,
        source=source.fetch,
        license=source.license,
        fetched=datetime.now(UTC).isoformat(timespec="seconds"),
        files=tuple(StoredFile(name, (folder / name).stat().st_size, found[name]) for name in names),
        revision=source.revision,
    )
    write_record(model)
    return model
