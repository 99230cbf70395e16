"""What programs are made by: our own sources, and the packages under them. Digests of it, certain or none."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import attrs

from mlxcel_jax_cuda.fingerprint import OWN

UNDER_US: Final = ("jax", "nvidia", "numpy", "ml_dtypes", "attrs", "flax", "opt_einsum", "scipy")
"""Names of distributions begin so that tracing, compiling and running go by."""

_CLOSE: Final = 0.1
"""Seconds. File systems keep times in steps of a hundredth."""


@attrs.frozen
class Sources:
    """The files of packages as this process has imported them."""

    digest: str
    _files: tuple[Path, ...]
    _began: float

    def unchanged(self) -> bool:
        """Whether the files are still those that this process imports."""
        return all(_since(path) < self._began for path in self._files)


@functools.cache
def own_sources() -> Sources | None:
    """Those of mlxcel and of this backend. None where it cannot be said that what was imported is what the files hold:
    one of them is younger than this process, or a module comes from elsewhere."""
    began = _process_start()
    if began is None:
        return None
    return read_sources(tuple(folder for name in OWN for folder in _folders(name)), began - _CLOSE)


def read_sources(folders: tuple[Path, ...], began: float) -> Sources | None:
    """The .py files of packages, by their names below each folder. None for one that changed since `began`, seconds
    since the epoch, or where a module of ours is none of them."""
    known, files = hashlib.sha256(), []
    try:
        for folder in folders:
            for path in sorted(folder.rglob("*.py")):
                files.append(path)
                for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
                    known.update(hashlib.sha256(part).digest())
            known.update(hashlib.sha256(b"").digest())
        sources = Sources(known.hexdigest(), tuple(files), began)
        return sources if sources.unchanged() and _imported() <= set(files) else None
    except OSError:
        return None


def _imported() -> set[Path]:
    """The files of our modules that are there."""
    ours = (module for name, module in sys.modules.items() if name.partition(".")[0] in OWN)
    return {Path(file) for module in ours if (file := getattr(module, "__file__", None))}


def _folders(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(folder)


def _since(path: Path) -> float:
    """When a file was last written, renamed or linked: nothing sets that time back."""
    return path.stat().st_ctime


def _process_start() -> float | None:
    """Seconds since the epoch. None where there is no Linux to say it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - age if age > 0 else None


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
