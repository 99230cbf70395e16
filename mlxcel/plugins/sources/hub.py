"""Models of Hugging Face, by `owner/name[@revision][:choice]`. Its library runs in a child: see hub_child.py."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from mlxcel.core.source import Fetch, ModelFile, ModelSource, Progress
from mlxcel.errors import DownloadError
from mlxcel.plugins.sources import hub_child
from mlxcel.plugins.sources.hub_failures import failure
from mlxcel.plugins.sources.hub_files import HubFile, chosen_files
from mlxcel.plugins.sources.hub_licence import Licence
from mlxcel.plugins.sources.watched_child import PATIENCE, Clock, MonotonicClock, run_watched
from mlxcel.store.hub_name import HubName

SOURCE: Final = "huggingface"
_MAX_ANSWER: Final = 64 << 20  # bytes; a repository of 100,000 files has about half of it


@attrs.frozen
class Hub:
    """The library, as a child that is watched."""

    command: tuple[str, ...] = attrs.field(factory=lambda: (sys.executable, "-P", hub_child.__file__))
    clock: Clock = attrs.field(factory=MonotonicClock)

    def find(self, name: HubName) -> HubModel:
        """What `name` is now: its commit and the files to fetch. One question over the network, no file is fetched.

        Raises UnknownModel, UsageError and CheckpointError for what is not there or cannot be read, else DownloadError.
        """
        with tempfile.TemporaryDirectory(prefix="mlxcel-") as folder:
            wanted = {"repository": name.repository, "revision": name.revision}
            answer = self._ask("list", wanted, Path(folder), name)
        files = chosen_files(name, [HubFile(**file) for file in answer["files"]])
        licence = Licence.of_card(answer)
        return HubModel(
            name=name.text,
            summary=f"{name.repository} of Hugging Face",
            bytes=sum(file.size for file in files),
            license=licence.name,
            files=tuple(ModelFile(file.name, file.sha256) for file in files),
            fetch=SOURCE,
            notice=licence.notice(name),
            revision=str(answer["commit"]),
            hub=self,
            hub_name=name,
            hub_files=files,
        )

    def get(self, model: HubModel, target: Path, progress: Progress) -> None:
        """Puts the files of `model` into `target`. Raises DownloadError, or OSError of the disk, and then leaves
        nothing there."""
        work = target / ".hub"
        delivered = work / "tmp" / "files"  # what grows under `tmp` is what the bar shows
        delivered.mkdir(parents=True)
        shown_bytes = 0

        def show(count: int) -> None:
            nonlocal shown_bytes
            shown_bytes = max(shown_bytes, min(count, model.bytes))
            progress.advance(shown_bytes)

        try:
            progress.start("download", model.bytes, "bytes")
            try:
                wanted = {
                    "repository": model.hub_name.repository,
                    "commit": model.revision,
                    "folder": str(delivered),
                    "files": [file.name for file in model.hub_files],
                }
                self._ask("get", wanted, work, model.hub_name, show)
                show(model.bytes)
            finally:
                progress.finish()
            for file in model.hub_files:
                _require_right(delivered / file.name, file)
                (target / file.name).parent.mkdir(parents=True, exist_ok=True)
                (delivered / file.name).rename(target / file.name)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _ask(
        self,
        command: str,
        wanted: dict[str, Any],
        work: Path,
        name: HubName,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> dict[str, Any]:
        request, answer = work / "request.json", work / "answer.json"
        request.write_text(json.dumps(wanted), encoding="utf-8")
        ended = run_watched(
            (*self.command, command, str(request), str(answer)), work, clock=self.clock, on_bytes=on_bytes
        )
        if ended.status is None:
            raise failure("stalled", f"no new byte came for {PATIENCE:.0f} s", name)
        if ended.status != 0 or not answer.is_file() or answer.stat().st_size > _MAX_ANSWER:
            raise failure("other", ended.last_line, name)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        if found["failure"] is not None:
            raise failure(found["failure"], found["words"], name)
        return found


@attrs.frozen(kw_only=True)
class HubModel(ModelSource):
    """A model at one commit."""

    hub: Hub
    hub_name: HubName
    hub_files: tuple[HubFile, ...]

    def load_fetch(self) -> Fetch:
        return lambda target, progress: self.hub.get(self, target, progress)


def _require_right(path: Path, file: HubFile) -> None:
    """Of a file whose SHA-256 is known, the store looks at that; Git's own id says whether a small one is right."""
    size = path.stat().st_size
    if size != file.size:
        raise DownloadError(f"the fetched {file.name} has {size} bytes, {file.size} were expected", hint="try again")
    if file.sha256 is None and file.blob is not None:
        found = hashlib.sha1(b"blob %d\0" % size + path.read_bytes(), usedforsecurity=False).hexdigest()
        if found != file.blob:
            raise DownloadError(
                f"the fetched {file.name} has the Git id {found}, {file.blob} was expected", hint="try again later"
            )
