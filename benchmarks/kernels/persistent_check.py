"""The persistent decode step on the GPU: first contact, errors, bits, times, and where the time goes.

    python persistent_check.py [SECTION ...]     # tiny empty-qwen0.6 bits-llama bits-qwen time-llama time-qwen
                                                 # timeline-llama timeline-qwen parts-… windows-…; the first six unless
                                                 # named. tiny-32, bits-llama-32, time-qwen-16: of so many rows, not 8

A kernel whose blocks wait for one another can hang, and a hang leaves no traceback: each section is a process of its
own, which is ended after its time. Writes a JSON record to $OUT, if it is set, after every section. mlxcel_jax_cuda
must be importable.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel_jax_cuda.kernels.attention_schedule import Schedule, make_schedule
from mlxcel_jax_cuda.kernels.persistent_reference import step_reference, tokens_of
from mlxcel_jax_cuda.kernels.persistent_shape import FEW, Step, Window, weight_for
from mlxcel_jax_cuda.kernels.persistent_step import Made, Stacked, Tokens, decode_step
from mlxcel_jax_cuda.kernels.persistent_watch import EVENTS
from mlxcel_jax_cuda.kernels.row_products_weight import Weight

SECTION_SECONDS = 140
FIRST = ("tiny", "empty-qwen0.6", "bits-llama", "bits-qwen", "time-llama", "time-qwen")
KERNEL_ERROR = 1e-2
"""Relative, of norms: sums in another order, and values that round to bf16 the other way, through two layers."""
PAGE_SIZE = 128
STEPS, CHAIN = 64, 8
"""Launches of a timing, and of one program: a host that issues them one by one takes as long as the device."""


def shape(name: str, **changes: Any) -> Step:
    sizes: dict[str, tuple[int, ...]] = {  # layers, V, D, H, K, d, ffn
        "tiny": (2, 512, 256, 8, 4, 64, 512),
        "tiny-128": (2, 512, 256, 4, 2, 128, 512),
        "pieces": (2, 1024, 1024, 16, 4, 64, 6144),  # of gate_up, down and the head, of 32 rows
        "llama": (16, 128256, 2048, 32, 8, 64, 8192),
        "qwen": (28, 151936, 2048, 16, 8, 128, 6144),
        "qwen0.6": (28, 151936, 1024, 16, 8, 128, 3072),  # blocks that add no parts of anything
    }
    layers, V, D, H, K, d, ffn = sizes[name]
    layers, V = changes.pop("layers", layers), changes.pop("V", V)
    return Step(
        **{
            "layers": layers,
            "qkv": weight_for((H + 2 * K) * d, D, d // 2),
            "o": weight_for(D, H * d),
            "gate_up": weight_for(2 * ffn, D, ffn),
            "down": weight_for(D, ffn),
            "head": Weight(V, D),
            "heads": H,
            "kv_heads": K,
            "head_dim": d,
            "pages": 8,
            "page_size": PAGE_SIZE,
            "scale": d**-0.5,
            "eps": 1e-5,
            "normed": d == 128,
            **changes,
        }
    )


@functools.partial(jax.jit, static_argnames=("shape", "scale"))
def draw(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Random bf16 without a float32 copy of it: uniform bits as small integers."""
    return (jax.random.bits(key, shape, jnp.uint8).astype(jnp.bfloat16) - 127.5) * (scale / 73.9)


def model(step: Step, seed: int = 1) -> Stacked:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    L, D, d = step.layers, step.hidden, step.head_dim

    def near_one(*shape: int) -> jax.Array:
        return 1 + 0.1 * jax.random.normal(next(keys), shape, jnp.float32)

    return Stacked(
        draw(next(keys), (L * step.layer_rows, 64), 0.7 * D**-0.5),
        draw(next(keys), step.head.packed_shape, D**-0.5),
        near_one(2 * L + 1, D),
        0.1 * near_one(L, step.qkv.rows) if step.bias else None,
        near_one(L, 2, 2, d // 2) if step.normed else None,
    )


@attrs.frozen
class Batch:
    """The rows of a step with their KV. lengths: keys of each row with the step's token, 0 for padding."""

    tokens: Tokens
    keys: jax.Array
    values: jax.Array
    tables: jax.Array
    lengths: jax.Array
    schedule: Schedule

    @classmethod
    def of(cls, step: Step, stacked: Stacked, embedded: jax.Array, lengths: list[int], tables: Any, pool: Any) -> Batch:
        """embedded [N, D]; tables [N, P]; pool: keys and values."""
        seq_lens, tables = jnp.asarray(lengths, jnp.int32), jnp.asarray(tables, jnp.int32)
        position = jnp.maximum(seq_lens - 1, 0)
        page = jnp.take_along_axis(tables, (position // step.page_size)[:, None], axis=1)[:, 0]
        page = jnp.where(seq_lens > 0, page, -1).astype(jnp.int32)
        half = step.head_dim // 2
        angles = (5e5 ** (-jnp.arange(half) / half))[:, None] * position
        place = (position % step.page_size).astype(jnp.int32)
        tokens = tokens_of(embedded, stacked.gains[0], (jnp.cos(angles), jnp.sin(angles)), page, place)
        balanced = len(lengths) > FEW and max(lengths) <= 2 * min(lengths)  # as `step_begin` has it, about
        schedule = make_schedule(
            tables, seq_lens.at[0].max(1), num_pages=step.pages, page_size=step.page_size, kv_heads=step.kv_heads,
            most_items=len(lengths) if balanced else None,
        )  # fmt: skip
        return cls(tokens, pool[0], pool[1], tables, seq_lens, schedule)


def pools(step: Step, seed: int = 7) -> tuple[jax.Array, jax.Array]:
    size = (step.layers * step.pages, step.kv_heads, step.page_size, step.head_dim)
    first, second = jax.random.split(jax.random.key(seed))
    return draw(first, size, 1.0), draw(second, size, 1.0)


def run(step: Step, stacked: Stacked, batch: Batch) -> Made:
    made: Made = decode_step(step, stacked, batch.tokens, batch.keys, batch.values, batch.schedule)
    return made


reference = jax.jit(step_reference, static_argnums=0)


def error(found: jax.Array, exact: jax.Array) -> float:
    found, exact = found.astype(jnp.float32), exact.astype(jnp.float32)
    return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))


def ended(step: Step, made: Made, seconds: float = 20, wait: float = 0.01) -> Made:
    """Waits for a launch, and ends the process if the launch does not end."""
    begun = time.monotonic()
    logits: Any = made.logits
    while not logits.is_ready():
        if time.monotonic() - begun > seconds:
            print(f"HANGS: {step}", flush=True)
            os._exit(3)
        time.sleep(wait)
    return made


def compare(name: str, lengths: list[int], **changes: Any) -> dict[str, Any]:
    """Against the formulas: x behind the layers (its change), logits, and the KV; then the same launch again; then the
    rows by themselves and in other places."""
    pages_a_row = max(1, -(-max(lengths) // changes.get("page_size", PAGE_SIZE)))
    N = len(lengths)
    step = shape(name, **{"pages": N * pages_a_row + 1, "rows": N, **changes})
    stacked, pool, rng = model(step), pools(step), np.random.default_rng(3)
    embedded = jax.random.normal(jax.random.key(5), (N, step.hidden), jnp.float32)
    tables = rng.permutation(N * pages_a_row).reshape(N, pages_a_row)
    batch = Batch.of(step, stacked, embedded, lengths, tables, pool)
    made = ended(step, run(step, stacked, batch))
    if made.places is not None:
        places = np.asarray(made.places)
        print("gave up at", places.tolist() if places[1].any() else "no wait", flush=True)
    exact = reference(step, stacked, batch.tokens, *pool, batch.tables, batch.lengths)
    real = np.flatnonzero(np.asarray(lengths) > 0)
    begin = batch.tokens.x
    found: dict[str, Any] = {
        "x": error((made.x - begin)[:, real], (exact.x - begin)[:, real]),
        "logits": error(made.logits[real], exact.logits[real]),
        "k": error(made.keys - pool[0], exact.keys - pool[0]),
        "v": error(made.values - pool[1], exact.values - pool[1]),
    }
    for row in real:
        found[f"logits of row {row}"] = error(made.logits[row], exact.logits[row])
    again = [run(step, stacked, batch) for _ in range(5)]
    found["again"] = all(bool((a.logits == made.logits)[real].all() & (a.x == made.x)[:, real].all()) for a in again)
    same = {}
    for rows in [[int(row)] for row in real] + [list(map(int, rng.permutation(real)[:3])), list(map(int, real[::-1]))]:
        places = rng.permutation(N)[: len(rows)]
        others = np.setdiff1d(np.arange(N), places)
        order = np.zeros(N, int)
        order[places], order[others] = rows, np.setdiff1d(np.arange(N), rows)
        moved_lengths = np.zeros(N, int)
        moved_lengths[places] = np.asarray(lengths)[rows]
        moved = Batch.of(step, stacked, embedded[order], moved_lengths.tolist(), tables[order], pool)
        other = ended(step, run(step, stacked, moved))
        equal = (other.logits[places] == made.logits[np.asarray(rows)]).all()
        equal &= (other.x[:, places] == made.x[:, np.asarray(rows)]).all()
        same[f"{rows} at {places.tolist()}"] = bool(equal)
    found["company"] = all(same.values())
    found["company differs"] = [name for name, equal in same.items() if not equal]
    found["good"] = (
        found["again"] and found["company"] and max(found[k] for k in ("x", "logits", "k", "v")) < KERNEL_ERROR
    )
    print(name, lengths, changes, json.dumps(found), flush=True)
    return found


def empty(name: str, N: int) -> dict[str, Any]:
    """Of padding alone, as programs first run: does it end, and does each wait. Then so again without a watch."""
    step, found = shape(name, pages=1, rows=N), dict[str, Any]()
    stacked, pool = model(step), pools(step)
    batch = Batch.of(step, stacked, jnp.ones((N, step.hidden)), [0] * N, np.zeros((N, 1)), pool)
    for watched in (True, False):
        step = attrs.evolve(step, watched=watched)
        for _ in range(5):
            made = ended(step, run(step, stacked, batch))
            gave_up = [] if made.places is None else np.flatnonzero(np.asarray(made.places)[1]).tolist()
            found["blocks that gave a wait up"] = gave_up
            if gave_up:
                print("gave up at", np.asarray(made.places).tolist(), flush=True)
                return found | {"good": False}
    same = bool((made.keys == pool[0]).all() & (made.values == pool[1]).all())
    return found | {"good": same and bool(jnp.isfinite(made.logits[0]).all())}


def chained(step: Step, stacked: Stacked, batch: Batch) -> Any:
    """A program of `CHAIN` steps: the KV of one is the next one's, and its x the next one's embeddings."""

    def steps(stacked: Stacked, tokens: Tokens, keys: jax.Array, values: jax.Array, schedule: Schedule) -> Made:
        for _ in range(CHAIN):
            made: Made = decode_step(step, stacked, tokens, keys, values, schedule)
            turns = tokens.cos, tokens.sin
            tokens = tokens_of(made.x.T, stacked.gains[0], turns, tokens.page, tokens.place)
            keys, values = made.keys, made.values
        return made

    given = stacked, batch.tokens, batch.keys, batch.values, batch.schedule
    return jax.jit(steps, donate_argnums=(2, 3)).lower(*given).compile()


def seconds_a_step(step: Step, several: Any, stacked: Stacked, batch: Batch) -> float:
    """Upper median of four timings of `STEPS` launches."""
    made = ended(step, several(stacked, batch.tokens, batch.keys + 0, batch.values + 0, batch.schedule))
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(STEPS // CHAIN):
            made = several(stacked, batch.tokens, made.keys, made.values, batch.schedule)
        ended(step, made, wait=0.0002)
        taken.append((time.perf_counter() - begun) / (STEPS // CHAIN * CHAIN))
    return sorted(taken[1:])[2]


def bandwidth() -> dict[str, float]:
    """TB/s of a read and of a copy of 4 GB of bf16."""
    x = draw(jax.random.key(0), (2**31,), 1.0)
    found = {}
    for name, by, moved in (
        ("copy", jax.jit(lambda x: x + 1), 2),
        ("read", jax.jit(lambda x: x.reshape(-1, 2**14).astype(jnp.float32).sum(axis=1)), 1),
    ):
        by(x).block_until_ready()
        begun = time.perf_counter()
        for _ in range(10):
            made = by(x)
        made.block_until_ready()
        found[name] = moved * x.nbytes * 10 / (time.perf_counter() - begun) / 1e12
    return found


def prepared(stacked: Stacked, step: Step, lengths: list[int]) -> tuple[Step, Batch]:
    """The step with room for these rows, and them."""
    N, pages_a_row = len(lengths), -(-max(lengths) // PAGE_SIZE)
    step = attrs.evolve(step, pages=N * pages_a_row, rows=N)
    tables = np.random.default_rng(3).permutation(N * pages_a_row).reshape(N, pages_a_row)
    embedded = jax.random.normal(jax.random.key(5), (N, step.hidden), jnp.float32)
    return step, Batch.of(step, stacked, embedded, lengths, tables, pools(step))


def timed(name: str, cases: dict[str, tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
    """cases: rows, and what is changed of the step."""
    stacked = model(shape(name))
    weights = stacked.tiles.nbytes + stacked.head.nbytes
    made = {what: prepared(stacked, shape(name, **changes), lengths) for what, (lengths, changes) in cases.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # a program takes ten seconds
        programs = list(pool.map(lambda case: chained(case[0], stacked, case[1]), made.values()))
    found: dict[str, Any] = {}
    for (what, (step, batch)), program in zip(made.items(), programs, strict=True):
        seconds = seconds_a_step(step, program, stacked, batch)
        kv = 2 * int(batch.lengths.sum()) * step.layers * step.kv_heads * step.head_dim * 2
        rate = (weights + kv) / seconds
        found[what] = {"ms": seconds * 1e3, "TB/s": rate / 1e12, "of 4.27 TB/s": rate / 4.27e12}
        times = f"{seconds * 1e3:.4f} ms, {rate / 1e12:.2f} TB/s, {rate / 4.27e12:.1%}"
        print(f"{name}, {what}: {times}", flush=True)
    return found


def timeline(name: str, lengths: list[int]) -> dict[str, Any]:
    stacked = model(shape(name))
    step, batch = prepared(stacked, shape(name, timed=True), lengths)
    for _ in range(3):
        made = ended(step, run(step, stacked, batch))
    found = moments(np.asarray(made.times))
    for what, value in found.items():
        print(f"{name} {max(lengths)} {what}: {value}", flush=True)
    return found


def moments(times: np.ndarray[Any, Any]) -> dict[str, Any]:
    """times [L, EVENTS, blocks, 2]: when the blocks of a timed step were where. Microseconds from the first block that
    has the tokens of a layer, median of the inner layers; of the blocks that note a moment their number, and the first,
    the median and the last of them."""
    inner = times.astype(np.uint32)[1:-1]
    noted: np.ndarray[Any, Any] = np.asarray(inner[..., 1].any(axis=0))  # [EVENTS, blocks]
    ns = inner[..., 0].astype(np.int64)
    first = EVENTS.index("qkv: tokens here")
    start = np.where(noted[first], ns[:, first], 2**40).min(axis=1)
    since = (ns - start[:, None, None]) / 1e3
    seen = np.unique(ns[:, noted])
    found: dict[str, Any] = {
        "timer": int(np.gcd.reduce(np.diff(seen))),
        "layer": float(np.median(np.diff(start)) / 1e3),
    }
    for event, what in enumerate(EVENTS):
        if noted[event].any():
            of = since[:, event, noted[event]]
            edges = (of.min(axis=1), np.median(of, axis=1), of.max(axis=1))
            found[what] = [int(noted[event].sum()), *(round(float(np.median(edge)), 2) for edge in edges)]
    return found


LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head",),
    ("attention",),
    ("attention", "head"),
    ("barriers",),
    ("attention", "barriers", "head"),
    ("attention", "barriers", "products"),
)
WINDOWS = (Window(), Window(2, 2, 0), Window(3, 1, 4), Window(4, 3, 4))


def rows(count: int, keys: int, of: int = FEW) -> list[int]:
    return [keys] * count + [0] * (of - count)


def section(name: str) -> dict[str, Any]:
    kind, *others = name.split("-")
    N = int(others.pop()) if others and others[-1].isdigit() else FEW
    which = "-".join(others)
    if kind == "tiny":
        lengths = [9, 257, 900, 0, 256, 0, 129, 1] * (N // FEW)
        of = "tiny" if N == FEW else "pieces"
        return {"bias, several units a block": compare(of, lengths, bias=True, page_size=64, sms=5, watched=True)}
    if kind == "empty":
        found = empty(which, N)
        print(name, json.dumps(found), flush=True)
        return found
    if kind == "bits":
        lengths = [1, 300, 2000, 129, 256, 255, 5000, 40] * (N // FEW)
        return {"two layers": compare(which, lengths, layers=2, V=8192)}
    if kind == "time":
        sizes = ((1, 256), (1, 8192), (8, 1024)) if N == FEW else ((N // 2 + 1, 1024), (N, 256), (N, 1024))
        cases: dict[str, Any] = {f"{count} rows of {keys}": (rows(count, keys, N), {}) for count, keys in sizes}
        return bandwidth() | timed(which, cases)
    if kind == "parts":
        return timed(which, {f"without {names}": (rows(1, 256), {"left_out": names}) for names in LEFT_OUT})
    if kind == "timeline":
        return timeline(which, rows(1, 256) if N == FEW else rows(N, 1024, N))
    if kind == "windows":
        return timed(which, {str(window): (rows(1, 256), {"window": window}) for window in WINDOWS})
    raise SystemExit(f"no section {name}")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--child"]:
        pathlib.Path(arguments[2]).write_text(json.dumps(section(arguments[1])))
        return
    out = pathlib.Path(os.environ.get("OUT", "."))
    record: dict[str, Any] = {"jax": jax.__version__}
    for name in arguments or FIRST:
        begun, part = time.monotonic(), out / f"persistent-{name}.part.json"
        command = [sys.executable, __file__, "--child", name, str(part)]
        try:
            status: Any = subprocess.run(command, timeout=SECTION_SECONDS).returncode
        except subprocess.TimeoutExpired:
            status = f"ended after {SECTION_SECONDS} s"
        record[name] = json.loads(part.read_text()) if part.exists() else {"failed": status}
        part.unlink(missing_ok=True)
        print(f"-- {name}: {status}, {time.monotonic() - begun:.0f} s", flush=True)
        (out / "persistent-check.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
