"""The parts of a row product's depth, one after the other, for the kernels that hold tiles of many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import plgpu

Sums = list[jax.Array]


def sums_of_parts(
    split: int,
    steps: int,
    accumulators: list[Any],
    multiply: Callable[[Any, tuple[Any, ...]], None],
    release: Callable[[Any], None],
    prepare: Callable[[], Any],
) -> tuple[Sums, Any]:
    """The sums of `split` equal parts of `steps` steps, added in index order, and what `prepare` loaded.

    `multiply` puts a step's products under way, one to an accumulator; `release` gives its place in the ring back.
    `prepare` is called ahead of all products, which hide its loads.
    """
    ready, part = prepare(), steps // split

    def of_part(first: Any) -> Sums:
        def scope(*sums: Any) -> Sums:
            def step(k: Any, carry: Any) -> Any:
                multiply(first + k, sums)
                plgpu.wgmma_wait(len(sums))  # the step before has been read
                release(first + k - 1)
                return carry

            multiply(first, sums)
            lax.fori_loop(1, part, step, 0)
            plgpu.wgmma_wait(0)
            release(first + part - 1)
            return [acc[...] for acc in sums]

        found: Sums = pl.run_scoped(scope, *accumulators)
        return found

    def add_part(i: Any, total: Sums) -> Sums:
        return [a + b for a, b in zip(total, of_part(i * part), strict=True)]

    return lax.fori_loop(1, split, add_part, of_part(0)), ready
