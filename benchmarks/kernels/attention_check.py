"""Attention kernels on the GPU: the bits of a token in every company and in chunks, its error, bytes and operations a
second.

    python attention_check.py COMMIT [SECTION ...]

Sections: bits odd error decode chunk schedule; all unless named.

Each shape of a section has a time limit, after which the process ends: a kernel that hangs leaves no traceback.
Writes a JSON record to $OUT if it is set, after every section.
"""

import faulthandler
import functools
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy
from jax import lax

if importlib.util.find_spec("mlxcel_jax_cuda") is None:  # not installed: the checkout's own
    package = pathlib.Path(__file__).parents[2] / "backends" / "jax_cuda"
    spec = importlib.util.spec_from_file_location(
        "mlxcel_jax_cuda", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    sys.modules["mlxcel_jax_cuda"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["mlxcel_jax_cuda"])

from mlxcel_jax_cuda.kernels.attention_schedule import make_schedule
from mlxcel_jax_cuda.kernels.chunk_attention import chunk_attention, chunk_reference
from mlxcel_jax_cuda.kernels.decode_attention import decode_attention

SHAPE_SECONDS = 90  # of a section for one shape
SHAPES = {"llama-3.2-1b": (32, 8, 64), "qwen3-1.7b": (16, 8, 128)}  # H, K, d
ODD_SHAPES = {"3 heads a KV head": (6, 2, 64), "1": (4, 4, 128), "12": (24, 2, 64)}
LENGTHS = (8192, 1, 63, 64, 65, 128, 129, 256, 257, 1000, 4095, 4096, 4097, 5000, 7777, 8191)
CONTEXT, RING, WINDOW, SOFTCAP = 8192, 2048, 1000, 20.0
COLD_BYTES = 64e6  # of keys and values that a chain reads before it reads them again: more than the 50 MB of L2


@functools.partial(jax.jit, static_argnums=(1,))
def draw(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def paged(dense, page_size, seed):
    """dense [S, K, P, d] -> the same as shuffled pages with two spare ones, and their table [S, P / page_size]."""
    S, K, P, d = dense.shape
    order = jax.random.permutation(jax.random.key(seed), S * (P // page_size) + 2)[: S * (P // page_size)]
    pages = dense.reshape(S, K, -1, page_size, d).swapaxes(1, 2).reshape(-1, K, page_size, d)
    return jnp.zeros((len(order) + 2, *pages.shape[1:]), dense.dtype).at[order].set(pages), order.reshape(S, -1)


@functools.partial(jax.jit, static_argnames=("most_items", "softcap", "window"))
def decode(q, k, v, tables, lengths, most_items=None, softcap=0.0, window=0):
    num_pages, kv_heads, page_size, d = k.shape
    schedule = make_schedule(
        tables,
        lengths,
        num_pages=num_pages,
        page_size=page_size,
        kv_heads=kv_heads,
        window=window,
        most_items=most_items,
    )
    return decode_attention(q, k, v, schedule, scale=d**-0.5, softcap=softcap, window=window)


@functools.partial(jax.jit, static_argnames=("softcap", "window"))
def chunk(q, k, v, table, start, length, softcap=0.0, window=0):
    return chunk_attention(q, k, v, table, start, length, scale=q.shape[2] ** -0.5, softcap=softcap, window=window)


def compared(a, b):
    """Equal bits; else the share of values that differ, and the largest difference beside the largest value."""
    same = (a == b) & jnp.isfinite(a)
    apart = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() / jnp.abs(b).max().astype(jnp.float32)
    return {"equal": bool(same.all()), "share": float(1 - same.mean()), "apart": float(apart)}


def one_by_one(q, k, v, table, start, length, rows=128, **kind):
    """The first `length` tokens of a chunk decoded, `rows` at a time as rows with the same pages; zeros after them."""
    T = q.shape[0]
    lengths = jnp.where(jnp.arange(T) < length, start + 1 + jnp.arange(T), 0)
    tables = jnp.tile(table, (min(rows, T), 1))
    return jnp.concatenate(
        [decode(q[i : i + rows], k, v, tables, lengths[i : i + rows], **kind) for i in range(0, T, rows)]
    )


def storages(shape, rows, context):
    _, K, d = shape
    k, v = draw(1, (rows, K, context, d)), draw(2, (rows, K, context, d))
    return {context: (k, v, jnp.arange(rows)[:, None])} | {
        size: (paged(k, size, 7)[0], *paged(v, size, 7)) for size in (128, 64)
    }


def check_bits(name):
    """Rows in companies against the row alone over a dense cache; tokens of chunks against the same tokens decoded."""
    H, K, d = SHAPES[name]
    R, storage, found = len(LENGTHS), storages(SHAPES[name], len(LENGTHS), CONTEXT), {}
    lengths, shuffled = jnp.array(LENGTHS), numpy.random.default_rng(7).permutation(len(LENGTHS))
    q = draw(3, (R, H, d)) * 2

    def company(rows, page_size=CONTEXT, lengths=lengths, **kind):
        k, v, tables = storage[page_size]
        rows = jnp.array(rows)
        return decode(q[rows], k, v, tables[rows], lengths[rows], **kind)

    alone = jnp.concatenate([company([r]) for r in range(R)])
    for page_size in storage:
        found[f"8 rows, pages of {page_size}"] = company(shuffled[4:12], page_size), alone[shuffled[4:12]]
    crowd = [*shuffled, *shuffled[::-1]]
    found["32 rows"] = company(crowd, 128), alone[jnp.array(crowd)]
    found["32 rows, one item each"] = company(crowd, 128, most_items=32), alone[jnp.array(crowd)]
    found["32 rows, five items each"] = company(crowd, 128, most_items=170), alone[jnp.array(crowd)]
    some = jnp.where(jnp.arange(R) % 3 == 0, 0, lengths)
    kept = jnp.where((some[jnp.array(crowd)] > 0)[:, None, None], alone[jnp.array(crowd)], 0)
    found["32 rows, a third of them empty"] = company(crowd, 128, lengths=some), kept

    q = draw(4, (2048, H, d)) * 2
    for T, start, length, page_size in (
        (512, 0, 512, 128),
        (512, 1, 512, 128),
        (512, 200, 511, 128),
        (512, 255, 257, 128),
        (512, 4000, 512, 128),
        (512, 7680, 512, 128),
        (512, 3777, 1, 128),
        (512, 777, 65, CONTEXT),
        (64, 8128, 64, 128),
        (64, 250, 33, 128),
        (2048, 0, 2048, 128),
        (2048, 6144, 2048, 128),
        (2048, 1111, 1500, 128),
    ):
        k, v, tables = storage[page_size]
        a = chunk(q[:T], k, v, tables[3], start, length)
        k, v, tables = storage[128]
        found[f"chunk of {T} at {start}, {length} real, pages of {page_size}"] = (
            a,
            one_by_one(q[:T], k, v, tables[3], start, length),
        )
    for start in (0, 1000, 7000):
        a = chunk(q[:512], k, v, tables[5], start, 500, softcap=SOFTCAP)
        found[f"softcap, chunk at {start}"] = a, one_by_one(q[:512], k, v, tables[5], start, 500, softcap=SOFTCAP)
        rings = [
            jnp.zeros((3, K, RING, d), jnp.bfloat16).at[1, :, places % RING].set(x[5, :, places])
            for places in [jnp.arange(max(0, start + 512 - RING), start + 512)]
            for x in storage[CONTEXT][:2]
        ]
        a = chunk(q[:512], *rings, jnp.array([1]), start, 500, window=WINDOW)
        found[f"window, chunk at {start}"] = (
            a,
            one_by_one(q[:512], *rings, jnp.array([1]), start, 500, window=WINDOW),
        )
    return [{"shape": name, "case": case, **compared(a, b)} for case, (a, b) in found.items()]


def check_odd(name):
    """Other numbers of heads: a chunk against its tokens decoded, and its error."""
    shape = H, _, d = ODD_SHAPES[name]
    k, v, tables = storages(shape, 2, 2048)[64]
    q, rows = draw(3, (192, H, d)) * 2, []
    for start, length in ((0, 192), (1000, 180)):
        a = chunk(q, k, v, tables[1], start, length)
        b = one_by_one(q, k, v, tables[1], start, length, rows=64)
        exact = chunk_reference(q, k, v, tables[1], start, length, scale=d**-0.5)
        rows.append(
            {
                "shape": name,
                "case": f"chunk at {start}, {length} real",
                **compared(a, b),
                "error": error(a, exact, length),
            }
        )
    return rows


def error(out, exact, length):
    """Largest of the tokens' relative errors."""
    difference = (out.astype(jnp.float32) - exact)[:length].reshape(length, -1)
    return float(
        (jnp.linalg.norm(difference, axis=1) / jnp.linalg.norm(exact[:length].reshape(length, -1), axis=1)).max()
    )


def check_error(name):
    H, _, d = SHAPES[name]
    k, v, tables = storages(SHAPES[name], 2, CONTEXT)[128]
    q, rows = draw(4, (512, H, d)) * 2, []
    for start in (0, 4000):
        for kind in ({}, {"softcap": SOFTCAP}, {"window": WINDOW}):
            a = chunk(q, k, v, tables[1], start, 500, **kind)
            exact = chunk_reference(q, k, v, tables[1], start, 500, scale=d**-0.5, **kind)
            rows.append(
                {
                    "shape": name,
                    "case": f"chunk at {start} {kind or 'plain'}",
                    "zeros_behind": bool((a[500:] == 0).all()),
                    "error": error(a, exact, 500),
                }
            )
    return rows


def timed(function, *arguments, calls, rounds=7):
    """Median seconds of a call."""
    seconds = []
    for _ in range(rounds + 1):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])


def time_decode(name):
    """A chain of layers over cold pages of 128, long enough that the host's work for a call is hidden."""
    H, K, d = SHAPES[name]
    found = []
    for rows, layers in ((1, 128), (8, 64), (32, 16), (128, 4)):
        pages, launches = rows * CONTEXT // 128, max(layers, 64)
        k, v = (draw(i, (layers * pages, K, 128, d)) for i in range(2))
        tables = jax.random.permutation(jax.random.key(9), layers * pages).reshape(layers, rows, -1)

        @jax.jit
        def schedules(tables, lengths):
            return [make_schedule(t, lengths, num_pages=8192, page_size=128, kv_heads=K) for t in tables]

        @jax.jit
        def chain(q, k, v, schedules, launches=launches):
            for i in range(launches):
                q = decode_attention(q, k, v, schedules[i % len(schedules)], scale=d**-0.5)
            return q

        for keys in (256, 1024, 8192):
            size, lengths = rows * keys * K * d * 4, jnp.full((rows,), keys, jnp.int32)
            us = timed(chain, draw(5, (rows, H, d)), k, v, schedules(tables, lengths), calls=4) / launches * 1e6
            cold = layers * size > COLD_BYTES
            found.append(
                {"shape": name, "rows": rows, "keys": keys, "cold": cold, "us": us, "tb_per_s": size / us / 1e6}
            )
    return found


def time_chunk(name, layers=16):
    H, K, d = SHAPES[name]
    pages = CONTEXT // 128
    k, v = (draw(i, (layers * pages, K, 128, d)) for i in range(2))
    tables = tuple(jax.random.permutation(jax.random.key(9), layers * pages).reshape(layers, -1))

    @functools.partial(jax.jit, static_argnames=("turns",))
    def chain(q, k, v, tables, start, length, turns):
        for table in tables:
            q = chunk_attention(q, k, v, table, start, length, scale=d**-0.5, turns=turns)
        return q

    found = []
    for turns in (True, False):
        for T, start in ((2048, 0), (2048, 2048), (2048, 4096), (2048, 6144), (512, 0), (512, 6144)):
            run = functools.partial(chain, turns=turns)
            us = timed(run, draw(5, (T, H, d)), k, v, tables, start, T, calls=4) / layers * 1e6
            rate = 4 * H * d * sum(range(start + 1, start + T + 1)) / us / 1e6
            found.append({"shape": name, "turns": turns, "tokens": T, "start": start, "us": us, "tflop_per_s": rate})
        whole = sum(row["us"] for row in found[-6:-2]) * layers / 1e3
        found.append({"shape": name, "turns": turns, "tokens": CONTEXT, "layers": layers, "ms": whole})
    return found


def time_schedule(_):
    found = []
    for rows, width in ((8, 64), (8, 1024), (128, 64), (128, 1024)):

        @jax.jit
        def chain(tables, lengths):
            def once(_, lengths):
                schedule = make_schedule(tables, lengths, num_pages=8192, page_size=128, kv_heads=8)
                return lengths + jnp.minimum(sum(x.ravel()[-1] for x in schedule[:2]), 0)

            return lax.fori_loop(0, 100, once, lengths)

        tables = jnp.zeros((rows, width), jnp.int32)
        us = timed(chain, tables, jnp.full((rows,), width * 64, jnp.int32), calls=2) / 100 * 1e6
        found.append({"rows": rows, "pages": width, "us": us})
    return found


def main():
    commit, *sections = [*sys.argv[1:], "unknown"][:1] + sys.argv[2:]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    record = {
        "gpu": jax.devices()[0].device_kind,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "jax": jax.__version__,
        "commit": commit,
    }
    faulthandler.dump_traceback_later(SHAPE_SECONDS, exit=True)
    copying = jax.jit(lambda x: lax.fori_loop(0, 20, lambda _, x: x + 1, x))
    record["copy_tb_per_s"] = copy = 2**31 / timed(copying, jnp.zeros((2**28,), jnp.float32), calls=2) * 20 / 1e12
    print(record, flush=True)
    work = {
        "bits": (check_bits, SHAPES),
        "odd": (check_odd, ODD_SHAPES),
        "error": (check_error, SHAPES),
        "decode": (time_decode, SHAPES),
        "chunk": (time_chunk, SHAPES),
        "schedule": (time_schedule, ("",)),
    }
    for section in sections or work:
        function, names = work[section]
        begin, record[section] = time.time(), []
        for name in names:
            faulthandler.dump_traceback_later(SHAPE_SECONDS, exit=True)
            record[section] += function(name)
            if "OUT" in os.environ:
                path = pathlib.Path(os.environ["OUT"], "attention.json")
                path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"--- {section}, {time.time() - begin:.0f} s")
        for row in record[section]:
            share = f" {row['tb_per_s'] / copy:4.0%} of copy" if "tb_per_s" in row else ""
            print(*(f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in row.values()), share, flush=True)
    faulthandler.cancel_dump_traceback_later()
    checks = [row for section in ("bits", "odd") for row in record.get(section, [])]
    if checks:
        print(f"bits equal in {sum(row['equal'] for row in checks)} of {len(checks)} cases")
        print(*(f"    differs: {row}" for row in checks if not row["equal"]), sep="\n")


if __name__ == "__main__":
    main()
