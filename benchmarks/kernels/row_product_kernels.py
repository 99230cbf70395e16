"""Row products on Hopper: y[T, F] = x[T, D] @ w[F, D].T, with the same bits per row for every T and every place.

The product is swapped: the weight is wgmma's 64-row operand and the tokens its columns. One order of summation,
fixed by the weight alone: K is cut into `split` equal parts, a part is one chain of k-steps into one float32
accumulator, and the parts are added in index order. Two kernels carry it out. `stream` is for few tokens: it reads
every weight byte once, as fast as memory gives it, and holds the tokens in shared memory. `tiled` is for many: 128 rows
by up to 256 tokens a block, both streamed, all parts of K one after the other. Which one ran does not show in the bits.
"""

import functools

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE, STEP = 64, 128  # rows and depth of a packed tile; depth of a ring slot of `stream`, two tiles
SMEM_BYTES = 222 * 1024  # for rings and tokens; the rest is barriers and scratch
EPSILON = 1e-5  # of the norm
WGMMA, TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED


def tiling(width):
    """Shared-memory transforms of a tile whose rows are `width` bytes: wgmma's layout with the widest swizzle."""
    swizzle = min(128, width)
    return lambda itemsize: (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


TILED = tiling(128)(2)
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@attrs.frozen
class Weight:
    """A weight's shape and its order of summation. Nothing here may depend on the tokens."""

    rows: int  # F
    depth: int  # D
    split: int = 1  # parts of K
    gated: bool = False  # rows are pairs of tiles: 64 gate rows, then the 64 up rows of the same features

    def __attrs_post_init__(self):
        if self.rows % (2 * TILE) or self.depth % (STEP * self.split):
            raise ValueError(
                f"w is [{self.rows}, {self.depth}]: rows must be a multiple of {2 * TILE}, "
                f"and depth of {STEP} x split {self.split}"
            )
        if self.gated and self.split > 1:
            raise ValueError(f"a gated weight must not be split, its split is {self.split}")

    @property
    def bytes(self):
        return self.rows * self.depth * 2


@attrs.frozen
class Form:
    """How one launch of `stream` begins and ends. No field changes a row's order of summation."""

    prologue: str = "none"  # "scale": 1 / rms in the epilogue, from sums of squares; "norm": every block norms the rows
    epilogue: str = "store"  # "gate": silu(gate) * up; "residual": add, and prepare the next norm
    cluster: bool = True  # parts of K meet in the first block's shared memory, else in device memory (`combine`)
    pdl: bool = False  # programmatic dependent launch: the ring fills while the previous kernel drains


def pack(w):
    """w [F, D] -> [F/64 * D/64 * 64, 64]: every [64, 64] tile one contiguous run, a row tile's K ascending."""
    F, D = w.shape
    return w.reshape(F // TILE, TILE, D // TILE, TILE).swapaxes(1, 2).reshape(-1, TILE)


def pack_gated(gate, up):
    """gate, up [F/2, D] -> packed pairs of row tiles, for Weight(gated=True)."""
    F, D = gate.shape
    return pack(jnp.stack([x.reshape(-1, TILE, D) for x in (gate, up)], 1).reshape(2 * F, D))


def reference(x, w):
    """x [T, D], w [F, D] -> [T, F] float32, products of bf16 values added in float32."""
    return jnp.einsum("td,fd->tf", x, w, preferred_element_type=jnp.float32, precision="highest")


def store(ref, value):
    """To device memory. jax 0.12 refuses less than whole sectors unless told; 0.11 has no way to be told."""
    plgpu.store(ref, value, optimized=False) if hasattr(plgpu, "store") else ref.__setitem__(..., value)


def store_tokens(ref, value):
    """value [64, N] float32 -> ref [N, 64] bf16."""
    store(ref.T, plgpu.layout_cast(value.astype(jnp.bfloat16), TRANSPOSED))


def load(ref, layout=WGMMA):
    return plgpu.load(ref, layout=layout, optimized=False)


def across(x, columns):
    """One value a column, [N] -> [64, N]."""
    return lax.broadcast_in_dim(x, (TILE, columns), (1,))


def silu(x):
    return x / (1 + jnp.exp(-x))


def inverse_rms(squares_g, depth):
    """squares_g [D/64, N] float32 -> [N]: the partial sums of squares in index order."""
    layout = WGMMA.reduce(0)
    total = functools.reduce(jnp.add, [load(squares_g.at[i], layout) for i in range(depth // TILE)])
    return lax.rsqrt(total / depth + EPSILON)


def finish_residual(total, old, gain, tile, residual_g, scaled_g, squares_g):
    """x' = x + y, and what the next product's norm needs: x' * gain as bf16 tokens, and this tile's sums of squares."""
    new = old + total
    rows = pl.ds(tile * TILE, TILE)
    store(residual_g.at[rows], new)
    store_tokens(scaled_g.at[:, rows], new * lax.broadcast_in_dim(gain, new.shape, (0,)))
    store(squares_g.at[tile], jnp.sum(new * new, axis=0))


def residual_types(weight, columns):
    """Outputs of the residual epilogue: x' [F, N] float32, x' * gain [N, F] bf16, sums of squares [F/64, N] float32."""
    F = weight.rows
    shapes = (((F, columns), jnp.float32), ((columns, F), jnp.bfloat16), ((F // TILE, columns), jnp.float32))
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


def ring_slots(weight, columns):
    """Ring slots of `stream` beside the resident tokens of one part, and the meeting place of the parts."""
    part_bytes = weight.depth // weight.split * columns * 2
    return min((SMEM_BYTES - part_bytes - (weight.split - 1) * TILE * columns * 4) // (STEP * TILE * 2), 13)


@functools.partial(jax.jit, static_argnames=("weight", "form", "num_sms"))  # lowered once for all copies of a weight
def stream(tiles, x, *extra, weight, form=Form(), num_sms=132):
    """One weight's product for N = 8, 16 or 32 columns.

    tiles: packed [F*D/64, 64] bf16.   x: [N, D] bf16, or with the norm prologue the residual [D, N] float32.
    extra, in this order: sums of squares [D/64, N] float32 (scale) or gain [D] float32 (norm); residual [F, N] float32
    and the next gain [F] float32 (residual).
    Returns y [N, F] bf16; gate: h [N, F/2] bf16; residual: see `residual_types`; with a split and no cluster:
    float32 parts [split, F, N] for `combine`.
    """
    F, D, S, pair = weight.rows, weight.depth, weight.split, 1 + weight.gated
    N = x.shape[1] if form.prologue == "norm" else x.shape[0]
    part_depth, part_steps = D // S, D // S // STEP
    item_steps, clustered = part_steps * pair, form.cluster and S > 1
    adds = form.epilogue == "residual" and (clustered or S == 1)
    blocks = F // TILE * S if clustered else min(num_sms // S * S, F // TILE * S // pair)
    slots = ring_slots(weight, N)
    if N not in (8, 16, 32) or slots < 3:
        raise ValueError(f"x is {x.shape}: N must be 8, 16 or 32 and a part's tokens must leave room for a ring")

    def kernel(tiles_g, x_g, *refs):
        extra_g, out_g, scratch = list(refs[: len(extra)]), refs[len(extra) : -len(kept)], refs[-len(kept) :]
        x_s, ring, x_full, full, empty, *meeting = scratch
        prologue_g = extra_g.pop(0) if form.prologue != "none" else None
        residual_g, gain_g = (extra_g.pop(0), extra_g.pop(0)) if form.epilogue == "residual" else (None, None)
        thread = lax.axis_index("thread")
        if clustered:
            part, block = lax.axis_index("part"), lax.axis_index("tile") * S + lax.axis_index("part")
        else:
            block = lax.axis_index("sm")
            part = lax.rem(block, jnp.int32(S))
        items = lax.div(F // TILE * S // pair - block + blocks - 1, jnp.int32(blocks))

        @pl.when(thread == 1)
        def _memory_warpgroup():
            plgpu.set_max_registers(64, action="decrease")
            if form.pdl:
                plgpu.griddepcontrol_launch_dependents()

            def packed_rows(step):
                item = block + lax.div(step, jnp.int32(item_steps)) * blocks
                row = (item * item_steps + lax.rem(step, jnp.int32(item_steps))) * STEP
                return pl.ds(pl.multiple_of(row, STEP), STEP)

            def fetch(step, carry):
                slot = lax.rem(step, jnp.int32(slots))
                plgpu.copy_gmem_to_smem(tiles_g.at[packed_rows(step)], ring.at[slot], full.at[slot])
                return carry

            def refill(step, carry):
                plgpu.barrier_wait(empty.at[lax.rem(step, jnp.int32(slots))])
                return fetch(step, carry)

            total = items * item_steps
            first = jnp.minimum(total, slots)
            lax.fori_loop(0, first, fetch, 0)  # the weights wait for nobody
            if form.prologue != "norm":
                if form.pdl:
                    plgpu.griddepcontrol_wait()
                columns = pl.ds(pl.multiple_of(part * part_depth, STEP), part_depth)
                plgpu.copy_gmem_to_smem(x_g.at[:, columns], x_s, x_full)
            lax.fori_loop(first, total, refill, 0)

        @pl.when(thread == 0)
        def _compute_warpgroup():
            plgpu.set_max_registers(232, action="increase")
            if form.pdl:
                plgpu.griddepcontrol_wait()  # before anything of the previous kernel's is read or overwritten
            scale = None
            if form.prologue == "norm":
                norm_tokens(x_g, prologue_g, x_s, part)
            elif form.prologue == "scale":
                scale = across(inverse_rms(prologue_g, D), N)
            if form.prologue != "norm":
                plgpu.barrier_wait(x_full)

            def product(first_step):
                def multiply(k, acc):
                    slot = lax.rem(first_step + k, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    for half in range(STEP // TILE):
                        depth = pl.ds(k * STEP + half * TILE, TILE)
                        plgpu.wgmma(acc, ring.at[slot, pl.ds(half * TILE, TILE)], x_s.at[:, depth].T)

                def release(k):
                    plgpu.barrier_arrive(empty.at[lax.rem(first_step + k, jnp.int32(slots))])

                def scope(acc):
                    def step(k, carry):
                        multiply(k, acc)
                        plgpu.wgmma_wait(STEP // TILE)  # the step before has been read
                        release(k - 1)
                        return carry

                    multiply(0, acc)
                    lax.fori_loop(1, part_steps, step, 0)
                    plgpu.wgmma_wait(0)
                    release(part_steps - 1)
                    return acc[...]

                sums = pl.run_scoped(scope, plgpu.ACC((TILE, N), jnp.float32))
                return sums if scale is None else sums * scale

            def finish(total, tile, old, gain):
                if adds:
                    finish_residual(total, old, gain, tile, *out_g)
                else:
                    store_tokens(out_g[0].at[:, pl.ds(tile * TILE, TILE)], total)

            def item(n, carry):
                tile = lax.div(block + n * blocks, jnp.int32(S))
                rows = pl.ds(tile * TILE, TILE)
                old, gain = None, None
                if adds:
                    old, gain = load(residual_g.at[rows]), load(gain_g.at[rows], WGMMA.reduce(1))
                sums = product(n * item_steps)
                if weight.gated:
                    store_tokens(out_g[0].at[:, rows], silu(sums) * product(n * item_steps + part_steps))
                elif clustered:

                    @pl.when(part != 0)
                    def _send():
                        plgpu.async_store_smem(
                            sums, meeting[0].at[part - 1], meeting[1], cluster_idx=0, cluster_dim="part"
                        )

                    @pl.when(part == 0)
                    def _add_parts():
                        plgpu.barrier_wait(meeting[1])
                        total = sums
                        for i in range(S - 1):
                            total = total + load(meeting[0].at[i])
                        finish(total, tile, old, gain)

                elif S > 1:
                    store(out_g[0].at[part, rows], sums)
                else:
                    finish(sums, tile, old, gain)
                return carry

            lax.fori_loop(0, items, item, 0)

    def norm_tokens(x_g, gain_g, x_s, part):
        """rms-norm of [D, N] float32 into x_s."""
        x32 = [load(x_g.at[pl.ds(i * TILE, TILE)]) for i in range(D // TILE)]
        total = jnp.sum(functools.reduce(jnp.add, [x * x for x in x32]), axis=0)
        scale = across(lax.rsqrt(total / D + EPSILON), N)
        for i in range(part_depth // TILE):
            value = x32[i] if S == 1 else load(x_g.at[pl.ds(part * part_depth + i * TILE, TILE)])
            gain = load(gain_g.at[pl.ds(part * part_depth + i * TILE, TILE)], WGMMA.reduce(1))
            value = value * scale * lax.broadcast_in_dim(gain, (TILE, N), (0,))
            x_s.at[:, pl.ds(i * TILE, TILE)].T[...] = plgpu.layout_cast(value.astype(jnp.bfloat16), TRANSPOSED)
        plgpu.commit_smem()

    if S > 1 and not clustered:
        out = [jax.ShapeDtypeStruct((S, F, N), jnp.float32)]
    elif adds:
        out = residual_types(weight, N)
    else:
        out = [jax.ShapeDtypeStruct((N, F // pair), jnp.bfloat16)]
    grid = {"grid": (blocks,), "grid_names": ("sm",)}
    if clustered:
        grid = {"grid": (F // TILE,), "grid_names": ("tile",), "cluster": (S,), "cluster_names": ("part",)}
    kept = [
        plgpu.SMEM((N, part_depth), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((slots, STEP, TILE), jnp.bfloat16, transforms=TILED),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_barriers=slots),
    ]
    if clustered:  # where the other blocks' parts meet
        kept.append(plgpu.SMEM((S - 1, TILE, N), jnp.float32, transforms=tiling(N * 4)(4)))
        kept.append(plgpu.Barrier(num_arrivals=S - 1))
    result = plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=kept,
        **grid,
        num_threads=2,
        thread_name="thread",
        compiler_params=LANE,
    )(tiles, x, *extra)
    return result if adds else result[0]


@functools.partial(jax.jit, static_argnames=("weight", "form"))
def combine(parts, *extra, weight, form=Form()):
    """The parts of `stream` without a cluster, added in index order. parts [split, F, N] float32; extra and results as
    `stream` has them for the same form."""
    S, F, N = parts.shape

    def kernel(parts_g, *refs):
        extra_g, out_g, tile = refs[: len(extra)], refs[len(extra) :], lax.axis_index("tile")
        rows = pl.ds(tile * TILE, TILE)
        if form.pdl:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        total = functools.reduce(jnp.add, [load(parts_g.at[i, rows]) for i in range(S)])
        if form.epilogue == "residual":
            old, gain = load(extra_g[0].at[rows]), load(extra_g[1].at[rows], WGMMA.reduce(1))
            finish_residual(total, old, gain, tile, *out_g)
        else:
            store_tokens(out_g[0].at[:, rows], total)

    residual = form.epilogue == "residual"
    out = residual_types(weight, N) if residual else [jax.ShapeDtypeStruct((N, F), jnp.bfloat16)]
    result = plgpu.kernel(kernel, out_type=out, grid=(F // TILE,), grid_names=("tile",), compiler_params=LANE)(
        parts, *extra
    )
    return result if residual else result[0]


@functools.partial(jax.jit, static_argnames=("weight", "columns", "num_sms"))
def tiled(tiles, x, *, weight, columns, num_sms=132):
    """One weight's product for many tokens. A block makes 128 rows by `columns` tokens: each of its two compute
    warpgroups 64 of the rows, or of a gated weight half of the tokens, so that a gate meets its up in one thread.

    tiles: packed [F*D/64, 64] bf16.   x: [T, D] bf16, T a multiple of columns (64, 128 or 256).
    Returns y [T, F] bf16; of a gated weight h [T, F/2].
    """
    (T, D), F, S, half = x.shape, weight.rows, weight.split, columns // 2
    if columns not in (64, 128, 256) or T % columns or weight.depth != D:
        raise ValueError(f"x is {x.shape}: T must be a multiple of columns={columns} (64 ... 256), D {weight.depth}")
    if S > 1 and columns > 128:
        raise ValueError(f"columns={columns} leave no registers for the parts of a split weight: 128 at most")
    steps, token_tiles = D // TILE, T // columns
    chunk = TILE if columns > TILE else TILE // 2  # tokens of an output tile on its way to device memory
    slots = min((SMEM_BYTES + 2048 - 4 * chunk * TILE * 2) // ((2 * TILE + columns) * TILE * 2), 8)
    items = F // (2 * TILE) * token_tiles
    accumulators = (
        [plgpu.ACC((TILE, half), jnp.float32)] * 2 if weight.gated else [plgpu.ACC((TILE, columns), jnp.float32)]
    )

    def kernel(tiles_g, x_g, out_g, w_s, x_s, out_s, full, empty):
        thread, block = lax.axis_index("thread"), lax.axis_index("block")
        mine = lax.div(items - block + num_sms - 1, jnp.int32(num_sms))

        def place(n):  # token tiles vary fastest: one wave of blocks reads few rows of the weight and all tokens
            item = block + n * num_sms
            return lax.div(item, jnp.int32(token_tiles)), lax.rem(item, jnp.int32(token_tiles)) * columns

        @pl.when(thread == 2)
        def _memory_warpgroup():
            plgpu.set_max_registers(40, action="decrease")

            def item(n, carry):
                pair, token = place(n)

                def fetch(k, carry):
                    slot = lax.rem(n * steps + k, jnp.int32(slots))
                    plgpu.barrier_wait(empty.at[slot])
                    for i in range(2):
                        row = pl.multiple_of(((pair * 2 + i) * steps + k) * TILE, TILE)
                        plgpu.copy_gmem_to_smem(tiles_g.at[pl.ds(row, TILE)], w_s.at[slot, i], full.at[slot])
                    depth = pl.ds(pl.multiple_of(k * TILE, TILE), TILE)
                    tokens = pl.ds(pl.multiple_of(token, columns), columns)
                    plgpu.copy_gmem_to_smem(x_g.at[tokens, depth], x_s.at[slot], full.at[slot])
                    return carry

                return lax.fori_loop(0, steps, fetch, carry)

            lax.fori_loop(0, mine, item, 0)

        @pl.when(thread < 2)
        def _compute_warpgroups():
            plgpu.set_max_registers(232, action="increase")
            for i in range(slots):
                plgpu.barrier_arrive(empty.at[i])

            def item(n, carry):
                pair, token = place(n)

                def part(first):
                    start = n * steps + first

                    def multiply(k, sums):
                        slot = lax.rem(start + k, jnp.int32(slots))
                        plgpu.barrier_wait(full.at[slot])
                        if weight.gated:
                            tokens = x_s.at[slot, pl.ds(thread * half, half)].T
                            for i, acc in enumerate(sums):
                                plgpu.wgmma(acc, w_s.at[slot, i], tokens)
                        else:
                            plgpu.wgmma(sums[0], w_s.at[slot, thread], x_s.at[slot].T)

                    def release(k):
                        plgpu.barrier_arrive(empty.at[lax.rem(start + k, jnp.int32(slots))])

                    def scope(*sums):
                        def step(k, carry):
                            multiply(k, sums)
                            plgpu.wgmma_wait(len(sums))  # the step before has been read
                            release(k - 1)
                            return carry

                        multiply(0, sums)
                        lax.fori_loop(1, steps // S, step, 0)
                        plgpu.wgmma_wait(0)
                        release(steps // S - 1)
                        return tuple(acc[...] for acc in sums)

                    return pl.run_scoped(scope, *accumulators)

                def add_part(i, total):
                    return tuple(a + b for a, b in zip(total, part(i * (steps // S)), strict=True))

                total = lax.fori_loop(1, S, add_part, part(0))
                if weight.gated:
                    rows, tokens, y = pl.ds(pair * TILE, TILE), token + thread * half, silu(total[0]) * total[1]
                else:
                    rows, tokens, y = pl.ds((pair * 2 + thread) * TILE, TILE), token, total[0]
                for i in range(y.shape[1] // chunk):  # by way of shared memory: the next item need not wait
                    stage = out_s.at[thread, i % 2]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    values = y[:, i * chunk : (i + 1) * chunk].astype(jnp.bfloat16)
                    stage.T[...] = plgpu.layout_cast(values, TRANSPOSED)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, out_g.at[pl.ds(tokens + i * chunk, chunk), rows])
                return carry

            lax.fori_loop(0, mine, item, 0)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((T, F // (1 + weight.gated)), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((slots, 2, TILE, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, columns, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((2, 2, chunk, TILE), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=3, num_barriers=slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        grid=(num_sms,),
        grid_names=("block",),
        num_threads=3,
        thread_name="thread",
        compiler_params=LANE,
    )(tiles, x)
