"""Where something is measured: processor, driver, versions, and the commit of this checkout."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

import attrs

_TREE: Final = Path(__file__).parent.parent.parent
_MODULE: Final = Path("/sys/module/nvidia/version")
"""Of the driver's module in the kernel; nvidia-smi tells the same, some tenths of a second later."""
_RUNTIMES: Final = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")


@attrs.frozen
class Source:
    """`commit` is "unknown", and `dirty` None, where neither a build's stamp nor git says."""

    commit: str
    dirty: bool | None


def source() -> Source:
    """The commit that this installation was built from, or that of the checkout it lies in."""
    from mlxcel.version import commit

    if (stamped := commit()) != "unknown":
        return Source(stamped, False)
    found = _said("git", "-C", str(_TREE), "rev-parse", "--short=12", "HEAD")
    if not found:
        return Source("unknown", None)
    return Source(found, bool(_said("git", "-C", str(_TREE), "status", "--porcelain", "--untracked-files=no")))


def machine() -> str:
    """The processor's own name where the system tells it, and how many of its cores this process may use."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def driver() -> str | None:
    """NVIDIA's, None where there is none."""
    with suppress(OSError):
        return _MODULE.read_text().strip()
    lines = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def cuda() -> str | None:
    """Version of CUDA's runtime that is installed as a package, None without one."""
    return next((found for name in _RUNTIMES if (found := package(name)) is not None), None)


def package(name: str) -> str | None:
    """Version of a distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str:
    """What a program prints; "" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
