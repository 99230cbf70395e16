"""What a grid barrier costs while the weights go on streaming, and what it costs when they stop.

A persistent kernel reads the packed weights of a decoder's layers, phase by phase, multiplies every tile by the same
eight tokens, and puts a grid barrier behind each phase. In the hidden form the memory warpgroup does not take part in
the barrier: it goes on filling the ring with the next phase's tiles. In the exposed form it waits like the others.
Every form computes the same numbers. Nothing a phase reads depends on another block, except through `tokens`: then
each phase begins by reading its tokens from device memory, behind the barrier, as a real step has to.

    python barrier_stream.py     # microseconds for each form and window, bits against the form without barriers
"""

import functools

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mlxcel_jax_cuda.kernels.mosaic import LANE, TILE, TILED, store
from mlxcel_jax_cuda.kernels.row_products_sweep import draw, timed
from mlxcel_jax_cuda.kernels.row_products_weight import STEP

COLUMNS = 8
RING_TILES = 22  # of 8 KiB


@attrs.frozen
class Phases:
    """steps: ring steps of [128, 64] bf16 that each block reads in each phase of a layer."""

    steps: tuple[int, ...] = (6, 4, 32, 16)  # llama-3.2-1b over 128 blocks: qkv, o, gate and up, down
    blocks: int = 128
    layers: int = 16

    @property
    def barriers(self):
        return len(self.steps) * self.layers

    @property
    def rows(self):  # of the packed weights
        return self.layers * sum(self.steps) * self.blocks * STEP


@attrs.frozen
class Window:
    """Ring slots asked for and not yet here, at most. The ring holds more: what has come waits there for the end of a
    barrier. What has not come makes everything else that goes to memory wait, the barrier's own messages first."""

    wide: int = 3
    narrow: int = 2  # while the first `steps` of a phase are asked for: the other warpgroup is at the barrier then
    steps: int = 4


@functools.partial(jax.jit, static_argnames=("phases", "barrier", "tokens", "tiles_a_slot", "window"))
def walk(tiles, x, *, phases=Phases(), barrier="hidden", tokens=True, tiles_a_slot=2, window=Window()):
    """tiles [phases.rows, 64] bf16; x [8, 2048] bf16 -> [blocks, phases of a layer, 64, 8] float32, summed over layers
    in order. barrier: "none", "hidden" or "exposed"."""
    slots, rows, depth = RING_TILES // tiles_a_slot, tiles_a_slot * TILE, x.shape[1] // TILE
    counts = [steps * 2 // tiles_a_slot for steps in phases.steps]
    layer_steps = sum(counts)

    def kernel(tiles_g, x_g, out_g, x_s, ring, x_full, full, empty):
        block, thread = lax.axis_index("block"), lax.axis_index("thread")
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)  # only grows

        def wait_for(count):
            plgpu.semaphore_wait(arrived, value=count * phases.blocks, decrement=False, memory_scope="gpu")

        @pl.when(thread == 1)
        def _memory_warpgroup():
            plgpu.set_max_registers(64, action="decrease")

            def has_come(step, here):
                plgpu.barrier_wait(full.at[lax.rem(step, jnp.int32(slots))])
                return step + 1

            def layer(n, here):
                first = 0
                for p, count in enumerate(counts):
                    if barrier == "exposed":
                        wait_for(n * len(phases.steps) + p)

                    def fetch(k, here, first=first, count=count):
                        step = n * layer_steps + first + k
                        slot = lax.rem(step, jnp.int32(slots))
                        row = ((n * layer_steps + first) * phases.blocks + block * count + k) * rows
                        plgpu.barrier_wait(empty.at[slot])
                        under_way = jnp.where(k < window.steps, window.narrow, window.wide)
                        here = lax.fori_loop(here, jnp.maximum(here, step + 1 - under_way), has_come, here)
                        run = pl.ds(pl.multiple_of(row, rows), rows)
                        plgpu.copy_gmem_to_smem(tiles_g.at[run], ring.at[slot], full.at[slot])
                        return here

                    here = lax.fori_loop(0, count, fetch, here)
                    first += count
                return here

            lax.fori_loop(0, phases.layers, layer, jnp.int32(0))

        @pl.when(thread == 0)
        def _compute_warpgroup():
            plgpu.set_max_registers(232, action="increase")
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])

            def read_tokens():
                plgpu.copy_gmem_to_smem(x_g, x_s, x_full)
                plgpu.barrier_wait(x_full)

            if not tokens:
                read_tokens()

            def layer(n, sums):
                first, after = 0, []
                for p, count in enumerate(counts):
                    if tokens:
                        read_tokens()

                    def scope(acc, start=n * layer_steps + first, count=count):
                        def multiply(k):
                            slot = lax.rem(start + k, jnp.int32(slots))
                            plgpu.barrier_wait(full.at[slot])
                            for i in range(tiles_a_slot):
                                column = lax.rem(k * tiles_a_slot + i, jnp.int32(depth)) * TILE
                                columns = pl.ds(pl.multiple_of(column, TILE), TILE)
                                plgpu.wgmma(acc, ring.at[slot, pl.ds(i * TILE, TILE)], x_s.at[:, columns].T)

                        def release(k):
                            plgpu.barrier_arrive(empty.at[lax.rem(start + k, jnp.int32(slots))])

                        def step(k, carry):
                            multiply(k)
                            plgpu.wgmma_wait(tiles_a_slot)  # the step before has been read
                            release(k - 1)
                            return carry

                        multiply(0)
                        lax.fori_loop(1, count, step, 0)
                        plgpu.wgmma_wait(0)
                        release(count - 1)
                        return acc[...]

                    after.append(sums[p] + pl.run_scoped(scope, plgpu.ACC((TILE, COLUMNS), jnp.float32)))
                    store(out_g.at[block, p], after[p])
                    first += count
                    if barrier != "none":
                        plgpu.semaphore_signal(arrived, memory_scope="gpu")
                        wait_for(n * len(phases.steps) + p + 1)
                return tuple(after)

            zero = plgpu.layout_cast(jnp.zeros((TILE, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
            lax.fori_loop(0, phases.layers, layer, (zero,) * len(phases.steps))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((phases.blocks, len(phases.steps), TILE, COLUMNS), jnp.float32),
        scratch_types=[
            plgpu.SMEM((COLUMNS, depth * TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, rows, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(phases.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="thread",
        compiler_params=LANE,
    )(tiles, x)


def reference(tiles, x, phases=Phases()):
    """The same by plain products of float32: [blocks, phases, 64, 8]."""
    out, first, tokens = [], 0, x.astype(jnp.float32).reshape(COLUMNS, -1, TILE)
    layers = tiles.reshape(phases.layers, -1, TILE, TILE)
    for count in phases.steps:
        part = layers[:, first * phases.blocks * 2 : (first + count) * phases.blocks * 2]
        part = part.reshape(phases.layers, phases.blocks, count * 2, TILE, TILE).astype(jnp.float32)
        columns = tokens[:, jnp.arange(count * 2) % tokens.shape[1]]
        out.append(jnp.einsum("lbkfd,nkd->bfn", part, columns, precision="highest"))
        first += count
    return jnp.stack(out, 1)


def main():
    phases = Phases()
    tiles, x = draw(1, (phases.rows, TILE)), draw(2, (COLUMNS, 2048))
    exact = reference(tiles[: phases.rows // phases.layers], x, Phases(layers=1))
    error = jnp.linalg.norm(walk(tiles, x, phases=Phases(layers=1)) - exact) / jnp.linalg.norm(exact)
    forms = [(barrier, tokens) for barrier in ("none", "hidden", "exposed") for tokens in (False, True)]
    windows = [Window(11, 11, 0), Window(4, 4, 0), Window(3, 3, 0), Window()]
    cases = {
        (*form, window): functools.partial(walk, barrier=form[0], tokens=form[1], window=window)
        for window in windows
        for form in forms
    }
    expected = walk(tiles, x, barrier="none", tokens=False)
    times = timed({name: (case, (tiles, x), 1) for name, case in cases.items()}, calls=10)
    print(f"error of one layer {float(error):.1e}")
    for (barrier, tokens, window), us in times.items():
        same = bool((cases[barrier, tokens, window](tiles, x) == expected).all())
        print(
            f"{barrier:8} tokens={tokens!s:5} {window} {us:7.1f} us, bits {'equal' if same else 'DIFFER'}", flush=True
        )


if __name__ == "__main__":
    main()
