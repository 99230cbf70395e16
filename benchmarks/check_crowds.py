"""Random company: schedules that a number stands for, and thousands of steps whose batch is another each time."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import numpy as np
from check_engines import Checks, Rows, not_invariant
from crowd import Crowd, Habits, Voice
from random_engines import Bench, Setup
from witness import CompanySampler, DigestSampler

from mlxcel.core.kv import ceil_block

PROMPTS: Final = ((1, 0), (0, 7), (40, 23), (63, 1), (64, 1), (100, 30), (250, 7), (257, 255), (300, 213), (400, 300))
"""Of schedules: tokens of a beginning that all share, and of their own behind it."""
SAMPLED: Final[dict[str, Any]] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
CHUNKS: Final = (64, 200, 512, 1000)
BLOCK: Final = 8
"""Schedules that one engine runs before the next engine has its turn."""
BLOCK_STEPS: Final = 500
"""Steps of a row of the record of `steps`."""
LONGEST: Final = 70
"""More than a prompt of `steps`: its rows have the rest of the context."""
HANG_SECONDS: Final = 60
"""For so many steps, which take seconds: a step that hangs ends the process."""


def schedules(checks: Checks) -> Rows:
    """Each row of each schedule says what it says alone, whenever it came, in whatever chunks it was read, behind
    whatever it found of its prompt, however often it was preempted, and whoever decoded beside it. A schedule follows
    from --seed and its number; so does the engine it runs on."""
    sizes = checks.sizes
    benches: dict[Setup, Bench] = {}
    voices: list[Voice] = []
    setups = _setups(checks)
    engines = len(setups)
    order = sorted(range(sizes.schedules), key=lambda n: (n // (engines * BLOCK), n % engines, n))
    for number in checks.only or order:
        setup = setups[number % engines]
        if setup not in benches:
            rows = sizes.rows_for(setup.slots)
            benches[setup] = checks.engines(setup, rows, sizes.tokens[:2], sampler=CompanySampler)
            yield from not_invariant(benches[setup])
        voices = voices or _voices(benches[setup], checks)
        yield _schedule(benches[setup], voices, number, checks)


def _setups(checks: Checks) -> list[Setup]:
    sizes = checks.sizes
    shape, layers = sizes.shapes[0]
    context = max(map(sum, PROMPTS)) + sizes.schedule_tokens
    setup = Setup(shape, 1, context, chunk=max(CHUNKS), layers=layers, small=sizes.small)
    return [attrs.evolve(setup, storage=storage, page=page, slots=slots) for storage, page, slots in sizes.stores]


def _voices(bench: Bench, checks: Checks) -> list[Voice]:
    """Two of each prompt: greedy, and sampled. What they say in one engine they say in the others."""
    longest, tokens = max(shared for shared, _ in PROMPTS), checks.sizes.schedule_tokens
    stem = bench.ids(longest, checks.seed)
    voices = []
    for place, (shared, own) in enumerate(PROMPTS):
        ids = np.concatenate([stem[:shared], bench.ids(own, checks.seed + place)]).astype(np.int32)
        voices.append(Voice.of(bench, ids, tokens))
        voices.append(Voice.of(bench, ids, tokens, **SAMPLED, seed=place))
    return voices


def _schedule(bench: Bench, voices: list[Voice], number: int, checks: Checks) -> dict[str, Any]:
    began, rng = time.perf_counter(), np.random.default_rng([checks.seed, number])
    habits = Habits(
        joins=float(rng.choice([0.03, 0.1, 0.5, 1.0])),
        all_decode=float(rng.choice([0.2, 0.8, 1.0])),
        ahead=float(rng.choice([0.0, 0.5, 1.0])),
        runs=0.0,
        preempted=float(rng.choice([0.0, 1.0, 4.0])) / checks.sizes.schedule_tokens,
        chunks=tuple(rng.choice(CHUNKS, int(rng.integers(1, 4)), replace=False).tolist()),
        hits=float(rng.choice([0.0, 0.8])),
    )
    most = bench.setup.slots - 2
    crowd = Crowd(bench, rng, habits, most)
    if habits.hits:
        crowd.keep(voices[int(rng.integers(len(voices) // 2, len(voices)))])  # of the long prompts
    waiting = rng.integers(len(voices), size=int(rng.integers(2, most + 2))).tolist()
    sampled = sum(bool(place % 2) for place in waiting)
    while waiting or not crowd.empty:
        while waiting and (crowd.empty or crowd.wants()):
            crowd.join(voices[waiting.pop()], checks.sizes.schedule_tokens)
        crowd.turn()
    crowd.end()
    return {
        "shape": bench.setup.shape, "way": f"schedule {number}", "storage": bench.setup.storage,
        "page": bench.setup.page, "sampled": sampled, **crowd.counted, "seconds": time.perf_counter() - began,
        "differs": "; ".join(crowd.wrong), "wrong": bool(crowd.wrong),
    }  # fmt: skip


def steps(checks: Checks) -> Rows:
    """Steps of up to eight rows, each with other rows than the one before, over page tables of a power of two of pages
    and of an odd number: none hangs, and every row says what it says alone."""
    sizes = checks.sizes
    shape, layers = sizes.shapes[0]
    share = sizes.many_steps // len(sizes.tables)
    crowds = []
    for place, (context, page) in enumerate(sizes.tables):
        setup = Setup(shape, 8, context, "paged", chunk=sizes.tokens[0], layers=layers, small=sizes.small, page=page)
        bench = checks.engines(setup, sizes.rows[:1], sizes.tokens[:1], sampler=DigestSampler, runs=True)
        yield from not_invariant(bench)
        rng, most = np.random.default_rng([checks.seed, place]), context - LONGEST
        with _no_hang():
            voices = [Voice.of(bench, bench.ids(3 + 12 * n, checks.seed + n), most) for n in range(5)]
        habits = Habits(joins=0.5, all_decode=0.0, ahead=0.1, runs=0.2, preempted=0.002, chunks=(64,), hits=0.0)
        crowds.append((Crowd(bench, rng, habits, 8), voices, f"{ceil_block(context) // page} pages a row"))
    for end in range(BLOCK_STEPS, share + BLOCK_STEPS, BLOCK_STEPS):
        for crowd, voices, way in crowds:
            began = time.perf_counter()
            with _no_hang():
                _steps(crowd, voices, min(end, share))
            yield {
                "shape": shape, "way": way, **crowd.counted, "seconds": time.perf_counter() - began,
                "differs": "; ".join(crowd.wrong), "wrong": bool(crowd.wrong),
            }  # fmt: skip
            crowd.wrong.clear()
    for crowd, _, _ in crowds:
        crowd.end()


@contextmanager
def _no_hang() -> Iterator[None]:
    """The process ends where this takes too long."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _steps(crowd: Crowd, voices: list[Voice], count: int) -> None:
    """Until it has run so many. Most rows are short, so that the batch changes; some come to the end of the context."""
    rng, most = crowd.rng, len(voices[0].lone.ids)
    while crowd.counted["steps"] < count:
        if crowd.wants():
            tokens = int(rng.integers(1, most + 1 if rng.random() < 0.3 else 40))
            crowd.join(voices[int(rng.integers(len(voices)))], tokens)
        crowd.turn()
