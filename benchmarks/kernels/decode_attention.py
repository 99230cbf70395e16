"""Paged decode attention on Hopper whose bits depend on a row's own keys alone.

The product is swapped: keys are wgmma's 64-row operand and the queries that share a KV head (group x tokens, padded
to 8) its columns, so decode of any batch and a chunk of tokens are one kernel. KV is reduced in blocks of 256 keys at
absolute positions; a block makes one partial (max, sum, weighted values), and a row's partials are combined in index
order, `FAN` at a time. Nothing in that order knows the batch, the page size, page numbers or the SM count.

    python decode_attention.py            # on the GPU: bits, error, times; writes a JSON record to $OUT if it is set
"""

import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import typing

import attrs
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE, HALF, FAN = 128, 64, 16  # keys of a ring slot; wgmma's M; partials combined at a time
SMEM_BYTES = 220 * 1024  # for ring, queries and weights; the rest is barriers and scratch
FLOOR, MASKED = -1e30, -3e38  # least maximum of a block; score of a key that is not visible: its exp2 is 0, never NaN
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


@attrs.frozen
class Tuning:
    """A row's order of summation. Chosen from the head shape alone: a batch must not be able to change it."""

    block: int = 256  # keys of a partial, at absolute positions 0, block, 2 * block ...

    def __attrs_post_init__(self):
        if self.block % TILE:
            raise ValueError(f"block={self.block} must be a multiple of {TILE} keys, one slot of the ring")


class Schedule(typing.NamedTuple):
    """Who reads what; made once per step and shared by every layer."""

    work: jax.Array  # [S * blocks, 3 + tiles] int32: row, first key, keys of the row, first pool row of each tile
    count: jax.Array  # [1] int32: work records in use
    seq_lens: jax.Array  # [S] int32


def make_schedule(page_tables, seq_lens, *, page_size, kv_heads, tuning=Tuning()):
    """page_tables [S, P] int32, seq_lens [S] int32 -> Schedule. A dense cache is one page per row."""
    if page_size % HALF or (page_size > TILE and page_size % TILE):
        raise ValueError(f"page_size={page_size} must be {HALF} or a multiple of {TILE}: a tile never straddles pages")
    rows, pages = page_tables.shape
    block, tile, blocks = tuning.block, min(page_size, TILE), -(-pages * page_size // tuning.block)
    ends = jnp.cumsum(-(-seq_lens // block))
    item = jnp.arange(rows * blocks)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), rows - 1)
    first = (item - ends[row] - seq_lens[row] // -block) * block
    position = first[:, None] + jnp.arange(0, block, tile)
    page = page_tables[row[:, None], jnp.clip(position // page_size, 0, pages - 1)]
    pool_row = jnp.where(position < seq_lens[row][:, None], page * kv_heads * page_size + position % page_size, 0)
    work = jnp.concatenate([jnp.stack([row, first, seq_lens[row]], 1), pool_row], 1).astype(jnp.int32)
    return Schedule(work, ends[-1:].astype(jnp.int32), seq_lens)


def store(ref, value):
    """To device memory. jax 0.12 refuses less than whole sectors or lines unless told; 0.11 has no way to be told."""
    plgpu.store(ref, value, optimized=False) if hasattr(plgpu, "store") else ref.__setitem__(..., value)


def pack(q, kv_heads, multiple=8):
    """q [S, T, H, d] -> columns [S, K, N, d]: column t * group + g of KV head k is token t's head k * group + g."""
    S, T, H, d = q.shape
    columns = q.reshape(S, T, kv_heads, H // kv_heads, d).swapaxes(1, 2).reshape(S, kv_heads, -1, d)
    return jnp.pad(columns, ((0, 0), (0, 0), (0, -columns.shape[2] % multiple), (0, 0)))


def reference(q, k_pages, v_pages, page_tables, seq_lens):
    """softmax(q k / sqrt(d)) v in float32 over the gathered pages. q [S, T, H, d] -> [S, T, H, d] float32."""
    (S, T, H, d), K = q.shape, k_pages.shape[1]
    k, v = (p[page_tables].swapaxes(1, 2).reshape(S, K, -1, d).astype(jnp.float32) for p in (k_pages, v_pages))
    scores = jnp.einsum("stkgd,skpd->stkgp", q.reshape(S, T, K, H // K, d).astype(jnp.float32), k, precision="highest")
    visible = jnp.arange(k.shape[2]) < (seq_lens[:, None] - T + 1 + jnp.arange(T))[..., None]
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores * d**-0.5, MASKED), axis=-1)
    return jnp.einsum("stkgp,skpd->stkgd", weights, v, precision="highest").reshape(S, T, H, d)


@functools.partial(jax.jit, static_argnames=("tokens", "group", "tuning", "num_sms"))  # lowered once for all layers
def attend(columns, k_pages, v_pages, schedule, *, tokens=1, group, tuning=Tuning(), num_sms=132):
    """columns [S, K, N, d] bf16, pages [pages, K, page_size, d] bf16 -> [S, K, N, d] bf16.

    Token t of a row sees its first seq_len - tokens + 1 + t keys. An empty row yields zeros. N <= 64. Columns past the
    last are waste. Pools hold no NaN, unused pages too.
    """
    (S, K, N, d), page_size, block = columns.shape, k_pages.shape[2], tuning.block
    tile, blocks = min(page_size, TILE), schedule.work.shape[0] // columns.shape[0]
    tiles, halves, slot_tiles = block // tile, block // HALF, TILE // tile
    if d not in (64, 128) or N % 8 or tokens * group > N:
        raise ValueError(
            f"columns are {columns.shape}: d must be 64 or 128, "
            f"N a multiple of 8 that holds {tokens} tokens x {group} heads"
        )
    if k_pages.shape[1:] != (K, page_size, d) or k_pages.shape != v_pages.shape:
        raise ValueError(f"pages are {k_pages.shape} and {v_pages.shape}, both must be [pages, {K}, {page_size}, {d}]")
    if schedule.work.shape != (S * blocks, 3 + tiles):
        raise ValueError(
            f"the schedule {schedule.work.shape} is not for {S} rows, pages of {page_size}, blocks of {block}"
        )
    slots, log2_scale = (SMEM_BYTES - N * (2 * block + 4 * d)) // (TILE * d * 2), d**-0.5 * 1.4426950408889634

    def spread(x, width=N):  # one value a column -> [HALF, width]
        return lax.broadcast_in_dim(x, (HALF, width), (1,))

    def partials(q_g, k_g, v_g, work_g, count_g, acc_g, stats_g, q_s, ring, p_s, q_full, q_empty, full, empty):
        """q_s [2, N, d], ring [slots, TILE, d], p_s [halves, N, HALF]. A work item: one block of a row's KV head."""
        sm, thread = lax.axis_index("sm"), lax.axis_index("thread")
        items = lax.div(count_g[0] * K - sm + num_sms - 1, jnp.int32(num_sms))

        def record(n, fields):  # read one item ahead of its use
            item = jnp.minimum(n * num_sms + sm, S * blocks * K - 1)
            return tuple(work_g[lax.div(item, jnp.int32(K)), i] for i in range(fields))

        def slot_of(n, i):  # an item takes its K tiles' slots, then its V tiles'
            return lax.rem(n * (2 * block // TILE) + i, jnp.int32(slots))

        @pl.when(thread == 1)
        def _memory_warpgroup():
            plgpu.set_max_registers(40, action="decrease")

            def item(n, fields):
                row, _, _, *pool_rows = fields
                head, upcoming = lax.rem(n * num_sms + sm, jnp.int32(K)), record(n + 1, 3 + tiles)
                for i in range(2 * tiles):
                    source, slot = (k_g, v_g)[i // tiles], slot_of(n, i // slot_tiles)
                    if i == tiles:  # between K and V: the keys do not wait for the queries
                        plgpu.barrier_wait(q_empty.at[lax.rem(n, 2)])
                        plgpu.copy_gmem_to_smem(q_g.at[row, head], q_s.at[lax.rem(n, 2)], q_full.at[lax.rem(n, 2)])
                    if i % slot_tiles == 0:
                        plgpu.barrier_wait(empty.at[slot])
                    start = pl.multiple_of(pool_rows[i % tiles] + head * page_size, HALF)
                    part = pl.ds(i % slot_tiles * tile, tile)
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(start, tile)], ring.at[slot, part], full.at[slot])
                return upcoming

            lax.fori_loop(0, items, item, record(0, 3 + tiles))

        @pl.when(thread == 0)
        def _compute_warpgroup():
            plgpu.set_max_registers(232, action="increase")
            for i in range(2 + slots):
                plgpu.barrier_arrive(q_empty.at[i] if i < 2 else empty.at[i - 2])
            iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (HALF, N), layout=plgpu.Layout.WGMMA)

            def item(n, fields):
                row, first, length = fields
                head, upcoming = lax.rem(n * num_sms + sm, jnp.int32(K)), record(n + 1, 3)
                limit = length - first - tokens + 1 + iota(1) // group - iota(0)  # the half's rows below it are visible

                def scores(*accumulators):
                    plgpu.barrier_wait(q_full.at[lax.rem(n, 2)])
                    for i, s in enumerate(accumulators):
                        if i % 2 == 0:
                            plgpu.barrier_wait(full.at[slot_of(n, i // 2)])
                        plgpu.wgmma(s, ring.at[slot_of(n, i // 2), pl.ds(i % 2 * HALF, HALF)], q_s.at[lax.rem(n, 2)].T)
                    plgpu.wgmma_wait(0)
                    return [s[...] for s in accumulators]

                s = pl.run_scoped(scores, *[plgpu.ACC((HALF, N), jnp.float32)] * halves)
                plgpu.barrier_arrive(q_empty.at[lax.rem(n, 2)])
                for i in range(block // TILE):
                    plgpu.barrier_arrive(empty.at[slot_of(n, i)])
                s = [jnp.where(limit > i * HALF, x * log2_scale, MASKED) for i, x in enumerate(s)]
                m = jnp.maximum(jnp.max(functools.reduce(jnp.maximum, s), axis=0), FLOOR)
                p = [jnp.exp2(x - spread(m)) for x in s]
                for i, x in enumerate(p):
                    p_s.at[i].T[...] = plgpu.layout_cast(x.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()

                def weigh(acc):
                    for i in range(halves):
                        slot = slot_of(n, (halves + i) // 2)
                        if i % 2 == 0:
                            plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, ring.at[slot, pl.ds(i % 2 * HALF, HALF)].T, p_s.at[i].T)
                    # By halves, then over one half's rows: a reduction over more rows adds in an order that N changes.
                    total = jnp.sum(functools.reduce(jnp.add, p), axis=0)
                    plgpu.wgmma_wait(0)
                    return acc[...], total

                acc, total = pl.run_scoped(weigh, plgpu.ACC((d, N), jnp.float32))
                for i in range(block // TILE, 2 * block // TILE):
                    plgpu.barrier_arrive(empty.at[slot_of(n, i)])
                index = lax.div(first, jnp.int32(block))
                store(acc_g.at[row, head, index], acc)
                store(stats_g.at[row, head, index, 0], m)
                store(stats_g.at[row, head, index, 1], total)
                return upcoming

            lax.fori_loop(0, items, item, record(0, 3))

    def combine(acc_g, stats_g, lens_g, out_g):
        """One (row, head), 64 of d and 8 columns: the row's partials in index order, FAN at a time."""
        row, head = lax.axis_index("row"), lax.axis_index("head")
        part_d, part_n = pl.ds(lax.axis_index("part_d") * HALF, HALF), pl.ds(lax.axis_index("part_n") * 8, 8)
        used, layout = lax.div(lens_g[row] + block - 1, jnp.int32(block)), plgpu.Layout.WGMMA
        load, by_column = functools.partial(plgpu.load, optimized=False), functools.partial(spread, width=8)

        def filled(shape, value=0.0):
            return plgpu.layout_cast(
                jnp.full(shape, value, jnp.float32), layout if len(shape) == 2 else layout.reduce(0)
            )

        def add_group(i, carry):
            m, total, acc = carry
            index = [jnp.minimum(i * FAN + s, used - 1) for s in range(FAN)]
            maxima, sums = (
                [load(stats_g.at[row, head, s, which, part_n], layout=layout.reduce(0)) for s in index]
                for which in (0, 1)
            )
            values = [load(acc_g.at[row, head, s, part_d, part_n], layout=layout) for s in index]
            m_new = functools.reduce(jnp.maximum, maxima, m)
            total, acc = total * jnp.exp2(m - m_new), acc * by_column(jnp.exp2(m - m_new))
            for s in range(FAN):  # a partial past the row's last weighs exactly 0
                weight = jnp.exp2(maxima[s] - m_new) * jnp.where(i * FAN + s < used, 1.0, 0.0)
                total, acc = total + sums[s] * weight, acc + values[s] * by_column(weight)
            return m_new, total, acc

        start, groups = (filled((8,), FLOOR), filled((8,)), filled((HALF, 8))), lax.div(used + FAN - 1, jnp.int32(FAN))
        _, total, acc = lax.fori_loop(0, groups, add_group, start)
        acc = (acc / by_column(jnp.where(total == 0, 1.0, total))).astype(jnp.bfloat16)
        store(out_g.at[row, head, part_n, part_d].T, plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED))

    acc, stats = plgpu.kernel(
        partials,
        out_type=[jax.ShapeDtypeStruct((S, K, blocks, x, N), jnp.float32) for x in (d, 2)],
        scratch_types=[
            plgpu.SMEM((2, N, d), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((slots, TILE, d), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((halves, N, HALF), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=slot_tiles, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=2,
        thread_name="thread",
        compiler_params=LANE,
    )(columns, k_pages.reshape(-1, d), v_pages.reshape(-1, d), schedule.work, schedule.count)
    return plgpu.kernel(
        combine,
        out_type=jax.ShapeDtypeStruct((S, K, N, d), jnp.bfloat16),
        grid=(S, K, d // HALF, N // 8),
        grid_names=("row", "head", "part_d", "part_n"),
        compiler_params=LANE,
    )(acc, stats, schedule.seq_lens)


def xla_attend(columns, k, v, seq_lens):
    """The floor that always works: columns [S, K, N, d], dense k and v [S, K, P, d], one token a row."""
    scores = jnp.einsum("skgd,skpd->skgp", columns, k, preferred_element_type=jnp.float32) * k.shape[3] ** -0.5
    visible = jnp.arange(k.shape[2]) < seq_lens[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1).astype(jnp.bfloat16)
    return jnp.einsum("skgp,skpd->skgd", weights, v, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


SHAPES = {"llama-3.2-1b": (32, 8, 64, Tuning()), "qwen3-1.7b": (16, 8, 128, Tuning())}  # H, K, d


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def paged(dense, page_size, seed):
    """dense [S, K, P, d] -> the same as shuffled pages with two spare ones, and their table [S, P / page_size]."""
    S, K, P, d = dense.shape
    order = jax.random.permutation(jax.random.key(seed), S * (P // page_size) + 2)[: S * (P // page_size)]
    pages = dense.reshape(S, K, -1, page_size, d).swapaxes(1, 2).reshape(-1, K, page_size, d)
    return jnp.zeros((len(order) + 2, *pages.shape[1:]), dense.dtype).at[order].set(pages), order.reshape(S, -1)


def check(shape, sms):
    """Bits of every row in every company against the row alone over a dense cache; error against float32."""
    H, K, d, tuning = SHAPES[shape]
    lengths = jnp.array([8192, 1, 63, 64, 65, 128, 129, 256, 257, 1000, 4095, 4096, 4097, 5000, 7777, 8191])
    shuffled = [11, 3, 15, 0, 7, 2, 9, 13, 1, 14, 6, 4, 10, 8, 12, 5]
    R, group = len(lengths), H // K
    k, v, q = draw(1, R, K, 8192, d), draw(2, R, K, 8192, d), draw(3, R, 16, H, d) * 2
    storage = {8192: (k, v, jnp.arange(R)[:, None])} | {
        size: (paged(k, size, 7)[0], *paged(v, size, 7)) for size in (128, 64)
    }

    @functools.partial(jax.jit, static_argnames=("columns", "page_size"))
    def run(q, k_pages, v_pages, tables, seq_lens, page_size, columns):
        schedule = make_schedule(tables, seq_lens, page_size=page_size, kv_heads=K, tuning=tuning)
        S, T = q.shape[:2]
        out = attend(pack(q, K, columns), k_pages, v_pages, schedule, tokens=T, group=group, tuning=tuning, num_sms=sms)
        return out[:, :, : T * group].reshape(S, K, T, group, d).swapaxes(1, 2).reshape(S, T, H, d)

    def company(rows, page_size=8192, columns=8, tokens=1, shift=0):
        """The rows' last `tokens` tokens after `shift` were taken off their ends."""
        k_pages, v_pages, tables = storage[page_size]
        rows, last = jnp.array(rows), 16 - shift
        return run(
            q[rows, last - tokens : last], k_pages, v_pages, tables[rows], lengths[rows] - shift, page_size, columns
        )

    alone = jnp.concatenate([company([r]) for r in range(R)])
    bits = {"a row without keys is zeros": (company([1, 0], shift=1)[0], jnp.zeros((1, H, d), jnp.bfloat16))}
    for page_size in storage:
        for name, rows in (("alone", [13]), ("8 rows", shuffled[4:12]), ("32 rows", shuffled + shuffled[::-1])):
            bits[f"{name}, pages of {page_size}"] = company(rows, page_size), alone[jnp.array(rows)]
    for columns in (16, 32, 64):
        bits[f"N = {columns}, padding"] = company(shuffled, 128, columns), alone[jnp.array(shuffled)]
    long = [r for r in shuffled if lengths[r] >= 16]
    for tokens in (2, 4, 8, 16):
        many = company(long, 128, tokens=tokens)
        for shift in sorted({0, 1, tokens // 2, tokens - 1}):
            bits[f"{tokens} tokens, the last but {shift}"] = (
                many[:, tokens - 1 - shift],
                company(long, 64, shift=shift)[:, 0],
            )
    exact = reference(q[:, 15:], *storage[8192], lengths).reshape(R, -1)
    plain = xla_attend(q[:, 15].reshape(R, K, group, d), k, v, lengths)
    ours, xla = (
        float(
            (
                jnp.linalg.norm(out.astype(jnp.float32).reshape(R, -1) - exact, axis=1) / jnp.linalg.norm(exact, axis=1)
            ).max()
        )
        for out in (alone, plain)
    )
    return {
        "largest_row_error": ours,
        "xla_largest_row_error": xla,
        "bits_equal": {name: bool((a == b).all() & jnp.isfinite(a).all()) for name, (a, b) in bits.items()},
    }


def timed(variants, rounds=9, calls=3):
    """{name: (function, arguments, layers in a call)} -> {name: median microseconds a layer}, rounds interleaved."""
    seconds = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, (function, arguments, layers) in variants.items():
            start = time.perf_counter()
            jax.block_until_ready([function(*arguments) for _ in range(calls)])
            seconds[name].append((time.perf_counter() - start) / calls / layers)
    return {name: statistics.median(values[1:]) * 1e6 for name, values in seconds.items()}  # the first round compiles


def time_case(shape, rows, keys, sms):
    """A chain of layers over KV that the L2 cannot hold, repeated inside a call, so that the host is not timed."""
    H, K, d, tuning = SHAPES[shape]
    size, group = rows * keys * K * d * 4, H // K
    layers = max(8, min(160, 2**29 // size))
    repeats = max(2, int(2e-2 / layers / max(1e-5, size / 4e12)))
    caches, lens = [draw(i, rows, K, keys, d) for i in range(2 * layers)], jnp.full((rows,), keys, jnp.int32)

    def chain(page_size, q, tables, lens, *caches):
        schedule = make_schedule(tables, lens, page_size=page_size or keys, kv_heads=K, tuning=tuning)

        def once(_, q):
            for k, v in zip(caches[::2], caches[1::2], strict=True):
                pools = (x.reshape(-1, K, page_size or keys, d) for x in (k, v))
                q = (
                    attend(q, *pools, schedule, group=group, tuning=tuning, num_sms=sms)
                    if page_size
                    else xla_attend(q, k, v, lens)
                )
            return q

        return lax.fori_loop(0, repeats, once, q)

    variants = {}
    for name, page_size in (("xla", 0), ("dense", keys), ("pages of 128", 128), ("pages of 64", 64)):
        q = pack(draw(5, rows, 1, H, d), K) if page_size else draw(5, rows, K, group, d)
        tables = jax.random.permutation(jax.random.key(9), rows * keys // (page_size or keys)).reshape(rows, -1)
        variants[name] = jax.jit(functools.partial(chain, page_size)), (q, tables, lens, *caches), layers * repeats
    return [
        {
            "shape": shape,
            "rows": rows,
            "keys": keys,
            "layers": layers,
            "variant": name,
            "us": us,
            "tb_per_s": size / us / 1e6,
        }
        for name, us in timed(variants).items()
    ]


def main():
    device, copying = jax.devices()[0], jax.jit(lambda x: lax.fori_loop(0, 20, lambda _, x: x + 1, x))
    copy = 2**31 / timed({"copy": (copying, (jnp.zeros((2**28,), jnp.float32),), 20)})["copy"] / 1e6
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout
    record = {
        "gpu": device.device_kind,
        "driver": driver.strip(),
        "jax": jax.__version__,
        "commit": [*sys.argv[1:], "unknown"][0],
        "copy_tb_per_s": copy,
        "tuning": {name: attrs.asdict(shape[3]) for name, shape in SHAPES.items()},
        "checks": {},
        "times": [],
    }
    for shape in SHAPES:
        record["checks"][shape] = checked = check(shape, device.core_count)
        same = checked["bits_equal"]
        print(
            f"{shape}: largest error of a row {checked['largest_row_error']:.1e} "
            f"(xla {checked['xla_largest_row_error']:.1e}), "
            f"bits equal in {sum(same.values())} of {len(same)} companies",
            *(n for n in same if not same[n]),
            sep="\n    ",
            flush=True,
        )
        for rows, keys in ((1, 256), (1, 1024), (1, 8192), (8, 8192), (32, 8192)):
            record["times"] += time_case(shape, rows, keys, device.core_count)
    if "OUT" in os.environ:
        pathlib.Path(os.environ["OUT"], "decode-attention.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{record['gpu']}, driver {record['driver']}, jax {record['jax']}, commit {record['commit']}, "
        f"copy {copy:.2f} TB/s"
    )
    for t in record["times"]:
        print(
            f"{t['shape']:12} B={t['rows']:<2} keys={t['keys']:<4} {t['variant']:12} "
            f"{t['us']:7.1f} us {t['tb_per_s']:6.2f} TB/s "
            f"{t['tb_per_s'] / copy:4.0%} of copy"
        )


if __name__ == "__main__":
    main()
