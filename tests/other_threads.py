"""Waiting for what another thread, task or process does. A test that waits here goes on when it is so, or fails; on a
slow machine it waits longer, and nothing is proved by how long anything took."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds until a test gives up. On a quiet machine nothing that a test waits for takes a hundredth of it."""


def until(reached: Callable[[], T]) -> T:
    """What `reached` returns once that is true."""
    end = time.monotonic() + PATIENCE
    while not (found := reached()):
        if time.monotonic() > end:
            raise AssertionError(f"it never came to that: {found!r} after {PATIENCE:g} s")
        time.sleep(0.005)
    return found


def comes_to(look: Callable[[], T], expected: T) -> None:
    """`look` returns what is expected, at the latest once all that is on its way has arrived; the last look counts."""
    end = time.monotonic() + PATIENCE
    while (found := look()) != expected and time.monotonic() < end:
        time.sleep(0.005)
    assert found == expected


class Counted(Protocol):
    """An LLM, or what a server has loaded."""

    def stats(self) -> dict[str, Any]: ...


def idle(served: Counted) -> bool:
    """Whether no row and no page is taken; looked at between two ticks, until those that were cancelled have left."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        stats = served.stats()
        kv, scheduler = stats["kv"], stats["scheduler"]
        if (scheduler["rows_busy"], scheduler["num_requests_waiting"], kv["owned"]) == (0, 0, 0):
            return bool(kv["free"] + kv["cached"] == kv["total"])
    return False
