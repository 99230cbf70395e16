"""An engine with the KV that the device really gives: less than was planned, where that is not to be had (spec V18)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Final

from mlxcel.core.engine import Engine
from mlxcel.core.kv import KVStore
from mlxcel.errors import CapacityError
from mlxcel.memory_plan import MemoryPlan

log = logging.getLogger("mlxcel.load")

TIMES: Final = 3
LESS: Final = 0.9


def start_with_kv(
    plan: MemoryPlan,
    store: Callable[[MemoryPlan], KVStore],
    start: Callable[[MemoryPlan, KVStore], Engine],
    again: Callable[[int], MemoryPlan],
) -> tuple[MemoryPlan, KVStore, Engine]:
    """An engine by `start`, its store and its plan. Where the device does not give the memory of the KV, `again` plans
    with so many bytes at most: LESS of what was asked for, TIMES times. CapacityError when the last is too much too, or
    the first of a budget that somebody asked for; and as `MemoryPlan.admitted` where nothing fits into less."""
    for _ in range(TIMES):
        kv = store(plan)
        try:
            return plan, kv, start(plan, kv)
        except CapacityError as error:
            if plan.budget.explicit:
                raise
            reason = error.message
        # Behind the handler: an exception holds what was made before it, and those of JAX hold themselves too.
        gc.collect()
        asked = kv_bytes(plan, kv)
        most = int(LESS * asked)
        log.warning("%s. %d bytes were asked for; now %d are, a tenth less", reason, asked, most)
        plan = again(most)
        plan.admitted()
    kv = store(plan)
    return plan, kv, start(plan, kv)


def kv_bytes(plan: MemoryPlan, kv: KVStore) -> int:
    """Of the arrays of a store: its pages, and what every row owns beside them."""
    rows = plan.settings.rows * plan.row_bytes(plan.admitted().positions)
    return kv.num_pages * kv.page_size * plan.position_bytes + rows
