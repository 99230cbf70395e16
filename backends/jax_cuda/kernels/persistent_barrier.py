"""How the blocks of the persistent step wait for one another.

All counters are semaphores of the whole grid, zeroed before the launch, which only grow: nothing is reset between
phases. One counts the results of the whole step, phase after phase; a phase may begin when all results of those before
it are there. The others count what a single result waits for: the parts of a row tile, the partials of a row and head.

What Mosaic makes of them: a signal is `bar.sync` over the 128 threads of the warpgroup and then `red.release.gpu` by
one of them, so that what all of them wrote is released; a wait is `ld.relaxed.gpu` in a loop by one thread, then
`fence.acquire.gpu`, then `bar.sync`. Neither orders the generic proxy (ordinary stores) against the asynchronous one
(bulk copies): `bulk_reads_follow` does.

A wait for what never comes has no end and leaves no traceback. In a watched step a wait gives up after `PATIENCE` looks
and notes where it was; what is computed from there on is undefined, but the launch ends.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxlib.mlir.dialects import nvvm

from mlxcel_jax_cuda.kernels.mosaic import plgpu
from mlxcel_jax_cuda.kernels.persistent_watch import Watch

PATIENCE = 100_000
"""About a tenth of a second."""


@attrs.frozen
class Counters:
    """Of one launch, inside the kernel."""

    refs: Any  # semaphores [1 + …]; the first counts results
    active: bool = True  # False leaves all waiting out: for measuring alone, what is computed is then undefined
    watch: Watch | None = None  # of a watched step

    @classmethod
    def of_grid(cls, others: int, *, active: bool = True, watch: Watch | None = None) -> Counters:
        return cls(pl.get_global(plgpu.SemaphoreType.REGULAR((1 + others,))), active, watch)

    def result_is_there(self, results: int = 1) -> None:
        """This block has written so many results of the phase. Bulk copies must have been waited for."""
        self._signal(0, results)

    def wait_for_results(self, results: Any) -> None:
        """All of so many since the launch began. Bulk reads may follow."""
        self._wait(0, results)
        bulk_reads_follow()

    def signal(self, other: Any) -> None:
        self._signal(1 + other, 1)

    def wait(self, other: Any, value: Any) -> None:
        self._wait(1 + other, value)

    def _signal(self, index: Any, by: int) -> None:
        if self.active:
            plgpu.semaphore_signal(self.refs.at[index], by, memory_scope="gpu")

    def _wait(self, index: Any, value: Any) -> None:
        if self.active and self.watch is not None:
            self._wait_a_while(self.watch, self.refs.at[index], value)
        elif self.active:
            plgpu.semaphore_wait(self.refs.at[index], value=value, decrement=False, memory_scope="gpu")

    def _wait_a_while(self, watch: Watch, counter: Any, value: Any) -> None:
        def not_yet(looks: Any) -> Any:
            return (pl.semaphore_read(counter) < value) & (looks < PATIENCE)

        looks = lax.while_loop(not_yet, lambda looks: looks + 1, jnp.int32(0))
        pl.when(looks == PATIENCE)(watch.given_up)
        plgpu.commit_smem()  # the threads of the warpgroup go on together


def bulk_reads_follow() -> None:
    """What this thread knows to be written by ordinary stores may be read by bulk copies that it starts after this."""

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def fence(_context: Any) -> None:
        nvvm.fence_proxy(nvvm.ProxyKind.async_)

    fence()
