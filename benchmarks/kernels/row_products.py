"""Row products on the GPU: the bits of a row in every company, bytes and operations a second, and what fusion costs.

    python row_products.py COMMIT [SECTION ...]     # sections: bits few fused many layer barriers; all unless named

Each section has a time limit, after which the process ends: a kernel that hangs leaves no traceback of its own.
Writes a JSON record to $OUT if it is set, after every section.
"""

import faulthandler
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

import attrs
import barrier_stream
import jax
import jax.numpy as jnp
import numpy
from jax import lax
from row_product_kernels import EPSILON, TILE, Form, Weight, combine, reference, ring_slots, silu, stream, tiled

SECTION_SECONDS = 270
COLD_BYTES = 280e6  # of copies that a chain rotates over: several times the 50 MB of L2
WEIGHTS = {
    "llama-3.2-1b": {
        "qkv": Weight(3072, 2048),
        "o": Weight(2048, 2048, 2),
        "gate_up": Weight(16384, 2048, gated=True),
        "down": Weight(2048, 8192, 2),
        "head": Weight(128256, 2048),
    },
    "qwen3-1.7b": {
        "qkv": Weight(4096, 2048),
        "o": Weight(2048, 2048, 2),
        "gate_up": Weight(12288, 2048, gated=True),
        "down": Weight(2048, 6144, 2),
        "head": Weight(151936, 2048),
    },
}
NARROWING = ((4, 2, 4), (4, 2, 6), (3, 2, 4))  # Window(wide, narrow, steps)
COMPANIES = (*range(1, 17), 31, 64, 100, 128, 200, 256, 300, 512, 2048)  # T
NAMED = [
    (shape, name, weight)
    for shape, weights in WEIGHTS.items()
    for name, weight in weights.items()
    if (shape, name) != ("qwen3-1.7b", "o")  # the same weight as the other model's
]


@functools.partial(jax.jit, static_argnums=(1,))
def draw(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * 0.03


def packed(weight, seed):
    return draw(seed, (weight.rows * weight.depth // TILE, TILE))


def unpack(tiles, weight):
    """-> [F, D], or for a gated weight the gate's rows, then the up rows."""
    w = tiles.reshape(weight.rows // TILE, weight.depth // TILE, TILE, TILE).swapaxes(1, 2)
    w = w.reshape(-1, 1 + weight.gated, TILE, weight.depth).swapaxes(0, 1)
    return w.reshape(weight.rows, weight.depth)


def widths(weight):
    """Columns that a launch can have: its tokens fit beside a ring, or a split weight's parts in the registers."""
    narrow = tuple(n for n in (8, 16, 32) if ring_slots(weight, n) >= 3)
    return narrow + ((64, 128) if weight.split > 1 else (64, 128, 256))


def columns_for(T, weight):
    """The narrowest launch that holds T tokens, or the widest one several times."""
    return next((n for n in widths(weight) if n >= T), widths(weight)[-1])


@functools.partial(jax.jit, static_argnames=("weight",))
def rows_alone(tiles, x, weight):
    """Every row through the smallest launch, in eights. x [2048, D] -> [2048, F]."""
    eights = lax.map(lambda g: stream(tiles, g, weight=weight), x.reshape(-1, 8, x.shape[1]))
    return eights.reshape(len(x), -1)


@functools.partial(jax.jit, static_argnames=("weight", "columns"))
def same_bits(tiles, x, alone, rows, T, *, weight, columns):
    """Do the first T of these rows come out as alone? The places after them hold further rows of x."""
    if columns <= 32:
        y = stream(tiles, x[rows], weight=weight)
    else:
        y = tiled(tiles, x[rows], weight=weight, columns=columns)
    equal = ((y == alone[rows]) & jnp.isfinite(y)).all(axis=1)
    return (equal | (jnp.arange(len(rows)) >= T)).all()


def check_bits(weight):
    """Every row alone against the row in every company, in shuffled places."""
    tiles, x, shuffled = packed(weight, 1), draw(2, (2048, weight.depth)) * 30, numpy.random.default_rng(7)
    alone, wrong = rows_alone(tiles, x, weight), []
    cases = [(T, columns_for(T, weight)) for T in sorted({*COMPANIES, *range(1, 301)})]
    cases += [(T, n) for T in (256, 2048) for n in widths(weight) if n >= 64]
    for T, columns in cases:
        rows = shuffled.integers(2048, size=-(-T // columns) * columns)
        if not same_bits(tiles, x, alone, rows, T, weight=weight, columns=columns):
            wrong.append(f"T={T} N={columns}")
    if weight.split > 1:
        apart = combine(stream(tiles, x[:8], weight=weight, form=Form(cluster=False)), weight=weight)
        if not bool((apart == alone[:8]).all()):
            wrong.append("parts through device memory")
    y = reference(x[:64], unpack(tiles, weight))
    if weight.gated:
        y = silu(y[:, : weight.rows // 2]) * y[:, weight.rows // 2 :]
    error = jnp.linalg.norm(alone[:64].astype(jnp.float32) - y) / jnp.linalg.norm(y)
    return {"companies": len(cases) + (weight.split > 1), "differ": wrong, "relative_error": float(error)}


def timed(variants, rounds=7, calls=2):
    """{name: (function, arguments, launches in a call)} -> {name: median microseconds}, rounds interleaved."""
    seconds = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, (function, arguments, count) in variants.items():
            start = time.perf_counter()
            jax.block_until_ready([function(*arguments) for _ in range(calls)])
            seconds[name].append((time.perf_counter() - start) / calls / count)
    return {name: statistics.median(values[1:]) * 1e6 for name, values in seconds.items()}  # the first compiles


NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}  # programmatic dependent launch is lost inside captured graphs


def chain(function, copies, repeats, options=None):
    """function(weight, x) once for each copy, repeated inside one call; each waits for the one before."""

    def call(x, *weights):
        def once(_, x):
            ys, tokens = [], x
            for w in weights:
                y = jax.tree.leaves(function(w, tokens))
                tokens, y = lax.optimization_barrier((tokens, y))
                ys.append(y[0].ravel()[0])
            return x.ravel().at[:copies].set(jnp.stack(ys).astype(x.dtype) * 0.01).reshape(x.shape)

        return lax.fori_loop(0, repeats, once, x)

    return jax.jit(call, compiler_options=options)


def plain(w, x):
    return jnp.einsum("td,fd->tf", x, w)


def time_products(weight, variants, tokens):
    """variants: {name: (function of packed weight and x, x or None)}, and XLA's product -> {name: microseconds}."""
    cold = math.ceil(COLD_BYTES / weight.bytes)
    copies = max(2, cold if tokens < 256 else min(cold, 6))  # many tokens: bound by arithmetic, not by a cold L2
    guess = max(weight.bytes / 3e12, 2 * weight.rows * weight.depth * tokens / 5e14)
    repeats = max(2, int(12e-3 / guess / copies))
    tiles = [packed(weight, i) for i in range(copies)]
    matrices = [w.reshape(weight.rows, weight.depth) for w in tiles]  # any values serve for its timing
    cases = {}
    for name, (function, x) in {"xla": (plain, None), **variants}.items():
        x = draw(3, (tokens, weight.depth)) if x is None else x
        step = chain(function, copies, repeats, NO_GRAPHS if "pdl" in name else None)
        cases[name] = step, (x, *(matrices if name == "xla" else tiles)), copies * repeats
    return timed(cases)


def records(shape, name, weight, tokens, times):
    operations = 2 * weight.rows * weight.depth * tokens
    return [
        {"shape": shape, "weight": name, "T": tokens, "variant": variant, "us": us}
        | {"tb_per_s": weight.bytes / us / 1e6, "tflop_per_s": operations / us / 1e6}
        for variant, us in times.items()
    ]


def launch(w, x, *extra, weight, form):
    """One product, with its second launch where the parts go through device memory."""
    y = stream(w, x, *extra, weight=weight, form=form)
    return combine(y, *extra, weight=weight, form=form) if weight.split > 1 and not form.cluster else y


def few(shape, name, weight):
    """Bytes a second at T = 1 ... 32, each weight a launch of its own."""
    forms = {"stream": (weight, Form()), "pdl": (weight, Form(pdl=True))}
    if weight.split > 1:
        for split in (weight.split, 2 * weight.split):
            other = attrs.evolve(weight, split=split)
            forms[f"split {split}, combine"] = other, Form(cluster=False)
        forms[f"split {split}, cluster"] = other, Form()
    elif name == "qkv":
        forms["split 2, cluster"] = attrs.evolve(weight, split=2), Form()
    variants = {key: (functools.partial(launch, weight=w, form=f), None) for key, (w, f) in forms.items()}
    found = records(shape, name, weight, 1, time_products(weight, {}, 1))
    found += records(shape, name, weight, 8, time_products(weight, variants, 8))
    for tokens in [n for n in (16, 32) if shape == "llama-3.2-1b" and n in widths(weight)]:
        found += records(shape, name, weight, tokens, time_products(weight, {"stream": variants["stream"]}, tokens))
    return found


def fused(shape, name, weight):
    """What the norm before, and the activation or the residual after a product cost in its launch, at 8 columns."""
    D, ones = weight.depth, functools.partial(jnp.ones, dtype=jnp.float32)
    forms = {"plain": (weight, Form(), (), None)}
    if name in ("qkv", "gate_up"):
        forms["scale"] = weight, Form("scale"), (ones((D // TILE, 8)),), None
        forms["norm"] = weight, Form("norm"), (ones((D,)),), draw(3, (D, 8)).astype(jnp.float32)
    if weight.gated:
        forms["without the gate"] = attrs.evolve(weight, gated=False), Form(), (), None
    if weight.split > 1:
        forms["residual"] = weight, Form(epilogue="residual"), (ones((weight.rows, 8)), ones((weight.rows,))), None
    variants = {
        key: (lambda w, x, weight=weight, form=form, extra=extra: launch(w, x, *extra, weight=weight, form=form), x)
        for key, (weight, form, extra, x) in forms.items()
    }
    return records(shape, name, weight, 8, time_products(weight, variants, 8))


def many(shape, name, weight):
    """Operations a second at T = 64 ... 2048."""

    found = []
    for tokens in (64, 128, 256, 512, 1024, 2048) if shape == "llama-3.2-1b" else (256, 2048):
        if name == "head" and tokens > 256:
            continue  # a prompt needs the head for its last token only
        fitting = [n for n in widths(weight) if min(tokens, 128) <= n <= tokens]
        variants = {f"N={n}": (functools.partial(tiled, weight=weight, columns=n), None) for n in fitting}
        found += records(shape, name, weight, tokens, time_products(weight, variants, tokens))
    return found


def our_layer(form, weights, gain, w, carry):
    """A decoder layer without its attention: four launches, norms and residuals inside them."""
    residual, scaled, squares = carry
    run = {name: functools.partial(stream, weight=weight) for name, weight in weights.items()}
    first, last = (attrs.evolve(form, prologue=p, epilogue=e) for p, e in (("scale", "store"), ("none", "residual")))
    qkv = run["qkv"](w[0], scaled, squares, form=first)
    residual, scaled, squares = run["o"](w[1], qkv, residual, gain, form=last)
    h = run["gate_up"](w[2], scaled, squares, form=first)
    return run["down"](w[3], h, residual, gain, form=last)


def norm_layer(weights, gain, w, carry):
    """The same, with the norm computed again in every block, from the residual."""
    residual, _, _ = carry
    first, last = Form("norm"), Form(epilogue="residual")
    qkv = stream(w[0], residual, gain, weight=weights["qkv"], form=first)
    residual, _, _ = stream(w[1], qkv, residual, gain, weight=weights["o"], form=last)
    h = stream(w[2], residual, gain, weight=weights["gate_up"], form=first)
    return stream(w[3], h, residual, gain, weight=weights["down"], form=last)


def xla_layer(weights, gain, w, carry):
    """The same by XLA, the residual [N, D] float32 as the only state."""

    def normed(x):
        return (x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPSILON) * gain).astype(jnp.bfloat16)

    def dot(x, matrix):
        return jnp.einsum("td,fd->tf", x, matrix, preferred_element_type=jnp.float32)

    (x,) = carry
    x = x + dot(dot(normed(x), w[0])[:, : weights["o"].depth].astype(jnp.bfloat16), w[1])
    gate, up = jnp.split(dot(normed(x), w[2]), 2, axis=1)
    return (x + dot((silu(gate) * up).astype(jnp.bfloat16), w[3]),)


def layer(shape, weights, layers=16):
    """A chain of layers: microseconds and bytes a second, one layer's error and the forms' agreement."""
    weights = {name: weight for name, weight in weights.items() if name != "head"}
    size, D = sum(w.bytes for w in weights.values()), weights["qkv"].depth
    tiles = [[packed(w, 10 * i + j) for j, w in enumerate(weights.values())] for i in range(layers)]
    matrices = [[unpack(t, w) for t, w in zip(row, weights.values(), strict=True)] for row in tiles]
    gain, x = 1 + draw(7, (D,)).astype(jnp.float32), draw(8, (8, D)).astype(jnp.float32) * 30
    squares = jnp.sum((x * x).reshape(8, D // TILE, TILE), axis=2).T
    start = (x.T, (x * gain).astype(jnp.bfloat16), squares)

    def run(step, repeats, count=layers, options=None):
        def call(carry, all_weights):
            def once(_, carry):
                for i in range(count):
                    carry = step(weights, gain, all_weights[i], tuple(carry))
                return tuple(carry)

            return lax.fori_loop(0, repeats, once, carry)

        return jax.jit(call, compiler_options=options)

    ours = {"four launches": Form(), "pdl": Form(pdl=True)}
    steps = {name: functools.partial(our_layer, form) for name, form in ours.items()} | {"norm again": norm_layer}
    repeats, check = 8, {}
    exact = run(xla_layer, 1, 1)((x,), matrices)[0]
    results = {name: run(step, 1, 1)(start, tiles) for name, step in steps.items()}
    for name, (residual, scaled, _) in results.items():
        error = jnp.linalg.norm(residual.T - exact) / jnp.linalg.norm(exact - x)
        same = all(bool((a == b).all()) for a, b in zip(results[name], results["four launches"], strict=True))
        check[name] = {"error_to_xla": float(error), "bits_as_four_launches": same}
        check[name]["scaled_error"] = float(
            jnp.linalg.norm(scaled - residual.T * gain) / jnp.linalg.norm(residual.T * gain)
        )
    cases = {
        name: (run(step, repeats, options=NO_GRAPHS if "pdl" in name else None), (start, tiles), repeats * layers)
        for name, step in steps.items()
    }
    for name, T, options in (("xla T=1", 1, None), ("xla T=8", 8, None), ("xla T=8, no graphs", 8, NO_GRAPHS)):
        cases[name] = run(xla_layer, repeats, options=options), ((x[:T],), matrices), repeats * layers
    times = timed(cases)
    return [
        {"shape": shape, "variant": name, "us": us, "tb_per_s": size / us / 1e6, **check.get(name, {})}
        for name, us in times.items()
    ]


def barriers():
    """Microseconds of a grid barrier, hidden and exposed, for several depths of the ring."""
    phases = barrier_stream.Phases()
    tiles, x = draw(1, (phases.rows, TILE)), draw(2, (8, 2048))
    exact = barrier_stream.reference(tiles[: phases.rows // phases.layers], x, barrier_stream.Phases(layers=1))
    one = barrier_stream.walk(tiles, x, phases=barrier_stream.Phases(layers=1))
    error = float(jnp.linalg.norm(one - exact) / jnp.linalg.norm(exact))
    plain = [(2, barrier_stream.Window(n, n, 0)) for n in (11, 4, 3, 2)]
    fine = [(1, barrier_stream.Window(5, 5, 0))]
    narrowing = [(2, barrier_stream.Window(*x)) for x in NARROWING]
    cases = {
        (form, tokens, tiles_a_slot, window): (
            functools.partial(
                barrier_stream.walk, barrier=form, tokens=tokens, tiles_a_slot=tiles_a_slot, window=window
            ),
            (tiles, x),
            1,
        )
        for tiles_a_slot, window in plain + fine + narrowing
        for form in (("none", "hidden", "exposed") if (tiles_a_slot, window) in plain else ("none", "hidden"))
        for tokens in (False, True)
    }
    expected = barrier_stream.walk(tiles, x, barrier="none", tokens=False)
    times, found = timed(cases, calls=10), []
    for (form, tokens, tiles_a_slot, window), us in times.items():
        out = cases[form, tokens, tiles_a_slot, window][0](tiles, x)
        found.append(
            {
                "barrier": form,
                "tokens": tokens,
                "slot_kib": 8 * tiles_a_slot,
                "window": attrs.astuple(window),
                "us": us,
                "tb_per_s": phases.rows * TILE * 2 / us / 1e6,
                "us_a_phase_over_none": (us - times["none", False, tiles_a_slot, window]) / phases.barriers,
                "bits_equal": bool((out == expected).all()),
                "error_of_one_layer": error,
            }
        )
    return found


def bandwidth():
    """TB/s of this machine in this run: reading 4.2 GB of random bf16, and an elementwise copy of 1 GiB of float32."""
    x, y = packed(Weight(8 * 128256, 2048), 3), jnp.ones((2**28,), jnp.float32)
    read = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, c: jnp.max(x + c), jnp.bfloat16(0)))
    copy = jax.jit(lambda y: lax.fori_loop(0, 20, lambda _, y: y + 1, y))
    times = timed({"read": (read, (x,), 10), "copy": (copy, (y,), 20)})
    return {"read": x.nbytes / times["read"] / 1e6, "copy": 2 * y.nbytes / times["copy"] / 1e6}


def main():
    commit, *sections = [*sys.argv[1:], "unknown"][:1] + sys.argv[2:]
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    record = {
        "gpu": device.device_kind,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "jax": jax.__version__,
        "commit": commit,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    faulthandler.dump_traceback_later(SECTION_SECONDS, exit=True)
    record["tb_per_s"] = bandwidth()
    read = record["tb_per_s"]["read"]
    print(record, flush=True)
    work = {
        "bits": lambda: [{"shape": s, "weight": n, **check_bits(w)} for s, n, w in NAMED],
        "few": lambda: [r for named in NAMED for r in few(*named)],
        "fused": lambda: [r for named in NAMED if named[1] != "head" for r in fused(*named)],
        "many": lambda: [r for named in NAMED for r in many(*named)],
        "layer": lambda: [r for shape, weights in WEIGHTS.items() for r in layer(shape, weights)],
        "barriers": barriers,
    }
    for section in sections or work:
        faulthandler.dump_traceback_later(SECTION_SECONDS, exit=True)
        start = time.time()
        record[section] = work[section]()
        print(f"--- {section}, {time.time() - start:.0f} s")
        for row in record[section]:
            share = f" {row['tb_per_s'] / read:4.0%} of read" if "tb_per_s" in row else ""
            print(*(f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in row.values()), share, flush=True)
        if "OUT" in os.environ:
            pathlib.Path(os.environ["OUT"], "row-products.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
