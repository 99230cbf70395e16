"""Counters of the whole grid: how the blocks of the persistent step wait where words cannot tell (`persistent_words`).

They are semaphores, zeroed before the launch, which only grow: nothing is reset between layers. The first counts blocks
that are ready to begin; the others count the partials of a row and KV head.

What Mosaic makes of them: a signal is `bar.sync` over the 128 threads of the warpgroup and then `red.release.gpu` by
one of them, so that what all of them wrote is released; a wait is `ld.relaxed.gpu` in a loop by one thread, then
`fence.acquire.gpu`, then `bar.sync`. Neither orders the generic proxy (ordinary stores) against the asynchronous one
(bulk copies).

A wait for what never comes has no end and leaves no traceback. In a watched step a wait gives up after `PATIENCE` looks
and notes where it was; what is computed from there on is undefined, but the launch ends.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import plgpu
from mlxcel_jax_cuda.kernels.persistent_watch import PATIENCE, Watch


@attrs.frozen
class Counters:
    """Of one launch, inside the kernel."""

    refs: Any  # semaphores [1 + …]
    active: bool = True  # False leaves all waiting out: for measuring alone, what is computed is then undefined
    watch: Watch | None = None  # of a watched step

    @classmethod
    def of_grid(cls, others: int, *, active: bool = True, watch: Watch | None = None) -> Counters:
        return cls(pl.get_global(plgpu.SemaphoreType.REGULAR((1 + others,))), active, watch)

    def begin_together(self, blocks: int) -> None:
        """What every block wrote before this, all see after it."""
        self._signal(0)
        self._wait(0, blocks)

    def signal(self, other: Any) -> None:
        self._signal(1 + other)

    def wait(self, other: Any, value: Any) -> None:
        self._wait(1 + other, value)

    def _signal(self, index: Any) -> None:
        if self.active:
            plgpu.semaphore_signal(self.refs.at[index], memory_scope="gpu")

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
