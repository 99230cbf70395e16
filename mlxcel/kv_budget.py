"""How many positions a row may take: what the model, the user and the memory allow (spec V18 to V20)."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from mlxcel.core.kv import BLOCK, ceil_block
from mlxcel.errors import CapacityError, UsageError

ITEM_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@attrs.frozen
class Budget:
    """Bytes for the KV, and whether somebody asked for just these."""

    bytes: int
    explicit: bool


@attrs.frozen
class Context:
    """N, and why it is less than the model's window although nobody asked for less, or None."""

    positions: int
    lowered: str | None = None


def kv_budget(asked: int | None) -> Budget:
    """The bytes that were asked for, else half of the host memory that is available now."""
    return Budget(available_memory() // 2, explicit=False) if asked is None else Budget(asked, explicit=True)


def choose_context(asked: int, window: int, budget: Budget, kv_bytes: Callable[[int], int]) -> Context:
    """N: what was asked for, else the model's own `window`, else what fits. `asked` 0 leaves it open.

    `kv_bytes` gives the bytes of all KV at a bound of that many positions a row; it never falls. Storage comes in whole
    blocks of 128. UsageError when what was asked is above the window or does not fit, naming the largest that does.
    """
    if asked > window:
        raise UsageError(
            f"--ctx-size {asked} is above the model's own window of {window} positions",
            hint=f"ask for {window} or less, or leave --ctx-size out",
        )
    wanted = asked or window
    needed = kv_bytes(ceil_block(wanted))
    if needed <= budget.bytes:
        return Context(wanted)
    numbers = f"{needed} bytes for {wanted} positions, {budget.bytes} bytes of KV budget"
    fitting = BLOCK * bisect_right(range(ceil_block(wanted) // BLOCK), budget.bytes, key=lambda n: kv_bytes(n * BLOCK))
    fitting -= BLOCK  # the first that does not fit, less one block
    if fitting <= 0:
        kind = UsageError if budget.explicit else CapacityError
        raise kind(
            f"the KV budget does not hold {BLOCK} positions, the least there can be: {numbers}",
            hint=f"--kv-cache-budget {kv_bytes(BLOCK)} or more",
        )
    if asked:
        raise UsageError(
            f"--ctx-size {asked} does not fit: {numbers}",
            hint=f"the largest that fits is --ctx-size {fitting}; or raise --kv-cache-budget",
        )
    return Context(fitting, f"the context is {fitting} positions instead of the model's {window}: {numbers}")


def available_memory() -> int:
    """Bytes that this process may still take: the host's, or what its control group leaves, whichever is less."""
    found = [value for value in (_from_meminfo(), _from_cgroup(), _from_sysconf()) if value is not None]
    if not found:
        raise UsageError("the memory of this host cannot be read", hint="say --kv-cache-budget, such as 1G")
    return max(0, min(found))


def _from_meminfo() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    values = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(values[0][1]) * 1024 if values else None


def _from_cgroup() -> int | None:
    try:
        most, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
    except OSError:
        return None
    return None if most == "max" else int(most) - int(used)


def _from_sysconf() -> int | None:
    """Where there is no /proc: all of the machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
