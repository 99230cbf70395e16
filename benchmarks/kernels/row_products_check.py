"""Row products and the decode forward of a standard block on the GPU: bits in every company, errors, times, launches.

    python row_products_check.py COMMIT [SECTION ...] [--seconds 150]

Sections: bits decode steps company more-bits sweep; all but sweep unless named. Checks run in the order of their value,
see `checks`; none begins behind --seconds, and what is left out is named. A check has a limit, after which the process
ends: a kernel that hangs leaves no traceback of its own. Writes a JSON record to $OUT, if it is set, after every row; a
short table comes last. mlxcel and mlxcel_jax_cuda must be importable.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from checklist import Check, Checklist, arguments, compile_all, facts, out_file
from jax import lax

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda import standard_block
from mlxcel_jax_cuda.block_arrays import IN_LAYERS, BlockWeights, Shapes
from mlxcel_jax_cuda.kernel_attention import KernelAttention
from mlxcel_jax_cuda.kernels import row_products_sweep
from mlxcel_jax_cuda.kernels.row_products import columns_for, gated_product, gated_reference, row_product
from mlxcel_jax_cuda.kernels.row_products_stream import COLUMNS as FEW
from mlxcel_jax_cuda.kernels.row_products_sweep import EARLY, WEIGHTS, draw, timed
from mlxcel_jax_cuda.kernels.row_products_weight import Stacked, product_reference
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.standard_steps import Carried, PlainSteps, Pools, begin
from mlxcel_jax_cuda.standard_tiled import TiledSteps

CHECK_SECONDS = 150
FIRST_TOKENS = (1, 8, 9, 17, 64, 65, 256)
"""One of every launch there is, about."""
TOKENS = (2, 7, 15, 16, 31, 32, 33, 63, 100, 128, 129, 200, 300, 512)
HEAD_TOKENS, MORE_HEAD_TOKENS = (1, 16, 64), (32,)
BF16_ERROR, F32_ERROR = 4e-3, 2e-5
"""Relative, of norms: results rounded to bf16 from sums that are equal up to their order; and the sums themselves."""
PAGE_SIZE, PAGES_A_ROW, REQUESTS = 128, 4, 40
PAGES = PAGES_A_ROW * REQUESTS
REPEATS = 20
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
    shapes, L, D, d = Shapes.of(block), block.layers, block.hidden, block.head_dim
    seeds = iter(range(seed, seed + 10000))

    def matrix(weight: Any) -> jax.Array:
        return draw(next(seeds), weight.packed_shape, weight.depth**-0.5)

    def small(size: tuple[int, ...], around: float) -> jax.Array:
        return around + 0.1 * draw(next(seeds), size, 1.0).astype(jnp.float32)

    tiles = [matrix(shapes[group]) for _ in range(L) for group in IN_LAYERS]
    return BlockWeights(
        tiles=jnp.concatenate(tiles),
        head=matrix(shapes.unembed),
        gains=small((2 * L + 1, D), 1.0),
        embed=None,
        bias=small((L, shapes.qkv.rows), 0.0) if block.qkv_bias else None,
        head_gains=small((L, 2, 2, d // 2), 1.0) if block.qk_norm else None,
    )


def check_bits(shape: str, name: str, tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows in every company, in shuffled places, and by the tiles of the second of two layers, against each row in the
    smallest launch."""
    weight = WEIGHTS[shape][name]
    gated, dtype = name == "gate_up", jnp.float32 if name == "unembed" else jnp.bfloat16
    tiles, x = draw(1, weight.packed_shape), draw(2, (512, weight.depth), 1.0)

    def product(tiles: jax.Array, rows: jax.Array, columns: int) -> jax.Array:
        of: Any = {} if len(tiles) == at.stride else {"layer": 1, "at": at}
        if gated:
            return gated_product(tiles, rows, weight, columns=columns, **of)
        return row_product(tiles, rows, weight, columns=columns, dtype=dtype, **of)

    run, at = jax.jit(product, static_argnums=2), Stacked(0, weight.packed_shape[0])
    by_columns = [(count, columns_for(count, weight)) for count in tokens]
    by_columns += [(512, 64), (512, 128)] if gated and 512 in tokens else []
    whole = {(count, columns): -(-count // columns) * columns for count, columns in by_columns}
    launched = {(8, 8), *((size, columns) for (_, columns), size in whole.items())}
    compile_all(run.lower(tiles, x[:size], columns) for size, columns in sorted(launched))
    alone = jnp.concatenate([run(tiles, x[i : i + 8], 8) for i in range(0, 64, 8)])
    shuffled, wrong = np.random.default_rng(7), []
    for count, columns in by_columns:
        rows = shuffled.integers(64, size=whole[count, columns])
        y = run(tiles, x[:64][rows], columns)[:count]
        if not bool(((y == alone[rows[:count]]) & jnp.isfinite(y)).all()):
            wrong.append(f"T={count} N={columns}")
    layers = jnp.concatenate([-tiles, tiles])
    for size, columns in {min(launched), max(launched)}:
        if not bool((run(layers, x[:size], columns)[:8] == alone[:8]).all()):
            wrong.append(f"T={size} N={columns} of a layer among two")
    exact = (gated_reference if gated else product_reference)(tiles, x[:64], weight)
    yield {
        "shape": shape, "weight": name, "companies": len(by_columns), "tokens": list(tokens), "differ": wrong,
        "error": error(alone, exact),
    }  # fmt: skip


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


def pools_of(block: StandardBlock, dtype: Any = jnp.bfloat16) -> Pools:
    shape = (block.layers * PAGES, block.kv_heads, PAGE_SIZE, block.head_dim)
    return jnp.full(shape, BLANK, dtype), jnp.full(shape, BLANK, dtype)


def mix_own(block: StandardBlock, positions: jax.Array, tables: jax.Array) -> standard_block.Attend:
    """A stand-in for attention, row by row and without a sum: q + k + v, k and v read back from the row's own page."""
    place = jnp.maximum(positions, 0)
    page = jnp.maximum(jnp.take_along_axis(tables, (place // PAGE_SIZE)[:, None], axis=1)[:, 0], 0)

    def attend(q: jax.Array, pools: Pools, layer: int) -> jax.Array:
        keys, values = (pool[layer * PAGES + page, :, place % PAGE_SIZE] for pool in pools)
        own = keys + values
        own = jnp.where((positions >= 0)[:, None, None], own, 0)
        heads = q[:, :, : block.heads // block.kv_heads] + own[:, :, None]
        return heads.reshape(len(q), -1).astype(q.dtype)

    return attend


def runner(block: StandardBlock, steps: Any, attention: str = "own", options: dict[str, str] | None = None) -> Any:
    """A jitted decode: (pools, weights, ids, positions, tables) -> (pools, logits). Attention is "own", see `mix_own`,
    "constant" (nothing is launched), or by "kernels"."""
    shapes, group = Shapes.of(block), block.heads // block.kv_heads

    def call(pools: Any, weights: BlockWeights, ids: jax.Array, positions: jax.Array, tables: jax.Array) -> Any:
        def constant(q: jax.Array, pools: Pools, layer: int) -> jax.Array:
            return jnp.ones((len(q), block.heads * block.head_dim), q.dtype)

        lens = positions + 1
        fields = Fields(ids[:, None], positions[:, None], lens, lens, lens, lens, lens, tables)
        kernels = KernelAttention(fields, jax.devices()[0].core_count)

        def by_kernels(q: jax.Array, pools: Pools, layer: int) -> jax.Array:
            mixed = kernels.attend_columns(q, *pools, layer=layer, layers=block.layers, group=group, scale=block.scale)
            return mixed.reshape(len(q), -1)

        attend = {"constant": constant, "kernels": by_kernels, "own": mix_own(block, positions, tables)}[attention]
        return standard_block.decode(block, shapes, steps, weights, pools, ids, positions, tables, attend)

    return jax.jit(call, donate_argnums=0, compiler_options=options)


def check_steps(name: str, columns: int) -> list[dict[str, Any]]:
    """Each launch of the second of two layers against its formula, from the same bf16 inputs; of many tokens, also
    whether it gives the same bits every time, since blocks of several warpgroups can disturb one another."""
    block, at = attrs.evolve(BLOCKS[name], layers=2), 1
    shapes, weights = Shapes.of(block), random_weights(block)
    D = block.hidden
    rows = place_rows(block, np.arange(min(columns, REQUESTS) - 1), columns, 3)
    where = standard_block.rows_of(block, jnp.asarray(rows["positions"]), jnp.asarray(rows["tables"]), PAGE_SIZE)
    x = draw(5, (columns, D), 1.0).astype(jnp.float32)
    carried = begin(x, weights.gains[2 * at], jnp.bfloat16)
    sms, plain = jax.devices()[0].core_count, PlainSteps()
    hopper: Any = HopperSteps(sms) if columns in FEW else TiledSteps(sms)
    o_in, down_in = draw(6, (columns, shapes.o.depth), 1.0), draw(7, (columns, shapes.down.depth), 1.0)
    found: list[dict[str, Any]] = []

    def compare(what: str, ours: Any, exact: Any) -> None:
        limit = BF16_ERROR if ours.dtype == jnp.bfloat16 else F32_ERROR
        size = error(ours, exact)
        found.append({"shape": name, "N": columns, "step": what, "error": size, "right": size < limit})

    def run(steps: Any, dtype: Any, times: int = 1) -> Any:
        pools, group = pools_of(block, dtype), block.heads // block.kv_heads

        @jax.jit
        def all_steps(pools: Any, weights: BlockWeights, carried: Carried) -> Any:
            q, (keys, values) = steps.qkv(block, shapes, weights, at, carried, where, pools)
            return (
                (q[:, :, :group], keys[at * PAGES :], values[at * PAGES :], keys[: at * PAGES]),
                steps.residual("o", shapes, weights, at, o_in, carried.x),
                steps.gated(shapes, weights, at, carried, block.eps),
                steps.residual("down", shapes, weights, at, down_in, carried.x),
                steps.logits(shapes, weights, carried, block.eps),
            )

        made = all_steps(pools, weights, carried)
        for _ in range(times - 1):
            again = jax.tree.leaves(all_steps(pools, weights, carried))
            if not all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(made), again, strict=True)):
                found.append({"shape": name, "N": columns, "step": "the same again", "error": 1.0, "right": False})
                break
        return made

    ours = run(hopper, jnp.bfloat16, REPEATS if columns not in FEW else 1)
    exact = run(plain, jnp.float32)
    real = np.flatnonzero(rows["positions"] >= 0)
    page, place = np.asarray(where.page)[real], np.asarray(where.place)[real]
    compare("q", ours[0][0][real], exact[0][0][real])
    for what, mine, theirs in (("k", ours[0][1], exact[0][1]), ("v", ours[0][2], exact[0][2])):
        compare(what, mine[page, :, place], theirs[page, :, place])
        written = jnp.zeros(mine.shape, bool).at[page, :, place].set(True)
        untouched = bool((jnp.where(written, BLANK, mine) == BLANK).all())
        found.append({"shape": name, "N": columns, "step": f"{what} elsewhere", "error": 0.0, "right": untouched})
    untouched = bool((ours[0][3] == BLANK).all())
    found.append({"shape": name, "N": columns, "step": "k of the other layer", "error": 0.0, "right": untouched})
    for what, mine, theirs in (("o", ours[1], exact[1]), ("down", ours[3], exact[3])):
        for part, a, b in zip(Carried._fields, mine, theirs, strict=True):
            compare(f"{what}, {part}", a, b)
    compare("gate_up", ours[2], exact[2])
    compare("unembed", ours[4], exact[4])
    return found


def check_company(name: str) -> Iterator[dict[str, Any]]:
    """Bits of rows among 8, 16 and 32 and alone, in shuffled places, through two layers; error against float32."""
    block = attrs.evolve(BLOCKS[name], layers=2)
    weights, run = random_weights(block), runner(block, HopperSteps(jax.devices()[0].core_count))
    exactly, plainly = runner(block, PlainSteps()), runner(block, PlainSteps())
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)

    def placed_arguments(rows: np.ndarray, count: int, shuffle: int) -> tuple[dict[str, Any], list[jax.Array]]:
        placed = place_rows(block, rows, count, shuffle)
        return placed, [jnp.asarray(placed[key]) for key in ("ids", "positions", "tables")]

    eight = placed_arguments(np.arange(8), 8, 0)[1]
    lowered = [
        run.lower(pools_of(block), weights, *placed_arguments(np.arange(count), count, 0)[1]) for count in (8, 16, 32)
    ]
    lowered += [
        exactly.lower(pools_of(block, jnp.float32), wide, *eight),
        plainly.lower(pools_of(block), weights, *eight),
    ]
    compile_all(lowered)
    kept: dict[int, tuple[np.ndarray, ...]] = {}
    wrong, cases = [], 0

    def company(rows: np.ndarray, count: int, shuffle: int) -> None:
        nonlocal cases
        placed, arguments = placed_arguments(rows, count, shuffle)
        pools, logits = run(pools_of(block), weights, *arguments)
        for place, row in zip(placed["places"], rows, strict=True):
            position = placed["positions"][place]
            page = placed["tables"][place][position // PAGE_SIZE] + np.arange(block.layers) * PAGES
            written = [np.asarray(pool[page, :, position % PAGE_SIZE]).view(np.uint16) for pool in pools]
            own: tuple[np.ndarray, ...] = (np.asarray(logits[place]).view(np.uint32), *written)
            cases += 1
            if not all((a == b).all() for a, b in zip(kept.setdefault(int(row), own), own, strict=True)):
                wrong.append(f"row {row} among {len(rows)} of {count}")

    for row in range(10):
        company(np.array([row]), 8, row)
    for count, shuffle in ((8, 1), (8, 2), (16, 3), (32, 4), (32, 5)):
        company(np.random.default_rng(shuffle).permutation(36)[:count], count, shuffle)
    _, logits = run(pools_of(block), weights, *eight)
    _, exact = exactly(pools_of(block, jnp.float32), wide, *eight)
    _, plain = plainly(pools_of(block), weights, *eight)
    yield {
        "shape": name, "rows": cases, "differ": wrong, "error_to_float32": error(logits, exact),
        "error_of_the_formulas_in_bf16": error(plain, exact),
    }  # fmt: skip


def first_layers(weights: BlockWeights, shapes: Shapes, layers: int) -> BlockWeights:
    """With the norm behind the last of them in the place of the final one."""
    bias, head_gains = (None if array is None else array[:layers] for array in (weights.bias, weights.head_gains))
    tiles, gains = weights.tiles[: layers * shapes.layer_rows], weights.gains[: 2 * layers + 1]
    return weights._replace(tiles=tiles, gains=gains, bias=bias, head_gains=head_gains)


def launches(compiled: Any) -> int:
    """Kernels of an executable that was compiled without captured graphs."""
    text: str = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    return len(re.findall(r"[\])}] (?:fusion|custom-call|copy|sort|scatter|convert|transpose)\(", entry))


def time_decode(name: str) -> Iterator[dict[str, Any]]:
    """Microseconds of a whole step and of a layer, host work included: with attention over up to 512 keys, and with
    nothing in its place."""
    block = BLOCKS[name]
    weights, steps = random_weights(block), HopperSteps(jax.devices()[0].core_count)
    shapes = Shapes.of(block)
    layer_bytes = sum(w.bytes for w in (shapes.qkv, shapes.o, shapes.gate_up, shapes.down))
    few = {2: first_layers(weights, shapes, 2), block.layers: weights}
    forms = [(8, True, "kernels"), (8, False, "kernels"), (8, True, "constant"), (8, False, "constant")]
    forms.append((32, True, "constant"))

    def placed_arguments(count: int) -> list[jax.Array]:
        placed = place_rows(block, np.arange(count), count, 1)
        return [jnp.asarray(placed[key]) for key in ("ids", "positions", "tables")]

    def lowered(count: int, early: bool, attention: str, layers: int) -> Any:
        part = attrs.evolve(block, layers=layers)
        run = runner(part, steps, attention, EARLY if early else {})
        return run.lower(jax.eval_shape(partial(pools_of, part)), few[layers], *placed_arguments(count))

    wanted = [(*form, layers) for form in forms for layers in few]
    compiled = dict(zip(wanted, compile_all(lowered(*each) for each in wanted), strict=True))
    for count, early, attention in forms:
        arguments, took, kernels = placed_arguments(count), {}, {}
        for layers in few:
            run, pools = compiled[count, early, attention, layers], pools_of(attrs.evolve(block, layers=layers))
            kernels[layers], seconds = launches(run), []
            for _ in range(6):
                start = time.perf_counter()
                for _ in range(30):
                    pools, logits = run(pools, few[layers], *arguments)
                logits.block_until_ready()
                seconds.append((time.perf_counter() - start) / 30)
            took[layers] = statistics.median(seconds[1:]) * 1e6
        a_layer = (took[block.layers] - took[2]) / (block.layers - 2)
        row = {"shape": name, "N": count, "early": early, "attention": attention}
        row |= {"us_a_step": took[block.layers], "us_a_layer": a_layer}
        if early:  # in captured graphs they cannot be counted
            row["launches_a_layer"] = (kernels[block.layers] - kernels[2]) / (block.layers - 2)
        yield {**row, "tb_per_s": layer_bytes / a_layer / 1e6}


def bandwidth() -> dict[str, float]:
    """TB/s in this run: reading 2.1 GB of random bf16, and an elementwise copy of 1 GiB of float32."""
    x, y = draw(3, (2**25, 32)), jnp.ones((2**28,), jnp.float32)
    read = jax.jit(lambda x: lax.fori_loop(0, 10, lambda _, c: jnp.max(x + c), jnp.bfloat16(0)))
    copy = jax.jit(lambda y: lax.fori_loop(0, 20, lambda _, y: y + 1, y))
    times = timed({"read": (read, (x,), 10), "copy": (copy, (y,), 20)}, rounds=3)
    return {"read": x.nbytes / times["read"] / 1e6, "copy": 2 * y.nbytes / times["copy"] / 1e6}


def checks() -> list[Check]:
    """In the order of their value: bits of every weight's launches, the time of a step, what a launch computes, and
    then more of the same."""
    weights = [(shape, name) for shape in WEIGHTS for name in WEIGHTS[shape]]

    def bits(section: str, tokens: Sequence[int], of_head: Sequence[int]) -> list[Check]:
        return [
            Check(
                section, f"{shape} {name}", partial(check_bits, shape, name, of_head if name == "unembed" else tokens)
            )
            for shape, name in weights
        ]

    return [
        *bits("bits", FIRST_TOKENS, HEAD_TOKENS),
        *(Check("decode", name, partial(time_decode, name)) for name in ("llama-3.2-1b", "qwen3-1.7b")),
        *(Check("steps", f"{name} N={n}", partial(check_steps, name, n)) for n in (8, 32, 64, 512) for name in BLOCKS),
        *(Check("company", name, partial(check_company, name)) for name in BLOCKS),
        *bits("more-bits", TOKENS, MORE_HEAD_TOKENS),
        Check("sweep", "all", lambda: map(attrs.asdict, row_products_sweep.sweep(tokens=(8, 32, 64, 512)))),
    ]


def main() -> None:
    known = list(dict.fromkeys(check.section for check in checks()))
    given = arguments(__doc__, known, [name for name in known if name != "sweep"])
    begun = time.monotonic()
    record = {**facts(given.commit), "tb_per_s": bandwidth()}
    left = given.seconds - (time.monotonic() - begun)
    found = Checklist(record, out_file("row-products.json"), left)
    whole = found.run([check for check in checks() if check.section in given.sections], CHECK_SECONDS)
    right = told(found.record)
    sys.exit(0 if whole and right else 1)


def told(record: dict[str, Any]) -> bool:
    """The short table. Whether nothing is wrong."""
    bits = [row for section in ("bits", "more-bits", "company") for row in record.get(section, [])]
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
    return not wrong


if __name__ == "__main__":
    main()
