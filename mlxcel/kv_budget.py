"""How many positions a row may take: what the model, the user and the memory allow (spec V18 to V20)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import attrs

from mlxcel.core.kv import BLOCK, ceil_block
from mlxcel.errors import CapacityError, UsageError


@attrs.frozen
class Budget:
    """Bytes for the KV, and whether somebody asked for just these; words for messages: where else they are from, and
    what makes them more."""

    bytes: int
    explicit: bool
    origin: str = ""
    raise_by: str = "raise --kv-cache-budget"


@attrs.frozen
class Context:
    """N, and why it is less than the model's window although nobody asked for less, or None."""

    positions: int
    lowered: str | None = None


def require_window(asked: int, window: int) -> None:
    """UsageError when more positions are asked for than the model was made for."""
    if asked > window:
        raise UsageError(
            f"--ctx-size {asked} is above the model's own window of {window} positions",
            hint=f"ask for {window} or less, or leave --ctx-size out",
        )


def choose_context(asked: int, window: int, budget: Budget, kv_bytes: Callable[[int], int]) -> Context:
    """N: what was asked for, else the model's own `window`, else what fits. `asked` 0 leaves it open.

    `kv_bytes` gives the bytes of all KV at a bound of that many positions a row; it never falls. Storage comes in whole
    blocks of 128. UsageError when what was asked is above the window or does not fit, naming the largest that does.
    """
    require_window(asked, window)
    wanted = asked or window
    needed = kv_bytes(ceil_block(wanted))
    if needed <= budget.bytes:
        return Context(wanted)
    numbers = f"{needed} bytes for {wanted} positions, {budget.bytes} bytes of KV budget{budget.origin}"
    fitting = BLOCK * bisect_right(range(ceil_block(wanted) // BLOCK), budget.bytes, key=lambda n: kv_bytes(n * BLOCK))
    fitting -= BLOCK  # the first that does not fit, less one block
    if fitting <= 0:
        kind = UsageError if budget.explicit else CapacityError
        raise kind(
            f"the KV budget does not hold {BLOCK} positions, the least there can be: {numbers}",
            hint=budget.raise_by if budget.origin else f"--kv-cache-budget {kv_bytes(BLOCK)} or more",
        )
    if asked:
        raise UsageError(
            f"--ctx-size {asked} does not fit: {numbers}",
            hint=f"the largest that fits is --ctx-size {fitting}; or {budget.raise_by}",
        )
    return Context(fitting, f"the context is {fitting} positions instead of the model's {window}: {numbers}")
