"""Row products and the decode forward of a standard block on the GPU: bits in every company, errors, times, launches.

    python row_products_check.py COMMIT [SECTION ...]     # bits steps company decode sweep; all but sweep unless named

Each section has a time limit, after which the process ends: a kernel that hangs leaves no traceback of its own. Writes
a JSON record to $OUT, if it is set, after every section; a short table comes last. mlxcel and mlxcel_jax_cuda must be
importable.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda import standard_block
from mlxcel_jax_cuda.kernel_attention import KernelAttention
from mlxcel_jax_cuda.kernels import row_products_sweep
from mlxcel_jax_cuda.kernels.row_products import columns_for, gated_product, gated_reference, row_product
from mlxcel_jax_cuda.kernels.row_products_sweep import EARLY, WEIGHTS, draw, timed
from mlxcel_jax_cuda.kernels.row_products_weight import product_reference
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.standard_block import BlockWeights, Shapes
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.standard_steps import Carried, LayerWeights, PlainSteps

SECTION_SECONDS = 150
TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 200, 256, 300, 512)
BF16_ERROR, F32_ERROR = 4e-3, 2e-5
"""Relative, of norms: results rounded to bf16 from sums that are equal up to their order; and the sums themselves."""
PAGE_SIZE, PAGES_A_ROW, REQUESTS = 128, 4, 40
BLANK = 2**-7
"""What pages hold before: a write to a wrong place shows."""


def frequencies(base: float, count: int) -> tuple[float, ...]:
    return tuple(np.asarray(1 / base ** (np.arange(count) / count), np.float32).tolist())


BLOCKS = {
    "llama-3.2-1b": StandardBlock(
        layers=16,
        vocab_size=128256,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffn=8192,
        eps=1e-5,
        norm_offset=0.0,
        qk_norm=False,
        qkv_bias=False,
        activation="silu",
        scale=64**-0.5,
        frequencies=frequencies(5e5, 32),
    ),
    "qwen3-1.7b": StandardBlock(
        layers=28,
        vocab_size=151936,
        hidden=2048,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffn=6144,
        eps=1e-6,
        norm_offset=0.0,
        qk_norm=True,
        qkv_bias=False,
        activation="silu",
        scale=128**-0.5,
        frequencies=frequencies(1e6, 64),
    ),
}
BLOCKS["qwen2-1.5b, narrower"] = attrs.evolve(BLOCKS["llama-3.2-1b"], qkv_bias=True, heads=16, kv_heads=2, ffn=8960)


def error(found: Any, exact: Any) -> float:
    found, exact = (jnp.asarray(x, jnp.float32).ravel() for x in (found, exact))
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


def random_weights(block: StandardBlock, seed: int = 1) -> BlockWeights:
    """Packed bf16 weights of variance 1 / depth; norms around 1."""
    shapes, D = Shapes.of(block), block.hidden
    seeds = iter(range(seed, seed + 10000))

    def matrix(weight: Any) -> jax.Array:
        return draw(next(seeds), weight.packed_shape, weight.depth**-0.5)

    def vector(size: int, around: float) -> jax.Array:
        return around + 0.1 * draw(next(seeds), (size,), 1.0).astype(jnp.float32)

    def layer() -> LayerWeights:
        d = block.head_dim
        return LayerWeights.of(
            *(matrix(weight) for weight in (shapes.qkv, shapes.o, shapes.gate_up, shapes.down)),
            attn_norm=vector(D, 1.0),
            mlp_norm=vector(D, 1.0),
            bias=vector(shapes.qkv.rows, 0.0) if block.qkv_bias else None,
            head_gains=(vector(d, 1.0), vector(d, 1.0)) if block.qk_norm else None,
            qkv_weight=shapes.qkv,
        )

    head = matrix(shapes.unembed)
    return BlockWeights(head, head, vector(D, 1.0), tuple(layer() for _ in range(block.layers)))


def check_bits(shape: str, name: str) -> dict[str, Any]:
    """Rows in every company, in shuffled places, against each row in the smallest launch."""
    weight = WEIGHTS[shape][name]
    gated, dtype = name == "gate_up", jnp.float32 if name == "unembed" else jnp.bfloat16
    tiles, x = draw(1, weight.packed_shape), draw(2, (512, weight.depth), 1.0)

    def product(rows: jax.Array, columns: int) -> jax.Array:
        if gated:
            return gated_product(tiles, rows, weight, columns=columns)
        return row_product(tiles, rows, weight, columns=columns, dtype=dtype)

    run = jax.jit(product, static_argnums=1)
    alone = jnp.concatenate([run(x[i : i + 8], 8) for i in range(0, 64, 8)])
    shuffled, wrong, cases = np.random.default_rng(7), [], 0
    tokens = TOKENS if name != "unembed" else (1, 16, 32, 64)
    by_columns = [(count, columns_for(count, weight)) for count in tokens]
    by_columns += [(512, 64), (512, 128)] if name == "gate_up" else []
    for count, columns in by_columns:
        whole = -(-count // columns) * columns
        rows = shuffled.integers(64, size=whole)
        y = run(x[:64][rows], columns)[:count]
        cases += 1
        if not bool(((y == alone[rows[:count]]) & jnp.isfinite(y)).all()):
            wrong.append(f"T={count} N={columns}")
    exact = (gated_reference if gated else product_reference)(tiles, x[:64], weight)
    return {"shape": shape, "weight": name, "companies": cases, "differ": wrong, "error": error(alone, exact)}


def place_rows(block: StandardBlock, rows: np.ndarray, count: int, shuffle: int) -> dict[str, Any]:
    """Requests `rows` (their numbers) in shuffled places among `count`: token, position and page of each."""
    chosen = np.random.default_rng(shuffle).permutation(count)[: len(rows)]
    positions, tables = np.full(count, -1, np.int32), np.full((count, PAGES_A_ROW), -1, np.int32)
    ids = np.zeros(count, np.int32)
    for place, row in zip(chosen, rows, strict=True):
        positions[place] = (37 * row) % (PAGES_A_ROW * PAGE_SIZE)
        ids[place] = (7919 * (row + 1)) % block.vocab_size
        tables[place] = PAGES_A_ROW * row + np.arange(PAGES_A_ROW)
    return {"places": chosen, "ids": ids, "positions": positions, "tables": tables}


def pools_of(block: StandardBlock, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    shape = (PAGES_A_ROW * REQUESTS, block.kv_heads, PAGE_SIZE, block.head_dim)
    return tuple(jnp.full(shape, BLANK, dtype) for _ in range(2 * block.layers))


def mix_own(block: StandardBlock, positions: jax.Array, tables: jax.Array) -> standard_block.Attend:
    """A stand-in for attention, row by row and without a sum: q + k + v, k and v read back from the row's own page."""
    place = jnp.maximum(positions, 0)
    page = jnp.maximum(jnp.take_along_axis(tables, (place // PAGE_SIZE)[:, None], axis=1)[:, 0], 0)

    def attend(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        own = keys[page, :, place % PAGE_SIZE] + values[page, :, place % PAGE_SIZE]
        own = jnp.where((positions >= 0)[:, None, None], own, 0)
        heads = q[:, :, : block.heads // block.kv_heads] + own[:, :, None]
        return heads.reshape(len(q), -1).astype(q.dtype)

    return attend


def runner(block: StandardBlock, steps: Any, attention: str = "own", options: dict[str, str] | None = None) -> Any:
    """A jitted decode: (pools, weights, ids, positions, tables) -> (pools, logits). Attention is "own", see `mix_own`,
    "constant" (nothing is launched), or by "kernels"."""
    shapes, group = Shapes.of(block), block.heads // block.kv_heads

    def call(pools: Any, weights: BlockWeights, ids: jax.Array, positions: jax.Array, tables: jax.Array) -> Any:
        def constant(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            return jnp.ones((len(q), block.heads * block.head_dim), q.dtype)

        lens = positions + 1
        fields = Fields(ids[:, None], positions[:, None], lens, lens, lens, lens, lens, tables)
        kernels = KernelAttention(fields, jax.devices()[0].core_count)

        def by_kernels(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            mixed = kernels.attend_columns(q, keys, values, group=group, scale=block.scale)
            return mixed.reshape(len(q), -1)

        attend = {"constant": constant, "kernels": by_kernels, "own": mix_own(block, positions, tables)}[attention]
        return standard_block.decode(block, shapes, steps, weights, pools, ids, positions, tables, attend)

    return jax.jit(call, donate_argnums=0, compiler_options=options)


def check_steps(name: str, columns: int) -> list[dict[str, Any]]:
    """Each launch of a layer against its formula, from the same bf16 inputs."""
    block = attrs.evolve(BLOCKS[name], layers=1)
    shapes, weights = Shapes.of(block), random_weights(block)
    layer, D = weights.layers[0], block.hidden
    rows = place_rows(block, np.arange(columns - 1), columns, 3)
    where = standard_block.rows_of(block, jnp.asarray(rows["positions"]), jnp.asarray(rows["tables"]), PAGE_SIZE)
    x = draw(5, (columns, D), 1.0).astype(jnp.float32)
    carried: Carried = standard_block.begin(x, layer.attn_norm, jnp.bfloat16)
    hopper, plain = HopperSteps(jax.devices()[0].core_count), PlainSteps()
    o_in, down_in = draw(6, (columns, shapes.o.depth), 1.0), draw(7, (columns, shapes.down.depth), 1.0)
    found: list[dict[str, Any]] = []

    def compare(what: str, ours: Any, exact: Any) -> None:
        limit = BF16_ERROR if ours.dtype == jnp.bfloat16 else F32_ERROR
        size = error(ours, exact)
        found.append({"shape": name, "N": columns, "step": what, "error": size, "right": size < limit})

    def run(steps: Any, dtype: Any) -> Any:
        pools = pools_of(block, dtype)

        @jax.jit
        def all_steps(pools: Any, weights: BlockWeights, carried: Carried) -> Any:
            layer = weights.layers[0]
            return (
                steps.qkv(block, shapes.qkv, layer, carried, where, *pools),
                steps.residual(shapes.o, layer.o, o_in, carried.x, layer.mlp_norm),
                steps.gated(shapes.gate_up, layer.gate_up, carried, block.eps),
                steps.residual(shapes.down, layer.down, down_in, carried.x, layer.attn_norm),
                steps.logits(shapes.unembed, weights.unembed, carried, block.eps),
            )

        return all_steps(pools, weights, carried)

    ours, exact = run(hopper, jnp.bfloat16), run(plain, jnp.float32)
    real = np.flatnonzero(rows["positions"] >= 0)
    page, place = np.asarray(where.page)[real], np.asarray(where.place)[real]
    group = block.heads // block.kv_heads
    compare("q", ours[0][0][real][:, :, :group], exact[0][0][real][:, :, :group])
    for what, mine, theirs in (("k", ours[0][1], exact[0][1]), ("v", ours[0][2], exact[0][2])):
        compare(what, mine[page, :, place], theirs[page, :, place])
        written = jnp.zeros(mine.shape, bool).at[page, :, place].set(True)
        untouched = bool((jnp.where(written, BLANK, mine) == BLANK).all())
        found.append({"shape": name, "N": columns, "step": f"{what} elsewhere", "error": 0.0, "right": untouched})
    for what, mine, theirs in (("o", ours[1], exact[1]), ("down", ours[3], exact[3])):
        for part, a, b in zip(Carried._fields, mine, theirs, strict=True):
            compare(f"{what}, {part}", a, b)
    compare("gate_up", ours[2], exact[2])
    compare("unembed", ours[4], exact[4])
    return found


def check_company(name: str) -> dict[str, Any]:
    """Bits of rows among 8, 16 and 32 and alone, in shuffled places, through two layers; error against float32."""
    block = attrs.evolve(BLOCKS[name], layers=2)
    weights, run = random_weights(block), runner(block, HopperSteps(jax.devices()[0].core_count))
    kept: dict[int, tuple[np.ndarray, ...]] = {}
    wrong, cases = [], 0

    def company(rows: np.ndarray, count: int, shuffle: int) -> None:
        nonlocal cases
        placed = place_rows(block, rows, count, shuffle)
        arguments = (jnp.asarray(placed[key]) for key in ("ids", "positions", "tables"))
        pools, logits = run(pools_of(block), weights, *arguments)
        for place, row in zip(placed["places"], rows, strict=True):
            position = placed["positions"][place]
            page = placed["tables"][place][position // PAGE_SIZE]
            written = [np.asarray(pool[page, :, position % PAGE_SIZE]).view(np.uint16) for pool in pools]
            own: tuple[np.ndarray, ...] = (np.asarray(logits[place]).view(np.uint32), *written)
            cases += 1
            if not all((a == b).all() for a, b in zip(kept.setdefault(int(row), own), own, strict=True)):
                wrong.append(f"row {row} among {len(rows)} of {count}")

    for row in range(10):
        company(np.array([row]), 8, row)
    for count, shuffle in ((8, 1), (8, 2), (16, 3), (32, 4), (32, 5)):
        company(np.random.default_rng(shuffle).permutation(36)[:count], count, shuffle)
    placed = place_rows(block, np.arange(8), 8, 0)
    arguments = [jnp.asarray(placed[key]) for key in ("ids", "positions", "tables")]
    _, logits = run(pools_of(block), weights, *arguments)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    _, exact = runner(block, PlainSteps())(pools_of(block, jnp.float32), wide, *arguments)
    _, plain = runner(block, PlainSteps())(pools_of(block), weights, *arguments)
    return {
        "shape": name,
        "rows": cases,
        "differ": wrong,
        "error_to_float32": error(logits, exact),
        "error_of_the_formulas_in_bf16": error(plain, exact),
    }


def launches(compiled: Any) -> int:
    """Kernels of an executable that was compiled without captured graphs."""
    text: str = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(r"[\])}] (?:fusion|custom-call|copy|sort|scatter|convert|transpose)\(", entry))


def time_decode(name: str) -> list[dict[str, Any]]:
    """Microseconds of a whole step and of a layer, host work included: with nothing in the place of attention, and with
    attention over up to 512 keys."""
    block, found = BLOCKS[name], []
    weights, steps = random_weights(block), HopperSteps(jax.devices()[0].core_count)
    shapes = Shapes.of(block)
    layer_bytes = sum(w.bytes for w in (shapes.qkv, shapes.o, shapes.gate_up, shapes.down))
    forms = [(8, True, "constant"), (8, False, "constant"), (32, True, "constant")]
    for count, early, attention in (*forms, (8, True, "kernels"), (8, False, "kernels")):
        placed = place_rows(block, np.arange(count), count, 1)
        arguments = [jnp.asarray(placed[key]) for key in ("ids", "positions", "tables")]
        took, kernels = {}, {}
        for layers in (2, block.layers):
            part = attrs.evolve(block, layers=layers)
            few, pools = weights._replace(layers=weights.layers[:layers]), pools_of(part)
            options = EARLY if early else {}
            run = runner(part, steps, attention, options).lower(pools, few, *arguments).compile()
            kernels[layers], seconds = launches(run), []
            for _ in range(6):
                start = time.perf_counter()
                for _ in range(30):
                    pools, logits = run(pools, few, *arguments)
                logits.block_until_ready()
                seconds.append((time.perf_counter() - start) / 30)
            took[layers] = statistics.median(seconds[1:]) * 1e6
        a_layer = (took[block.layers] - took[2]) / (block.layers - 2)
        row = {"shape": name, "N": count, "early": early, "attention": attention}
        row |= {"us_a_step": took[block.layers], "us_a_layer": a_layer}
        if early:  # in captured graphs they cannot be counted
            row["launches_a_layer"] = (kernels[block.layers] - kernels[2]) / (block.layers - 2)
        found.append({**row, "tb_per_s": layer_bytes / a_layer / 1e6})
    return found


def bandwidth() -> dict[str, float]:
    """TB/s in this run: reading 2.1 GB of random bf16, and an elementwise copy of 1 GiB of float32."""
    x, y = draw(3, (2**25, 32)), jnp.ones((2**28,), jnp.float32)
    read = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, c: jnp.max(x + c), jnp.bfloat16(0)))
    copy = jax.jit(lambda y: lax.fori_loop(0, 20, lambda _, y: y + 1, y))
    times = timed({"read": (read, (x,), 10), "copy": (copy, (y,), 20)}, rounds=3)
    return {"read": x.nbytes / times["read"] / 1e6, "copy": 2 * y.nbytes / times["copy"] / 1e6}


NAMED = [("llama-3.2-1b", name) for name in WEIGHTS["llama-3.2-1b"]] + [("qwen3-1.7b", "qkv"), ("qwen3-1.7b", "down")]
SECTIONS = {
    "bits": lambda: [check_bits(s, n) for s, n in NAMED],
    "steps": lambda: [row for name in BLOCKS for columns in (8, 32) for row in check_steps(name, columns)],
    "company": lambda: [check_company(name) for name in BLOCKS],
    "decode": lambda: [row for name in ("llama-3.2-1b", "qwen3-1.7b") for row in time_decode(name)],
    "sweep": lambda: [attrs.asdict(found) for found in row_products_sweep.sweep(tokens=(8, 32, 64, 512))],
}


def main() -> None:
    commit, *named = sys.argv[1:] or ["unknown"]
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    record: dict[str, Any] = {
        "gpu": device.device_kind,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "jax": jax.__version__,
        "commit": commit,
    }
    faulthandler.dump_traceback_later(SECTION_SECONDS, exit=True)
    record["tb_per_s"] = bandwidth()
    print(record, flush=True)
    for section in named or [name for name in SECTIONS if name != "sweep"]:
        faulthandler.dump_traceback_later(SECTION_SECONDS, exit=True)
        start = time.time()
        record[section] = SECTIONS[section]()
        print(f"--- {section}, {time.time() - start:.0f} s", flush=True)
        for row in record[section]:
            print(*(f"{v:.4g}" if isinstance(v, float) else f"{v}" for v in row.values()), flush=True)
        if "OUT" in os.environ:
            pathlib.Path(os.environ["OUT"], "row-products.json").write_text(json.dumps(record, indent=1) + "\n")
    faulthandler.cancel_dump_traceback_later()
    bits = record.get("bits", []) + record.get("company", [])
    wrong = [row for row in bits if row["differ"]] + [row for row in record.get("steps", []) if not row["right"]]
    print(f"=== {len(bits)} weights and blocks compared in bits, {len(record.get('steps', []))} results with formulas")
    for row in wrong:
        print("WRONG", row)
    for row in record.get("decode", []):
        how, share = "early" if row["early"] else "graphs", row["tb_per_s"] / record["tb_per_s"]["read"]
        print(
            f"{row['shape']:14} N={row['N']:<3} {how:6} {row['attention']:8} {row['us_a_step']:8.1f} us a step"
            f" {row['us_a_layer']:7.1f} us a layer {row['tb_per_s']:5.2f} TB/s {share:4.0%} of read"
        )


if __name__ == "__main__":
    main()
