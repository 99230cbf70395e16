"""Whether a row has the same bits whatever is around it: other slots, neighbours, storage, chunk, what it adopted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import numpy as np
from check_engines import Checks, Rows, not_invariant
from random_engines import Bench, GreedySampler, Setup
from witness import DigestSampler, Seen, alone, decode, difference, seen

from mlxcel.core.plan import Decode
from mlxcel.plugins.sampling.ends import MOST

Ways = Mapping[str, Callable[[], Seen]]
SHORT = 5
"""Tokens of a prompt that is one small piece."""


def same(checks: Checks) -> Rows:
    """R0: executables of the same shapes. Eight rows are one width of a decode."""
    sizes = checks.sizes
    (shape, layers), lengths = sizes.shapes[0], (SHORT, 70, 130)
    setup = Setup(shape, 8, 512, layers=layers, small=sizes.small)
    dense = checks.engines(setup, sizes.rows[:1], sizes.tokens[:2])
    for length in lengths:
        ids = dense.ids(length, length)
        ways = {
            "again": partial(alone, dense, ids, sizes.steps),
            "another slot": partial(beside, dense, ids, sizes.steps, before=5),
            "neighbours": partial(beside, dense, ids, sizes.steps, before=3, behind=4),
            "read at once": partial(beside, dense, ids, sizes.steps, ahead=False),
        }
        yield from _compare(setup, length, alone(dense, ids, sizes.steps), ways)
    paged = checks.engines(attrs.evolve(setup, storage="paged"), sizes.rows[:1], sizes.tokens[:2])
    for length in lengths:
        ids = dense.ids(length, length)
        ways = {"paged": partial(beside, paged, ids, sizes.steps, before=2, behind=1)}
        yield from _compare(setup, length, alone(dense, ids, sizes.steps), ways)


def deterministic(checks: Checks) -> Rows:
    """R1: any batch, any chunk, hit or miss, dense or paged, preempted or not."""
    sizes, (small, large) = checks.sizes, checks.sizes.chunks
    for shape, layers in sizes.shapes[: sizes.bits]:
        setup = Setup(shape, sizes.crowd, sizes.long + 128, "dense", True, small, layers, sizes.small)
        rows, half = sizes.rows_for(sizes.crowd), sizes.crowd // 2
        open_one = partial(checks.engines, rows=rows, tokens=sizes.tokens, sampler=DigestSampler)
        dense = open_one(setup)
        paged = open_one(attrs.evolve(setup, storage="paged"))
        single = open_one(attrs.evolve(setup, slots=1), rows=sizes.rows[:1])
        for length in (SHORT, sizes.long):
            ids = dense.ids(length, length)
            ways: dict[str, Callable[[], Seen]] = {
                "again": partial(alone, dense, ids, sizes.steps),
                "one of 8": partial(beside, dense, ids, sizes.steps, before=3, behind=4),
                f"one of {sizes.crowd}": partial(beside, dense, ids, sizes.steps, before=half, behind=half - 1),
                f"chunk of {large}": partial(alone, dense, ids, sizes.steps, chunk=large),
                "one slot": partial(alone, single, ids, sizes.steps),
                "paged": partial(alone, paged, ids, sizes.steps),
                "paged, one of 8": partial(beside, paged, ids, sizes.steps, before=3, behind=4),
                "preempted": partial(preempted, paged, ids, sizes.steps),
            }
            if length > small:
                ways["a prompt cache hit"] = partial(hit, paged, ids, sizes.steps, small)
            yield from _compare(setup, length, alone(dense, ids, sizes.steps), ways)


def r2(checks: Checks) -> Rows:
    """R2 where nobody asked for it: what decodes in a launch of each width, and what a prompt's pieces compute. One
    engine of each model serves most ways; the models take turns."""
    sizes, (small, large) = checks.sizes, checks.sizes.chunks
    crowds: list[Bench] = []
    for model in sizes.compared:
        bench = crowd_engine(checks, model)
        yield from not_invariant(bench)
        crowds.append(bench)
        yield from _in_crowds(bench, SHORT, checks)
        for most, _ in bench.engine.caps.decode_runs or ((8, 1),):
            yield _in_runs(bench, checks, min(most, bench.setup.slots))
        yield from _greedy_runs(checks, model)
    turns = []
    for bench in crowds:
        ids = bench.ids(sizes.long, sizes.long)
        ways = {
            f"chunk of {large}": partial(alone, bench, ids, sizes.steps, chunk=large),
            "a prompt cache hit": partial(hit, bench, ids, sizes.steps, small),
            "preempted": partial(recomputed, bench, ids, sizes.steps, small),
        }
        turns.append(_compare(bench.setup, sizes.long, alone(bench, ids, sizes.steps, chunk=small), ways))
        turns.append(_in_crowds(bench, sizes.long, checks))
    yield from _in_turns(turns[::2])
    yield from _in_turns(turns[1::2])
    for bench in crowds:
        setup = attrs.evolve(bench.setup, slots=1, storage="dense")
        dense = checks.engines(setup, sizes.rows[:1], sizes.tokens[:2][-1:], sampler=DigestSampler)
        for length in (SHORT, sizes.long):
            ids = bench.ids(length, length)
            ways = {
                "dense": partial(alone, dense, ids, sizes.steps),
                "dense, preempted": partial(recomputed, dense, ids, sizes.steps, small),
            }
            yield from _compare(setup, length, alone(bench, ids, sizes.steps, chunk=small), ways)


def crowd_engine(checks: Checks, model: Setup) -> Bench:
    """For `r2` and for `widths`."""
    sizes = checks.sizes
    setup = attrs.evolve(model, slots=sizes.slots, context=sizes.long + 128, storage="paged", chunk=max(sizes.chunks))
    return checks.engines(setup, sizes.rows_for(sizes.slots), sizes.tokens, sampler=DigestSampler, runs=True)


def _in_crowds(bench: Bench, length: int, checks: Checks) -> Rows:
    sizes, ids, small = checks.sizes, bench.ids(length, length), checks.sizes.chunks[0]
    ways: dict[str, Callable[[], Seen]] = {
        f"one of {crowd}": partial(
            beside, bench, ids, sizes.steps, before=crowd // 2, behind=crowd - 1 - crowd // 2, chunk=small
        )
        for crowd in sizes.crowds
    }
    yield from _compare(bench.setup, length, alone(bench, ids, sizes.steps, chunk=small), ways)


def _in_runs(bench: Bench, checks: Checks, crowd: int) -> dict[str, Any]:
    """One of so many rows whose steps are submitted several at a time. Its tokens follow from its bits."""
    engine, steps, setup = bench.engine, checks.sizes.steps, bench.setup
    rows = [bench.begin(bench.ids(SHORT, SHORT + place)) for place in range(crowd)]
    parts: list[Decode] = [Decode(row) for row in reversed(rows)]
    count = engine.run_length(parts)
    for _ in range(steps // count):
        engine.reserve(parts, count)
        for ticket in engine.submit_run(parts, count):
            engine.collect(ticket)
    ids = tuple(engine.view(rows[0]).output)
    bench.close_rows()
    bench.backend.kept.clear()
    lone = alone(bench, bench.ids(SHORT, SHORT), steps).first(len(ids))
    found = difference(lone, Seen(ids, lone.logits))
    way = f"one of {crowd}, {count} steps at a time"
    return {"shape": setup.shape, "layers": setup.layers, "prompt": SHORT, "way": way,
            "differs": found, "wrong": bool(found)}  # fmt: skip


def _greedy_runs(checks: Checks, model: Setup) -> Rows:
    """Draws of the largest logit, which kernels make themselves in a run: several steps at a time against one at a
    time, every second row ignoring ends that it would say."""
    sizes, setup = checks.sizes, attrs.evolve(model, slots=min(checks.sizes.slots, 32), storage="paged")
    bench = checks.engines(setup, sizes.rows_for(setup.slots), sizes.tokens[:1], sampler=GreedySampler, runs=True)
    for crowd in sorted({1, min(8, setup.slots), setup.slots}):
        prompts = [bench.ids(SHORT + place, place) for place in range(crowd)]
        freely, _ = _said(bench, prompts, [frozenset()] * crowd, sizes.steps, together=False)
        ends = [frozenset(ids[:MOST]) if place % 2 == 0 else frozenset() for place, ids in enumerate(freely)]
        wanted, _ = _said(bench, prompts, ends, sizes.steps, together=False)
        found, count = _said(bench, prompts, ends, sizes.steps, together=True)
        rows = [place for place in range(crowd) if found[place] != wanted[place][: len(found[place])]]
        ignored = all(not set(ids) & ends[place] for place, ids in enumerate(found))
        yield {"shape": setup.shape, "layers": setup.layers, "prompt": SHORT, "changed by ends": wanted != freely,
               "way": f"{crowd} greedy, {count} steps at a time", "differs": f"rows {rows}" if rows else "",
               "wrong": bool(rows) or not ignored}  # fmt: skip


def _said(
    bench: Bench, prompts: list[np.ndarray], ends: list[frozenset[int]], steps: int, *, together: bool
) -> tuple[list[tuple[int, ...]], int]:
    """What greedy rows say in so many steps, or in the most whole runs of them; and the steps of a run."""
    engine, rows = bench.engine, []
    for ids, own in zip(prompts, ends, strict=True):
        row = engine.open(attrs.evolve(bench.spec(ids, ignore_eos=bool(own)), eos_ids=own))
        outcome = engine.prefill(row, bench.plan(ids))
        if outcome.error is not None:
            raise outcome.error
        rows.append(row)
    parts = [Decode(row) for row in rows]
    count = engine.run_length(parts) if together else 1
    for _ in range(steps // count):
        engine.reserve(parts, count)
        for ticket in engine.submit_run(parts, count) if count > 1 else [engine.submit(parts)]:
            for outcome in engine.collect(ticket):
                if outcome.error is not None:
                    raise outcome.error
    said = [tuple(engine.view(row).output) for row in rows]
    bench.close_rows()
    return said, count


def _in_turns(rows: list[Rows]) -> Rows:
    while rows:
        for each in list(rows):
            row = next(each, None)
            if row is None:
                rows.remove(each)
            else:
                yield row


def _compare(setup: Setup, length: int, lone: Seen, ways: Ways) -> Rows:
    for way, run in ways.items():
        found = difference(lone, run())
        yield {"shape": setup.shape, "layers": setup.layers, "prompt": length, "way": way, "differs": found,
               "wrong": bool(found)}  # fmt: skip


def beside(
    bench: Bench,
    ids: np.ndarray,
    steps: int,
    *,
    before: int = 0,
    behind: int = 0,
    ahead: bool = True,
    chunk: int | None = None,
) -> Seen:
    """The row among others, which were opened before and behind it and take part in every step."""
    others = [bench.ids(7 + 3 * place, place) for place in range(before + behind)]
    rows = [bench.begin(other) for other in others[:before]]
    row = bench.begin(ids, chunk=chunk)
    rows = [*rows, row, *(bench.begin(other) for other in others[before:])]
    if ahead:
        decode(bench, rows, steps)
    else:
        for _ in range(steps):
            bench.engine.step(rows)
    found = seen(bench, row)
    bench.close_rows()
    bench.backend.kept.clear()
    return found


def preempted(bench: Bench, ids: np.ndarray, steps: int) -> Seen:
    """Half the steps, then without its KV: the prompt by its pieces, and what was said by decodes."""
    row = bench.begin(ids)
    decode(bench, [row], steps // 2)
    bench.engine.preempt(row)
    bench.engine.prefill(row, bench.plan(ids, draw=False))
    while len(bench.engine.view(row).output) <= steps:
        (outcome,) = bench.engine.step([row])
        if outcome.error is not None:
            raise outcome.error
    return seen(bench, row)


def recomputed(bench: Bench, ids: np.ndarray, steps: int, chunk: int) -> Seen:
    """The same, with what was said by pieces too."""
    row = bench.begin(ids, chunk=chunk)
    decode(bench, [row], steps // 2)
    known = [*ids, *bench.engine.view(row).output[:-1]]
    bench.engine.preempt(row)
    bench.engine.prefill(row, bench.plan(known, draw=False, chunk=chunk))
    decode(bench, [row], steps - steps // 2)
    return seen(bench, row)


def hit(bench: Bench, ids: np.ndarray, steps: int, chunk: int) -> Seen:
    """Behind the pieces that another row of the same prompt has computed."""
    engine = bench.engine
    first = bench.begin(ids, chunk=chunk)
    prefix = engine.share(first, len(ids))
    engine.close(first)
    length = (len(ids) - 1) // chunk * chunk
    row = engine.adopt(bench.spec(ids), prefix, length)
    engine.prefill(row, bench.plan(ids, length, chunk=chunk))
    decode(bench, [row], steps)
    found = seen(bench, row)
    engine.release(prefix)
    bench.backend.kept.clear()
    return found


def widths(checks: Checks) -> Rows:
    """R2 at every width: batches of 1, 2, 3, … rows that decode, and pieces of so many tokens, each token as it is in a
    batch of one. What decodes alone is the step as one kernel; the others are launches of each form there is."""
    for model in checks.sizes.compared:
        bench = crowd_engine(checks, model)
        yield from not_invariant(bench)
        yield from _pieces(bench, checks.sizes.companies)
        yield from _batches(bench, min(checks.sizes.companies, checks.sizes.slots))


RUN = 50
"""Widths that one row of the record has."""
WATCHED = 12
"""Rows of a batch that are compared; the others are their company."""


def _pieces(bench: Bench, most: int) -> Rows:
    """The draw behind a piece of T tokens, against the decode of its last token."""
    first = bench.ids(1, 1)
    lone = alone(bench, first, most)
    ids = [*first.tolist(), *lone.ids]
    for low in range(1, most + 1, RUN):
        wrong = []
        for count in range(low, min(low + RUN, most + 1)):
            found = alone(bench, ids[:count], 0)
            if difference(found, Seen(lone.ids[count - 1 : count], lone.logits[count - 1 : count])):
                wrong.append(count)
        yield _of_widths(bench, "tokens of a piece", low, count, wrong)


def _batches(bench: Bench, most: int) -> Rows:
    rng = np.random.default_rng(most)
    lone = [alone(bench, bench.ids(SHORT, place), most) for place in range(min(WATCHED, most))]
    rows = [bench.begin(bench.ids(SHORT, place)) for place in range(most)]
    bench.backend.kept.clear()
    places = {row: place for place, row in enumerate(rows)}
    for low in range(1, most + 1, RUN):
        wrong = []
        for count in range(low, min(low + RUN, most + 1)):
            watched = rng.permutation(len(lone))[:count]
            others = len(lone) + rng.permutation(most - len(lone))[: count - len(watched)]
            chosen = rng.permutation([*watched, *others]).tolist()
            decode(bench, [rows[place] for place in chosen], 1)
            for (row, position), logits in bench.backend.kept.items():
                place = places[row]
                if place < len(lone):
                    step, token = position - SHORT, bench.engine.view(row).output[-1]
                    wanted = Seen(lone[place].ids[step : step + 1], lone[place].logits[step : step + 1])
                    if difference(Seen((token,), logits[None]), wanted):
                        wrong.append(count)
            bench.backend.kept.clear()
        yield _of_widths(bench, "rows of a batch", low, count, wrong)
    bench.close_rows()


def _of_widths(bench: Bench, what: str, low: int, high: int, wrong: list[int]) -> dict[str, Any]:
    said = ", ".join(map(str, dict.fromkeys(wrong)))
    return {"shape": bench.setup.shape, "layers": bench.setup.layers, "way": f"{low} to {high} {what}",
            "differs": said and f"with {said}", "wrong": bool(wrong)}  # fmt: skip
