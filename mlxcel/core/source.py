"""Where a named model comes from (docs/spec/clients.md 1.9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import attrs

from mlxcel.core.named import load_target


class Progress(Protocol):
    """Told about work that takes time. Implementations draw; they never raise. One phase at a time."""

    def start(self, phase: str, total: int | None, unit: str) -> None:
        """A phase begins: "download" and "verify" (bytes), "wait" (for another process, no total), "load"
        (tensors), "compile" (programs), "prefill" (tokens)."""
        ...

    def advance(self, done: int) -> None:
        """So much of `total` is done in all (absolute, not a difference)."""
        ...

    def finish(self) -> None:
        """The phase is over; harmless when none runs."""
        ...


@attrs.frozen
class ModelFile:
    """A file of a model in the store: its name there and the SHA-256 it must have, None where only the source can tell
    whether it is the right one."""

    name: str
    sha256: str | None


Fetch = Callable[[Path, Progress], None]


@attrs.frozen
class ModelSource:
    """A model that can be had by name.

    `fetch` is a lazy "module:function" `(target: Path, progress: Progress) -> None` that puts the named files, and the
    licence, into the empty folder `target` on the store's disk, or raises DownloadError. The store verifies the hashes.
    `notice` is for a licence that asks more than an open-source one does: one line that says where its terms are, told
    before the first byte is fetched. `revision` is what of a changing origin this is, as a commit.
    """

    name: str
    summary: str
    bytes: int  # what goes over the network; 0: the files are made here, offline too
    license: str  # SPDX id
    files: tuple[ModelFile, ...]
    fetch: str
    notice: str | None = None
    revision: str | None = None

    def load_fetch(self) -> Fetch:
        fetch: Fetch = load_target(self.fetch)
        return fetch


class NoProgress:
    """Draws nothing."""

    def start(self, phase: str, total: int | None, unit: str) -> None:
        """Nothing."""

    def advance(self, done: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""
