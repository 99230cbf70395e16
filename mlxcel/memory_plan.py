"""Whether a model fits, and how much of its context: the loader admits by it, and `mlxcel inspect` prints it.

Spec V2, V12, V18 to V20. Bytes, positions and rows; nothing is read or allocated here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from mlxcel.core.kv import BLOCK, KVSpec, ceil_block
from mlxcel.errors import CapacityError, MlxcelError, UsageError
from mlxcel.footprint import ITEM_SIZES, Footprint
from mlxcel.host_memory import host_memory
from mlxcel.kv_budget import Budget, Context, choose_context, require_window
from mlxcel.options import DEVICE_SHARE

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.backend import DeviceMemory

HOST_SHARE: Final = 0.5
MARGIN_SHARE: Final = 0.03
MARGIN_LEAST: Final = 512 << 20
"""Of a device, what stays free of plans: a runtime aligns arrays, leaves gaps between them that no large one fits into,
and holds what its libraries ask for."""


@attrs.frozen
class Memory:
    """Where a model is to be. Bytes; `device`: memory of its own, else the host's, which other programs share.

    Of a device `share` of all, as far as it is free, is for weights, workspace, KV and a margin together. Of a host
    `share` of what weights and workspace leave is for the KV.
    """

    total: int
    free: int
    share: float
    device: bool

    @classmethod
    def of_host(cls, total: int, free: int) -> Memory:
        return cls(total, free, HOST_SHARE, device=False)

    @classmethod
    def of_device(cls, total: int, free: int, share: float = DEVICE_SHARE) -> Memory:
        return cls(total, free, share, device=True)

    @property
    def usable(self) -> int:
        """For weights, workspace, KV and margin together."""
        return min(int(self.share * self.total), self.free) if self.device else self.free

    @property
    def words(self) -> str:
        """What `usable` is."""
        if not self.device:
            return f"{self.usable} free in this host's memory"
        if self.usable < int(self.share * self.total):
            return f"{self.usable} of the device's {self.total}, of which others hold the rest"
        return f"{self.usable}, {self.share:g} of the device's {self.total}"

    def margin(self, runtime: int) -> int:
        """What a device keeps for its runtime, which needs `runtime` bytes by the model's shapes (spec V18)."""
        return max(runtime, int(MARGIN_SHARE * self.total), MARGIN_LEAST) if self.device else 0

    def kv_budget(self, taken: int) -> int:
        """What is for the KV where nobody says, beside `taken` bytes of weights, workspace and margin. Below 0: they
        are too many (spec V18)."""
        left = self.usable - taken
        return left if self.device or left < 0 else int(self.share * left)


def storage_name(config: EngineConfig, rows: int) -> str:
    """The KV store that is asked for; `auto` is dense for one row and paged above (spec D31)."""
    if config.kv_storage != "auto":
        return config.kv_storage
    return "dense" if rows == 1 else "paged"


@attrs.frozen
class MemorySettings:
    """What of an engine's settings decides about memory."""

    asked: int  # positions a row; 0: the model's own, or what fits
    chunk: int  # most tokens of a piece
    rows: int  # open at once
    kv_budget: int | None  # bytes; None: `Memory.kv_budget`
    dtype: str  # of the computation
    paged: bool = False  # rows share one pool, else each has room for N positions
    device_share: float = DEVICE_SHARE  # of a device's memory
    copies: int = 0  # most bytes of rings that a prompt cache copies beside the KV, of which it takes a quarter at most

    @classmethod
    def of(cls, config: EngineConfig, *, rows: int, dtype: str) -> MemorySettings:
        paged = storage_name(config, rows) == "paged"
        share = config.gpu_memory_utilization
        return cls(config.max_model_len, config.prefill_chunk, rows, config.kv_cache_budget, dtype, paged, share)


@attrs.frozen
class MemoryPlan:
    """The answer for one model, one memory and one set of settings.

    Either `context` is N, or `refusal` says with the numbers why the model cannot run so.
    """

    settings: MemorySettings
    memory: Memory | None
    kv: KVSpec
    window: int
    weights: int  # bytes
    workspace: int  # bytes
    margin: int  # bytes that a device keeps for its runtime
    budget: Budget
    context: Context | None
    refusal: MlxcelError | None

    def admitted(self) -> Context:
        """N, or the refusal raised."""
        if self.context is None:
            raise self.refusal or AssertionError("a plan has a context or a refusal")
        return self.context

    @property
    def wanted(self) -> int:
        """Positions of a row at full context, whether they fit or not."""
        return self.settings.asked or self.window

    @property
    def position_bytes(self) -> int:
        """Of one position in the pages (spec V2, for a page of one)."""
        return self.kv.bytes_per_position(ITEM_SIZES[self.settings.dtype])

    def row_bytes(self, context: int) -> int:
        """Of rings and recurrent state that a row of at most `context` positions owns beside its pages (spec V12)."""
        itemsize = ITEM_SIZES[self.settings.dtype]
        return self.kv.bytes_per_row(itemsize, context=context, chunk=self.settings.chunk)

    def kv_bytes(self, positions: int) -> int:
        """Of all KV where a row may take so many positions: every row's own state, and pages for each row, or with a
        shared pool for one."""
        full = 1 if self.settings.paged else self.settings.rows
        return full * positions * self.position_bytes + self.settings.rows * self.row_bytes(positions)

    @property
    def full_row_bytes(self) -> int:
        """Of all KV of a row that takes all `wanted` positions."""
        return ceil_block(self.wanted) * self.position_bytes + self.row_bytes(self.wanted)

    @property
    def needed(self) -> int:
        """Bytes of weights, workspace, margin and the KV of the context there is; else of the one that is wanted."""
        positions = self.wanted if self.context is None else self.context.positions
        return self.weights + self.workspace + self.margin + self.kv_bytes(ceil_block(positions))

    def pages(self, page_size: int) -> int | None:
        """Of so many positions that the budget holds beside every row's own state (spec V19); None: as many as you
        like, since no layer keeps its positions in pages."""
        if not self.position_bytes:
            return None
        bound = self.context.positions if self.context is not None else self.wanted
        left = self.budget.bytes - self.settings.rows * self.row_bytes(bound)
        return max(0, left // (page_size * self.position_bytes))

    @property
    def tokens(self) -> int | None:
        """That fit in all, in whole blocks of 128; None as in `pages`."""
        pages = self.pages(BLOCK)
        return None if pages is None else pages * BLOCK

    @property
    def tokens_per_row(self) -> int:
        """When every row has as much as the others."""
        pages = self.pages(BLOCK)
        if pages is None:
            return 0 if self.context is None else self.context.positions
        return min(self.wanted, pages // self.settings.rows * BLOCK)

    @property
    def rows_at_full_context(self) -> int:
        """Rows that fit where each takes all `wanted` positions."""
        return self.budget.bytes // self.full_row_bytes if self.full_row_bytes else self.settings.rows


def memory_here(settings: MemorySettings, device: DeviceMemory | None) -> Memory | None:
    """The device's, or without one the host's. UsageError when that cannot be read and no budget is given; with one it
    may stay unknown."""
    if device is not None:
        return Memory.of_device(device.total, device.free, settings.device_share)
    try:
        found = host_memory()
    except UsageError:
        if settings.kv_budget is None:
            raise
        return None
    return Memory.of_host(found.total, found.free)


def plan_memory(
    model: Footprint,
    settings: MemorySettings,
    memory: Memory | None,
    *,
    weights: int | None = None,
    workspace: int | None = None,
    kv_most: int | None = None,
) -> MemoryPlan:
    """Weights, workspace and KV of `model` in `memory`; without one, in the budget that was asked for alone.

    `weights` and `workspace` are bytes that were measured, in place of those by the shapes. Of a budget that nobody
    asked for `kv_most` bytes are taken at most. One that was asked for is taken as it is, with no margin. UsageError
    when more positions are asked for than the model was made for: no memory helps there.
    """
    require_window(settings.asked, model.window)
    wanted = settings.asked or model.window
    if weights is None:
        weights = model.weight_bytes(settings.dtype)
    if workspace is None:
        workspace = model.workspace_bytes(settings.dtype, context=wanted, chunk=settings.chunk, rows=settings.rows)
    explicit = settings.kv_budget is not None
    margin = 0 if memory is None or explicit else memory.margin(model.runtime_bytes)
    left = 0 if memory is None else memory.kv_budget(weights + workspace + margin)
    copies = min(settings.copies, max(0, left) // 5) if memory is not None and memory.device and not explicit else 0
    left -= copies
    bounded = left if kv_most is None else min(left, kv_most)
    budget = Budget(max(0, bounded) if settings.kv_budget is None else settings.kv_budget, explicit=explicit)
    if memory is not None and memory.device and not explicit:
        taken = f"{weights} bytes of weights, {workspace} of workspace and {margin} of margin for the runtime"
        taken += f", and {copies} for the prompt cache's copies of windows" if copies else ""
        fewer = "" if bounded == left else f", of which {bounded} were to be had"
        budget = attrs.evolve(budget, origin=f" (of {memory.words}, less {taken}{fewer})", raise_by=_RAISE_SHARE)
    plan = MemoryPlan(settings, memory, model.kv, model.window, weights, workspace, margin, budget, None, None)
    if memory is not None and left < 0:
        return attrs.evolve(plan, refusal=_too_large(plan, memory))
    try:
        return attrs.evolve(plan, context=choose_context(settings.asked, model.window, budget, plan.kv_bytes))
    except (UsageError, CapacityError) as error:
        return attrs.evolve(plan, refusal=error)


_RAISE_SHARE: Final = "raise --gpu-memory-utilization, or lower --prefill-chunk, which takes workspace"


def _too_large(plan: MemoryPlan, memory: Memory) -> CapacityError:
    more = "a larger --gpu-memory-utilization" if memory.device and memory.share < 1 else "more memory"
    workspace = f"{plan.workspace} bytes of workspace"
    if plan.margin:
        workspace += f" and {plan.margin} of margin for the runtime"
    return CapacityError(
        f"the model does not fit: {plan.weights} bytes of weights as {plan.settings.dtype} and {workspace}, "
        f"and the memory for them is {memory.words}: no token of KV fits beside them",
        hint=f"a smaller --prefill-chunk takes less workspace; else take a smaller model, or {more}",
    )
