"""What programs are made by: our own sources, those of third parties, and the packages under them. Digests of it,
certain or none."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs

from mlxcel_jax_cuda.package_files import Unknown, files_of, imports_of

OWN: Final = ("mlxcel", "mlxcel_jax_cuda")
"""The packages whose sources are part of what every program is found by."""

UNDER_US: Final = ("jax", "nvidia", "numpy", "ml_dtypes", "attrs", "flax", "opt_einsum", "scipy")
"""Names of distributions begin so that tracing, compiling and running go by, in their versions."""

_TOLD_BY: Final = (".dist-info", ".egg-info")

_KNOWN: Final = {
    *sys.stdlib_module_names,
    *OWN,
    "jax",
    "jaxlib",
    "numpy",
    "ml_dtypes",
    "attr",
    "attrs",
    "flax",
    "scipy",
}
"""What a third party may import without a look at it."""

_MOST_BYTES: Final = 64 << 20
"""Of a third party's files."""

_MOST_TEXT: Final = 2 << 20
"""Of its sources, which take some seconds to understand."""

_CLOSE: Final = 0.02
"""Seconds. Both times are kept in steps of a hundredth or less, and are never ahead."""


@attrs.frozen
class Sources:
    """The files of packages as this process has imported them."""

    digest: str
    _files: tuple[Path, ...]
    _states: list[tuple[int, ...]]

    @classmethod
    def read(cls, files: Iterable[tuple[Path, Path]], began: float) -> Sources:
        """Of (folder, file below it). Unknown for one that was written since `began`, seconds since the epoch."""
        pairs, known = list(files), hashlib.sha256()
        paths = tuple(path for _, path in pairs)
        try:
            states = _states(paths)
            for folder, path in pairs:
                for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
                    known.update(hashlib.sha256(part).digest())
        except OSError as error:
            raise Unknown(f"{error.filename} cannot be read") from error
        if any(changed >= began * 1e9 for *_, changed in states):
            raise Unknown("a file was written since this process began, which may have read what it was before")
        return cls(known.hexdigest(), paths, states)

    def unchanged(self) -> bool:
        """Whether the files are still those that were read."""
        try:
            return _states(self._files) == self._states
        except OSError:
            return False


def _states(paths: Collection[Path]) -> list[tuple[int, ...]]:
    """Of the files, and of the links on the way to them: which they are, and when they were written, renamed or linked
    last, in ns, which nothing sets back."""
    folders = {path.parent for path in paths}
    ways = {*paths, *folders, *(above for folder in folders for above in folder.parents)}
    found = [path.stat() for path in paths] + [way.lstat() for way in sorted(ways) if way.is_symlink()]
    return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found]


@functools.cache
def _read() -> dict[str, Sources | Unknown]:
    """By package, those of this process."""
    return {}


def own_digest() -> str:
    """Of mlxcel and of this backend."""
    return _known(" ".join(OWN), lambda: _sources({name: list(files_of(name, ".py")) for name in OWN}))


def foreign_digest(package: str) -> str:
    """Of a third party's top-level package or module, and of all that it imports but what is found by its version.
    Unknown where it cannot be told by reading."""
    return _known(package, lambda: _sources(_with_all_imported(package)))


def all_unchanged() -> bool:
    """Of everything a digest was made of."""
    return all(each.unchanged() for each in list(_read().values()) if isinstance(each, Sources))


def _known(key: str, read: Callable[[], Sources]) -> str:
    """Looked for once, whether it is found or not: it may take a while."""
    if key not in _read():
        try:
            _read()[key] = read()
        except Unknown as why:
            _read()[key] = why
    found = _read()[key]
    if isinstance(found, Unknown):
        raise Unknown(str(found))
    return found.digest


def _with_all_imported(package: str) -> dict[str, list[tuple[Path, Path]]]:
    """By package, (folder, file) of each."""
    found: dict[str, list[tuple[Path, Path]]] = {}
    waiting, size, text = [package], 0, 0
    while waiting:
        name = waiting.pop()
        if name in found or name in _KNOWN:
            continue
        found[name] = list(files_of(name, ""))
        sizes = [(path.suffix == ".py", path.stat().st_size) for _, path in found[name]]
        size += sum(each for _, each in sizes)
        text += sum(each for is_text, each in sizes if is_text)
        if size > _MOST_BYTES or text > _MOST_TEXT:
            raise Unknown(f"{package} imports too much to read it all: {size} bytes with {name}")
        waiting += sorted({each for _, path in found[name] for each in imports_of(path)})
    if not found.get(package):
        raise Unknown(f"{package} is in no file")
    return found


def _sources(found: Mapping[str, list[tuple[Path, Path]]]) -> Sources:
    """Of files that hold all modules that were imported of these packages."""
    pairs = [pair for name in sorted(found) for pair in found[name]]
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in found]
    imported = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    if beside := imported - {path for _, path in pairs}:
        raise Unknown(f"{min(beside)} belongs to no folder of {', '.join(found)}")
    return Sources.read(pairs, process_start() - _CLOSE)


def process_start() -> float:
    """Seconds since the epoch. Unknown where there is no Linux to say it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError) as error:
        raise Unknown("the system does not say when this process began") from error
    return time.time() - age


@functools.cache
def versions() -> tuple[str, ...]:
    """Names and versions of the distributions under us, as their folders are called."""
    found: set[str] = set()
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        found |= {name for name in names if name.endswith(_TOLD_BY) and name.lower().startswith(UNDER_US)}
    return tuple(sorted(found))
