"""How much memory there is for this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import attrs

from mlxcel.errors import UsageError

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@attrs.frozen
class HostMemory:
    """Bytes in all, and those that this process may still take: of the machine, or of its control group."""

    total: int
    free: int


def host_memory() -> HostMemory:
    """The machine's memory or its control group's, whichever leaves less. UsageError where neither can be read."""
    found = [memory for memory in (_from_meminfo(), _from_cgroup()) if memory is not None] or _from_sysconf()
    if not found:
        raise UsageError("the memory of this host cannot be read", hint="say --kv-cache-budget, such as 1G")
    return min(found, key=lambda memory: memory.free)


def _from_meminfo() -> HostMemory | None:
    try:
        lines = [line.split() for line in _MEMINFO.read_text().splitlines()]
    except OSError:
        return None
    kilobytes = {line[0]: int(line[1]) for line in lines if line[:1] in (["MemTotal:"], ["MemAvailable:"])}
    if len(kilobytes) < 2:
        return None
    return HostMemory(kilobytes["MemTotal:"] * 1024, kilobytes["MemAvailable:"] * 1024)


def _from_cgroup() -> HostMemory | None:
    """Pages of files that nothing has used lately count as free, as in MemAvailable: a checkpoint that was just written
    would fill the group otherwise."""
    try:
        most, used = (_CGROUP / "memory.max").read_text().strip(), int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if most == "max":
        return None
    return HostMemory(int(most), max(0, int(most) - used + int(statistics.get("inactive_file", 0))))


def _from_sysconf() -> list[HostMemory]:
    """Where there is no /proc: all of the machine's memory."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return []
    return [HostMemory(total, total)]
