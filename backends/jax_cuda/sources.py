"""What programs are made by: our own sources, those of third parties, and the packages under them. Digests of it,
certain or none."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import attrs

OWN: Final = ("mlxcel", "mlxcel_jax_cuda")
"""The packages whose sources are part of what every program is found by."""

UNDER_US: Final = ("jax", "nvidia", "numpy", "ml_dtypes", "attrs", "flax", "opt_einsum", "scipy")
"""Names of distributions begin so that tracing, compiling and running go by, in their versions."""

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

_HIDDEN: Final = ("import_module", "__import__", "exec", "run_path", "run_module")
"""Names by which code is run that nobody finds by reading."""

_MOST_BYTES: Final = 64 << 20
"""Of a third party's files."""

_CLOSE: Final = 0.02
"""Seconds. Both times are kept in steps of a hundredth or less, and are never ahead."""


class Unknown(Exception):
    """Why it cannot be told what code comes from."""


@attrs.frozen
class Sources:
    """The files of packages as this process has imported them."""

    digest: str
    _files: tuple[Path, ...]
    _began: float

    @classmethod
    def read(cls, files: Iterable[tuple[Path, Path]], began: float) -> Sources:
        """Of (folder, file below it). Unknown for one that was written since `began`, seconds since the epoch."""
        known, paths = hashlib.sha256(), []
        try:
            for folder, path in files:
                paths.append(path)
                for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
                    known.update(hashlib.sha256(part).digest())
        except OSError as error:
            raise Unknown(f"{error.filename} cannot be read") from error
        sources = cls(known.hexdigest(), tuple(paths), began)
        if not sources.unchanged():
            raise Unknown("a file was written since this process began, which may have read what it was before")
        return sources

    def unchanged(self) -> bool:
        """Whether the files are still those that this process imports. Nothing sets the time back that counts here,
        when a file was last written, renamed or linked."""
        try:
            return all(path.stat().st_ctime < self._began for path in self._files)
        except OSError:
            return False


@functools.cache
def _read() -> dict[str, Sources]:
    """By package, those of this process."""
    return {}


def own_digest() -> str:
    """Of mlxcel and of this backend."""
    return _digest(" ".join(OWN), (pair for name in OWN for pair in _files(name, "*.py")), OWN)


def foreign_digest(package: str) -> str:
    """Of a third party's top-level package or module, and of all that it imports but what is found by its version.
    Unknown where it cannot be told by reading."""
    if package not in _read():
        found: dict[str, list[tuple[Path, Path]]] = {}
        waiting = [package]
        while waiting:
            name = waiting.pop()
            if name not in found and name not in _KNOWN:
                found[name] = list(_files(name, "*"))
                waiting += sorted({each for _, path in found[name] for each in _imports(path)})
        pairs = [pair for name in sorted(found) for pair in found[name]]
        if sum(path.stat().st_size for _, path in pairs) > _MOST_BYTES:
            raise Unknown(f"the files of {package} are more than {_MOST_BYTES} bytes")
        return _digest(package, pairs, tuple(found))
    return _read()[package].digest


def all_unchanged() -> bool:
    """Of everything a digest was made of."""
    return all(sources.unchanged() for sources in _read().values())


def _digest(key: str, files: Iterable[tuple[Path, Path]], packages: tuple[str, ...]) -> str:
    """Of files that hold all modules that were imported of these packages."""
    if key not in _read():
        listed = list(files)
        beside = _imported(packages) - {path for _, path in listed}
        if beside:
            raise Unknown(f"{min(beside)} belongs to no folder of {key}")
        _read()[key] = Sources.read(listed, process_start() - _CLOSE)
    return _read()[key].digest


def _imported(packages: tuple[str, ...]) -> set[Path]:
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in packages]
    return {Path(file) for module in ours if (file := getattr(module, "__file__", None))}


def _files(name: str, pattern: str) -> Iterator[tuple[Path, Path]]:
    """(folder, file) of a package or a module; none of what is not there."""
    module = sys.modules.get(name)
    try:
        spec = None if module is not None else find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if module is None and spec is None:
        return
    folders = getattr(module, "__path__", None) if spec is None else spec.submodule_search_locations
    if folders is None:
        file = getattr(module, "__file__", None) if spec is None else spec.origin
        if file is None:
            raise Unknown(f"{name} is in no file")
        yield Path(file).parent, Path(file)
        return
    for folder in map(Path, folders):
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                yield folder, path


def _imports(path: Path) -> Iterator[str]:
    """Top-level names that a file imports, wherever in it."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise Unknown(f"{path} cannot be read: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
        named = getattr(node, "id", None) or getattr(node, "attr", None)
        if named in _HIDDEN or (isinstance(node, ast.Name) and node.id == "eval"):
            raise Unknown(f"{path} runs code by {named}")


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
        found |= {name for name in names if name.endswith(".dist-info") and name.lower().startswith(UNDER_US)}
    return tuple(sorted(found))
