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
from mlxcel.errors import DownloadError, MlxcelError, UnknownModel, shown
from mlxcel.plugins.sources import hub_child
from mlxcel.plugins.sources.hub_files import HubFile, chosen_files
from mlxcel.plugins.sources.watched_child import PATIENCE, Clock, MonotonicClock, run_watched
from mlxcel.store.hub_name import HubName

SOURCE: Final = "huggingface"
_MAX_ANSWER: Final = 64 << 20  # bytes; a repository of 100,000 files has about half of it
_OPEN: Final = frozenset((
    "afl-3.0", "apache-2.0", "artistic-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc-by-4.0", "cc0-1.0",
    "ecl-2.0", "epl-2.0", "isc", "mit", "mpl-2.0", "ms-pl", "ncsa", "postgresql", "unlicense", "wtfpl", "zlib",
))  # fmt: skip
"""Licences, by the hub's names for them, that ask nothing of who uses a model."""

_SIGN_IN: Final = "sign in with `hf auth login`"


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
        licence = str(answer["license"] or "unknown")
        return HubModel(
            name=name.text,
            summary=f"{name.repository} of Hugging Face",
            bytes=sum(file.size for file in files),
            license=str(answer["license_name"] or licence) if licence == "other" else licence,
            files=tuple(ModelFile(file.name, file.sha256) for file in files),
            fetch=SOURCE,
            notice=_notice(name, licence, answer),
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
            raise _error("stalled", f"no new byte came for {PATIENCE:.0f} s", name)
        if ended.status != 0 or not answer.is_file() or answer.stat().st_size > _MAX_ANSWER:
            raise _error("other", ended.last_line, name)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        if found["failure"] is not None:
            raise _error(found["failure"], found["words"], name)
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


def _notice(name: HubName, licence: str, answer: dict[str, Any]) -> str | None:
    if licence in _OPEN:
        return None
    link = answer["license_link"]
    terms = link if isinstance(link, str) and link.startswith("https://") else f"the card of {name.repository}"
    if licence == "unknown":
        return f"{name.text} names no licence: {terms} may say what it may be used for"
    called = answer["license_name"] if licence == "other" and answer["license_name"] else licence
    return (
        f"{name.text} is under the licence {shown(called)}, which may restrict what it is used for: see {terms}; "
        + ("using the model accepts its terms")
    )


def _error(kind: str, words: str, name: HubName) -> MlxcelError:
    """Each failure with its own sentence and next step."""
    repository = name.repository
    if kind in ("missing", "revision", "entry"):
        message, hint = {
            "missing": (
                f"{name.text!r} is no path here, and Hugging Face has no model {repository}, or not for everybody",
                f"check the spelling; for a private model, {_SIGN_IN}",
            ),
            "revision": (
                f"{repository} has no revision {name.revision!r}",
                "name a branch, a tag or a commit that it has; without one its main branch is taken",
            ),
            "entry": (f"{repository} lacks a file that it lists: {words}", "try again: it may be changing just now"),
        }[kind]
        return UnknownModel(message, hint=hint) if kind != "entry" else DownloadError(message, hint=hint)
    sentences = {
        "gated": (
            f"{repository} is gated: its owner gives it to those who ask",
            f"ask for access on the model's own page, then {_SIGN_IN}",
        ),
        "rate": (
            f"Hugging Face takes no more questions for now (rate limit): {words}",
            f"wait some minutes; {_SIGN_IN} for a higher limit",
        ),
        "offline": (
            f"{name.text} is not in the model store, and HF_HUB_OFFLINE forbids asking for it",
            "unset HF_HUB_OFFLINE; or name a model of your own with -m PATH",
        ),
        "network": (
            f"Hugging Face cannot be reached: {words}",
            "look at your network and its proxy settings, and at HF_ENDPOINT where it is set",
        ),
        "server": (f"Hugging Face fails to answer: {words}", "try again later"),
        "full": ("the disk of the model store is full", "free some of it and try again"),
        "stalled": (f"{name.text}: {words}", "look at your network and try again"),
        "absent": (
            "models of Hugging Face are fetched by its library, and this Python has none",
            "pip install huggingface-hub",
        ),
    }
    message, hint = sentences.get(kind, (f"{name.text} could not be fetched: {words}", "try again"))
    return DownloadError(message, hint=hint)
