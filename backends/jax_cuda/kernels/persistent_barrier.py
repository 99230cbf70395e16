"""How the blocks of the persistent step begin: no words are looked for before all are forgotten.

A semaphore of the whole grid, zeroed before the launch. What Mosaic makes of it: a signal is `red.release.gpu` by one
thread, behind a `bar.sync` over the 128 of the warpgroup, so that what all of them wrote is released; a wait is
`ld.relaxed.gpu` in a loop by one thread, then `fence.acquire.gpu`, then `bar.sync`.

A wait for what never comes has no end and leaves no traceback. In a watched step a wait gives up after `PATIENCE` looks
and notes where it was; what is computed from there on is undefined, but the launch ends.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.mosaic import plgpu
from mlxcel_jax_cuda.kernels.persistent_watch import PATIENCE, Watch


@attrs.frozen
class Together:
    """Of one launch, inside the kernel. All blocks must be resident, or they wait without an end."""

    here: Any  # a semaphore, or with `counted` int32 [1] in device memory, of 0: blocks that have come
    blocks: int
    active: bool = True  # False leaves the waiting out: for measuring alone, what is computed is then undefined
    watch: Watch | None = None  # of a watched step
    counted: bool = False

    @classmethod
    def of_grid(
        cls, blocks: int, *, active: bool = True, watch: Watch | None = None, here: Any | None = None
    ) -> Together:
        """`here`: where to count, of a step that is not watched. Without it a semaphore, which XLA zeroes by a launch
        of its own."""
        if here is not None:
            return cls(here, blocks, active, None, counted=True)
        return cls(pl.get_global(plgpu.SemaphoreType.REGULAR), blocks, active, watch)

    def wait(self) -> None:
        """What every block wrote before this, all see after it."""
        if not self.active:
            return
        ptx.meet()  # all of them have written: one signals
        if self.counted:
            ptx.come_together(self.here, self.blocks)
            return
        plgpu.semaphore_signal(self.here, memory_scope="gpu")
        if self.watch is None:
            plgpu.semaphore_wait(self.here, value=self.blocks, decrement=False, memory_scope="gpu")
            return

        def not_yet(looks: Any) -> Any:
            return (pl.semaphore_read(self.here) < self.blocks) & (looks < PATIENCE)

        looks = lax.while_loop(not_yet, lambda looks: looks + 1, jnp.int32(0))
        pl.when(looks == PATIENCE)(self.watch.given_up)
        plgpu.commit_smem()  # the threads of the warpgroup go on together
