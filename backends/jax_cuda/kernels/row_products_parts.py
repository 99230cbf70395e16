"""The parts of a row product's depth, one after the other, for the kernels that hold tiles of many tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mlxcel_jax_cuda.kernels.mosaic import WGMMA, load, plgpu, store

Sums = list[jax.Array]

RUN = 32
"""Columns of a sum that are kept and ended together."""


def sums_of_parts(
    split: int,
    steps: int,
    accumulators: list[Any],
    multiply: Callable[[Any, tuple[Any, ...]], None],
    release: Callable[[Any], None],
    prepare: Callable[[], Any],
) -> tuple[Sums, Any]:
    """The sums of `split` equal parts of `steps` steps, added in index order, and what `prepare` loaded.

    `multiply` puts a step's products under way, one to an accumulator; `release` gives its place in the ring back. A
    part's last products and its addition are beside the first products of the next one, so that nothing stands still
    between them. `prepare` is called ahead of the last part's products, which hide its loads.
    """
    part = steps // split

    def of_part(i: int, total: Sums, before: tuple[Any, ...]) -> tuple[Sums, Any]:
        """Parts i, i + 1, … and `total`, to which the sums `before` of the last part, under way, are still to come."""
        first, last = i * part, i == split - 1

        def scope(*sums: Any) -> tuple[Sums, Any]:
            multiply(first, sums)
            so_far = total
            if before:
                made = [plgpu.wgmma_accumulator_load(acc, wait_n=len(sums)) for acc in before]
                release(first - 1)
                # Not later: registers would not suffice for the sums of all parts.
                so_far = [lax.optimization_barrier(x) for x in added(total, made)]  # type: ignore[no-untyped-call]
            ready = prepare() if last else None
            _go_on(first, part, sums, multiply, release)
            if not last:
                return of_part(i + 1, so_far, sums)
            plgpu.wgmma_wait(0)
            release(first + part - 1)
            return added(so_far, [acc[...] for acc in sums]), ready

        found: tuple[Sums, Any] = pl.run_scoped(scope, *accumulators)
        return found

    return of_part(0, [], ())


def _go_on(
    first: Any,
    part: int,
    sums: tuple[Any, ...],
    multiply: Callable[[Any, tuple[Any, ...]], None],
    release: Callable[[Any], None],
) -> None:
    """The steps of a part behind its first, which is under way; then the last one is."""

    def step(k: Any, carry: Any) -> Any:
        multiply(first + k, sums)
        plgpu.wgmma_wait(len(sums))  # the step before has been read
        release(first + k - 1)
        return carry

    lax.fori_loop(1, part, step, 0)


def added(total: Sums, more: Iterable[jax.Array]) -> Sums:
    """Of the parts of a depth those so far, if there are any, and the next."""
    return [a + b for a, b in zip(total, more, strict=True)] if total else list(more)


def added_in_order(split: int, part: Callable[[int], Iterable[jax.Array]]) -> Sums:
    """The sums of parts that are there, each [64, N]: `part` gives those of the i-th one by one, as they are added."""
    total = list(part(0))
    for i in range(1, split):
        total = added(total, part(i))
    return total


def sums_with_room(
    split: int,
    steps: int,
    accumulators: list[Any],
    multiply: Callable[[Any, tuple[Any, ...]], None],
    release: Callable[[Any], None],
    room: Any,
) -> Callable[[int], Sums]:
    """As `sums_of_parts`, for accumulators beside which registers do not hold the sums so far: the last runs of those
    are in `room`, shared memory of the warpgroup, [runs, 64, RUN] float32. Gives a function of i, the sums of the i-th
    RUN columns of every accumulator.

    The parts are the turns of a loop: written out one behind the other, ptxas finds no registers for what is kept.
    """
    part, (kept_away, _, _) = steps // split, room.shape
    width = accumulators[0].shape[1]
    runs = [(which, slice(i, i + RUN)) for i in range(0, width, RUN) for which in range(len(accumulators))]
    kept = len(runs) - kept_away

    def of_part(i: Any, total: Sums) -> Sums:
        first = i * part

        def scope(*sums: Any) -> Sums:
            multiply(first, sums)
            _go_on(first, part, sums, multiply, release)
            plgpu.wgmma_wait(0)
            release(first + part - 1)
            return [acc[...] for acc in sums]

        whole: Sums = pl.run_scoped(scope, *accumulators)
        made = [whole[which][:, columns] for which, columns in runs]
        for place, more in enumerate(made[kept:]):
            store(room.at[place], jnp.where(i == 0, more, load(room.at[place]) + more))
        return [jnp.where(i == 0, more, so_far + more) for so_far, more in zip(total, made, strict=False)]

    none = plgpu.layout_cast(jnp.zeros((accumulators[0].shape[0], RUN), jnp.float32), WGMMA)
    total: Sums = lax.fori_loop(0, split, of_part, [none] * kept)

    def sums_of(i: int) -> Sums:
        own = range(i * len(accumulators), (i + 1) * len(accumulators))
        return [total[n] if n < kept else load(room.at[n - kept]) for n in own]

    return sums_of
