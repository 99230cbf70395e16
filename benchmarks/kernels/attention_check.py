"""Attention kernels on the GPU: the bits of a token in every company and in chunks, its error, bytes and operations a
second.

    python attention_check.py COMMIT [SECTION ...] [--seconds 150]

Sections: bits decode chunk-bits error odd chunk schedule; all unless named. Checks run in the order of their value, see
`checks`; none begins behind --seconds, and what is left out is named. A check has a limit, after which the process
ends: a kernel that hangs leaves no traceback of its own. Writes a JSON record to $OUT, if it is set, after every row.
"""

import functools
import importlib.util
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy
from checklist import Check, Checklist, arguments, compile_all, facts, out_file
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

CHECK_SECONDS = 120
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


@functools.partial(jax.jit, static_argnames=("most_items", "softcap", "window", "layer", "layers"))
def decode(q, k, v, tables, lengths, most_items=None, softcap=0.0, window=0, layer=None, layers=1):
    held, kv_heads, page_size, d = k.shape
    schedule = make_schedule(
        tables,
        lengths,
        num_pages=held // layers,
        page_size=page_size,
        kv_heads=kv_heads,
        window=window,
        most_items=most_items,
    )
    kind = {"softcap": softcap, "window": window, "layer": layer, "layers": layers}
    return decode_attention(q, k, v, schedule, scale=d**-0.5, **kind)


@functools.partial(jax.jit, static_argnames=("softcap", "window", "layer", "layers"))
def chunk(q, k, v, table, start, length, softcap=0.0, window=0, layer=None, layers=1):
    kind = {"softcap": softcap, "window": window, "layer": layer, "layers": layers}
    return chunk_attention(q, k, v, table, start, length, scale=q.shape[2] ** -0.5, **kind)


def compared(a, b):
    """Equal bits; else the share of values that differ, and the largest difference beside the largest value."""
    same = (a == b) & jnp.isfinite(a)
    apart = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() / jnp.abs(b).max().astype(jnp.float32)
    return {"equal": bool(same.all()), "share": float(1 - same.mean()), "apart": float(apart)}


def tokens_at(i, q, k, v, table, start, length, rows=128):
    """Of the first `length` tokens of a chunk `rows` from token i on, as rows of a decode with the same pages."""
    q = q[i : i + rows]
    places = i + jnp.arange(len(q))
    return q, k, v, jnp.tile(table, (len(q), 1)), jnp.where(places < length, start + 1 + places, 0)


def one_by_one(*chunk, rows=128, **kind):
    """The first `length` tokens of a chunk decoded, `rows` at a time; zeros after them."""
    return jnp.concatenate([decode(*tokens_at(i, *chunk, rows), **kind) for i in range(0, len(chunk[0]), rows)])


def storages(shape, rows, context):
    _, K, d = shape
    k, v = draw(1, (rows, K, context, d)), draw(2, (rows, K, context, d))
    return {context: (k, v, jnp.arange(rows)[:, None])} | {
        size: (paged(k, size, 7)[0], *paged(v, size, 7)) for size in (128, 64)
    }


def check_bits(name):
    """Rows in companies against the row alone over a dense cache."""
    H, _, d = SHAPES[name]
    R, storage = len(LENGTHS), storages(SHAPES[name], len(LENGTHS), CONTEXT)
    lengths, shuffled = jnp.array(LENGTHS), numpy.random.default_rng(7).permutation(len(LENGTHS))
    q = draw(3, (R, H, d)) * 2

    def company(call, rows, page_size=CONTEXT, lengths=lengths, **kind):
        k, v, tables = storage[page_size]
        rows = jnp.array(rows)
        return call(q[rows], k, v, tables[rows], lengths[rows], **kind)

    crowd = [*shuffled, *shuffled[::-1]]
    some = jnp.where(jnp.arange(R) % 3 == 0, 0, lengths)
    cases = {f"8 rows, pages of {size}": (shuffled[4:12], {"page_size": size}) for size in storage} | {
        "32 rows": (crowd, {"page_size": 128}),
        "32 rows, one item each": (crowd, {"page_size": 128, "most_items": 32}),
        "32 rows, five items each": (crowd, {"page_size": 128, "most_items": 170}),
        "32 rows, a third of them empty": (crowd, {"page_size": 128, "lengths": some}),
    }
    programs = [([0], {}), *list(cases.values())[:-1]]  # the last is of the same shapes as one before
    compile_all([company(decode.lower, rows, **kind) for rows, kind in programs])
    alone = jnp.concatenate([company(decode, [r]) for r in range(R)])
    for case, (rows, kind) in cases.items():
        rows = jnp.array(rows)
        real = (kind.get("lengths", lengths)[rows] > 0)[:, None, None]
        wanted = jnp.where(real, alone[rows], 0)
        yield {"shape": name, "case": case, **compared(company(decode, rows, **kind), wanted)}


def check_chunk_bits(name):
    """Tokens of chunks against the same tokens decoded from pages of 128."""
    H, K, d = SHAPES[name]
    storage = storages(SHAPES[name], 6, CONTEXT)
    q, cases = draw(4, (2048, H, d)) * 2, {}

    def stored(T, start, length, page_size, row=3):
        k, v, tables = storage[page_size]
        return q[:T], k, v, tables[row], start, length

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
        given, paged = stored(T, start, length, page_size), stored(T, start, length, 128)
        cases[f"chunk of {T} at {start}, {length} real, pages of {page_size}"] = given, paged, {}
    for start in (0, 1000, 7000):
        given = stored(512, start, 500, 128, row=5)
        cases[f"softcap, chunk at {start}"] = given, given, {"softcap": SOFTCAP}
        places = jnp.arange(max(0, start + 512 - RING), start + 512)
        empty = jnp.zeros((3, K, RING, d), jnp.bfloat16)
        rings = [empty.at[1, :, places % RING].set(x[5, :, places]) for x in storage[CONTEXT][:2]]
        given = (q[:512], *rings, jnp.array([1]), start, 500)
        cases[f"window, chunk at {start}"] = given, given, {"window": WINDOW}
    programs = {}
    for given, paged, kind in cases.values():
        for call, operands in ((chunk, given), (decode, tokens_at(0, *paged))):
            programs.setdefault((call, *(numpy.shape(x) for x in operands), *kind), (call, operands, kind))
    compile_all([call.lower(*operands, **kind) for call, operands, kind in programs.values()])
    for case, (given, paged, kind) in cases.items():
        yield {"shape": name, "case": case, **compared(chunk(*given, **kind), one_by_one(*paged, **kind))}


def check_odd(name):
    """Other numbers of heads: a chunk against its tokens decoded, and its error; and both from pages of the second of
    three layers."""
    shape = H, _, d = ODD_SHAPES[name]
    k, v, tables = storages(shape, 2, 2048)[64]
    q = draw(3, (192, H, d)) * 2
    for start, length in ((0, 192), (1000, 180)):
        a = chunk(q, k, v, tables[1], start, length)
        b = one_by_one(q, k, v, tables[1], start, length, rows=64)
        exact = chunk_reference(q, k, v, tables[1], start, length, scale=d**-0.5)
        case = f"chunk at {start}, {length} real"
        yield {"shape": name, "case": case, **compared(a, b), "error": error(a, exact, length)}
    stacked, of = [jnp.concatenate([x[::-1], x, -x]) for x in (k, v)], {"layer": 1, "layers": 3}
    for call, own, rest in ((chunk, q, (tables[1], 1000, 180)), (decode, q[:2], (tables, jnp.array([2048, 777])))):
        whole, alone = call(own, *stacked, *rest, **of), call(own, k, v, *rest)
        yield {"shape": name, "case": f"{call.__name__} of a layer among three", **compared(whole, alone)}


def error(out, exact, length):
    """Largest of the tokens' relative errors."""
    difference = (out.astype(jnp.float32) - exact)[:length].reshape(length, -1)
    return float(
        (jnp.linalg.norm(difference, axis=1) / jnp.linalg.norm(exact[:length].reshape(length, -1), axis=1)).max()
    )


def check_error(name):
    H, _, d = SHAPES[name]
    k, v, tables = storages(SHAPES[name], 2, CONTEXT)[128]
    q, kinds = draw(4, (512, H, d)) * 2, ({}, {"softcap": SOFTCAP}, {"window": WINDOW})
    compile_all([chunk.lower(q, k, v, tables[1], 0, 500, **kind) for kind in kinds])
    for start in (0, 4000):
        for kind in kinds:
            a = chunk(q, k, v, tables[1], start, 500, **kind)
            exact = chunk_reference(q, k, v, tables[1], start, 500, scale=d**-0.5, **kind)
            zeros, case = bool((a[500:] == 0).all()), f"chunk at {start} {kind or 'plain'}"
            yield {"shape": name, "case": case, "zeros_behind": zeros, "error": error(a, exact, 500)}


def timed(function, *arguments, calls, rounds=7):
    """Median seconds of a call."""
    seconds = []
    for _ in range(rounds + 1):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])


def time_decode(name, rows, layers):
    """A chain of layers over cold pages of 128, long enough that the host's work for a call is hidden."""
    H, K, d = SHAPES[name]
    pages, launches = rows * CONTEXT // 128, max(layers, 64)
    k, v = (draw(i, (layers * pages, K, 128, d)) for i in range(2))
    tables = jax.random.permutation(jax.random.key(9), layers * pages).reshape(layers, rows, -1)

    @jax.jit
    def schedules(tables, lengths):
        return [make_schedule(t, lengths, num_pages=8192, page_size=128, kv_heads=K) for t in tables]

    @jax.jit
    def chain(q, k, v, schedules):
        for i in range(launches):
            q = decode_attention(q, k, v, schedules[i % len(schedules)], scale=d**-0.5)
        return q

    for keys in (256, 1024, 8192):
        size, lengths = rows * keys * K * d * 4, jnp.full((rows,), keys, jnp.int32)
        us = timed(chain, draw(5, (rows, H, d)), k, v, schedules(tables, lengths), calls=4) / launches * 1e6
        cold = layers * size > COLD_BYTES
        yield {"shape": name, "rows": rows, "keys": keys, "cold": cold, "us": us, "tb_per_s": size / us / 1e6}


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

    queries = {T: draw(5, (T, H, d)) for T in (2048, 512)}
    forms = [(turns, T) for turns in (True, False) for T in queries]
    compile_all([chain.lower(queries[T], k, v, tables, 0, T, turns=turns) for turns, T in forms])
    for turns in (True, False):
        whole = 0
        for T, start in ((2048, 0), (2048, 2048), (2048, 4096), (2048, 6144), (512, 0), (512, 6144)):
            run = functools.partial(chain, turns=turns)
            us = timed(run, queries[T], k, v, tables, start, T, calls=4) / layers * 1e6
            rate = 4 * H * d * sum(range(start + 1, start + T + 1)) / us / 1e6
            whole += us * layers / 1e3 if T == 2048 else 0
            yield {"shape": name, "turns": turns, "tokens": T, "start": start, "us": us, "tflop_per_s": rate}
        yield {"shape": name, "turns": turns, "tokens": CONTEXT, "layers": layers, "ms": whole}


def time_schedule():
    for rows, width in ((8, 64), (8, 1024), (128, 64), (128, 1024)):

        @jax.jit
        def chain(tables, lengths):
            def once(_, lengths):
                schedule = make_schedule(tables, lengths, num_pages=8192, page_size=128, kv_heads=8)
                return lengths + jnp.minimum(sum(x.ravel()[-1] for x in schedule[:2]), 0)

            return lax.fori_loop(0, 100, once, lengths)

        tables = jnp.zeros((rows, width), jnp.int32)
        us = timed(chain, tables, jnp.full((rows,), width * 64, jnp.int32), calls=2) / 100 * 1e6
        yield {"rows": rows, "pages": width, "us": us}


def checks():
    """In the order of their value."""

    def of(section, function, names, *rest):
        words = "".join(f" B={rows}" for rows in rest[:1])
        return [Check(section, name + words, functools.partial(function, name, *rest)) for name in names]

    return [
        *of("bits", check_bits, SHAPES),
        *of("decode", time_decode, SHAPES, 1, 128),
        *of("chunk-bits", check_chunk_bits, SHAPES),
        *of("decode", time_decode, SHAPES, 8, 64),
        *of("decode", time_decode, SHAPES, 32, 16),
        *of("error", check_error, SHAPES),
        *of("decode", time_decode, SHAPES, 128, 4),
        *of("odd", check_odd, ODD_SHAPES),
        *of("chunk", time_chunk, SHAPES),
        Check("schedule", "all", time_schedule),
    ]


def main():
    known = list(dict.fromkeys(check.section for check in checks()))
    given = arguments(__doc__, known, known)
    begun = time.monotonic()
    copying = jax.jit(lambda x: lax.fori_loop(0, 20, lambda _, x: x + 1, x))
    copy = 2**31 / timed(copying, jnp.zeros((2**28,), jnp.float32), calls=2) * 20 / 1e12
    left = given.seconds - (time.monotonic() - begun)
    found = Checklist({**facts(given.commit), "copy_tb_per_s": copy}, out_file("attention.json"), left)
    whole = found.run([check for check in checks() if check.section in given.sections], CHECK_SECONDS)
    rows = [row for section in ("bits", "chunk-bits", "odd") for row in found.record.get(section, [])]
    differing = [row for row in rows if not row["equal"]]
    print(f"bits equal in {len(rows) - len(differing)} of {len(rows)} cases")
    print(*(f"    differs: {row}" for row in differing), sep="\n")
    for row in found.record.get("decode", []):
        words = f"{row['shape']:14} B={row['rows']:<3} {row['keys']:5} keys{'' if row['cold'] else ' (warm)'}"
        print(f"{words} {row['us']:8.1f} us {row['tb_per_s']:5.2f} TB/s {row['tb_per_s'] / copy:4.0%} of copy")
    sys.exit(0 if whole and not differing else 1)


if __name__ == "__main__":
    main()
