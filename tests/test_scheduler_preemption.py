"""KV that runs short: who gives up what, and that nobody can tell (spec 7.5, 7.6)."""

import numpy as np
import pytest
from scheduler_rows import alone, bench, seen

LEVELS = [("R2", True), ("R1", False), ("R0", True), ("R0", False)]
MU = {"temperature": 1.0, "mirostat": 2, "seed": 7}
KINDS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "mirostat": MU,
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "dry_multiplier": 0.8},
    "stop": {"stop": ("c-c-c-c-c-c-cx",)},  # waits for a stop that never comes: held text lives through it
    "logprobs": {"logprobs": 2},
}


def three(it, **params):
    replies = [it.ask(name, name.encode() * 20, max_tokens=60, **params) for name in "abc"]
    it.run()
    return [seen(reply)[0] for reply in replies]


@pytest.mark.parametrize(("level", "mixed"), LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_h_k1_a_preempted_row_repeats_nothing_and_loses_nothing(level, mixed, kind):
    """H-K1, C18, C19: a pool for 1.5 of three long rows: ids, streams, causes and log-probabilities as undisturbed."""
    engine = {"level": level, "mixed_steps": mixed, "slots": 3, "context": 128}
    whole = three(bench(store="paged", **engine), **KINDS[kind])
    it = bench(store="paged", pages=8, **engine)  # a row comes to 5 pages of 16
    short = three(it, **KINDS[kind])
    assert it.scheduler.stats().preemptions_total.total() > 0, "the pool was too large for this test"
    for expected, found in zip(whole, short, strict=True):
        assert (found.text, found.ids) == (expected.text, expected.ids)
        assert (found.result.cause, found.result.detail) == (expected.result.cause, expected.result.detail)
        assert found.result.logprobs == expected.result.logprobs
        assert found.kinds.count(found.kinds[0]) == 1, "started once"
    assert it.all_free()


def test_mirostat_goes_on_where_it_was():
    """C18, E11: the trace of mu of a preempted row is that of an undisturbed one, by its log-probabilities."""
    traces = []
    for pages in (24, 8):
        it = bench(store="paged", pages=pages, slots=3, context=128)
        traces.append([one.result.logprobs for one in three(it, logprobs=1, logprobs_mode="processed", **MU)])
    assert traces[0] == traces[1]


def test_two_rows_of_one_lane_in_a_pool_for_one_both_complete():
    """C21: no livelock, and a bound on the steps that proves progress."""
    it = bench(store="paged", pages=8, slots=2, context=128)
    replies = [it.ask(name, max_tokens=100) for name in "ab"]
    it.run(ticks=600)
    assert [len(seen(reply)[0].ids) for reply in replies] == [100, 100]
    assert it.it.backend.steps < 250


@pytest.mark.parametrize("prompts", [2, 3])
@pytest.mark.parametrize("pages", range(8, 14))
def test_a_prompt_without_room_holds_up_no_other(pages, prompts):
    """C5, C21: one piece a step, in a pool for less than two prompts. Whosever turn it is when that is full, the first
    goes on: nothing else will ever give a page back."""
    it = bench(store="paged", pages=pages, slots=3, context=128, chunk=16, busy=16, level="R0", mixed_steps=False)
    replies = [it.ask(name, name.encode() * 120, max_tokens=5) for name in "abc"[:prompts]]
    it.run(ticks=200)
    assert [len(seen(reply)[0].ids) for reply in replies] == [5] * prompts
    assert it.all_free()


def test_the_first_of_the_highest_lane_is_never_preempted():
    """C21, C22: the later and the lower give way, whoever came first into its slot."""
    it = bench(store="paged", pages=8, slots=3, context=128)
    low = it.ask("low", lane=2, max_tokens=80)
    it.scheduler.tick()
    it.clock.advance(1)
    high = it.ask("high", lane=0, max_tokens=80)
    first_step = it.it.backend.steps
    while not high.over:
        it.scheduler.tick()
    assert it.it.backend.steps - first_step <= 82, "it decoded at every step"
    it.run()
    assert seen(low)[0].result.cause == seen(high)[0].result.cause == "max_tokens"


def test_parked_prefills_give_way_before_rows_that_run():
    """C23: work is lost, no tokens."""
    it = bench(store="paged", pages=8, slots=3, context=128, options={"watermark": 0.0})
    first = it.ask("a", b"a" * 60, max_tokens=60)  # 4 pages and more to come
    it.scheduler.tick()
    late = [it.ask(name, name.encode() * 60, max_tokens=2) for name in "bc"]
    it.run()
    counted = it.scheduler.stats()
    assert counted.reclaims_total["parked"] + counted.reclaims_total["left_out"] > 0
    assert counted.preemptions_total["running"] == 0 or counted.reclaims_total["parked"] > 0
    assert [len(seen(reply)[0].ids) for reply in (first, *late)] == [60, 2, 2]


def test_without_preemption_a_row_begins_only_with_room_for_all_it_may_become():
    """C17."""
    it = bench(store="paged", pages=10, slots=4, context=128, options={"preemption": False})
    replies = [it.ask(name, b"x" * 16, max_tokens=60) for name in "abcd"]  # 5 pages each in the end
    most = 0
    while it.scheduler.tick():
        most = max(most, it.scheduler.stats().rows_busy)
    counted = it.scheduler.stats()
    assert (most, counted.preemptions_total.total()) == (2, 0)
    assert [len(seen(reply)[0].ids) for reply in replies] == [60] * 4


def test_the_watermark_keeps_pages_for_rows_that_run():
    """C10, V21: while a row decodes `ceil(f * pages)` stay free at admission; with none they do not."""
    for watermark, busy in ((0.0, 2), (0.5, 1)):
        it = bench(store="paged", pages=8, slots=2, context=128, busy=64, options={"watermark": watermark})
        it.ask("a", b"x" * 15, max_tokens=10)
        it.scheduler.tick()
        it.ask("b", b"x" * 70, max_tokens=10)  # a first piece of 4 of the 7 pages that are left
        it.scheduler.tick()
        it.scheduler.tick()
        assert it.scheduler.stats().rows_busy == busy
        it.run()
    alone = bench(store="paged", pages=8, slots=2, context=128, options={"watermark": 0.5})
    reply = alone.ask("b", b"x" * 120, max_tokens=5)
    alone.run()
    assert len(seen(reply)[0].ids) == 5


def test_nobody_overtakes_the_head():
    """C11: a small request waits behind a large one that has no pages yet."""
    it = bench(store="paged", pages=8, slots=4, context=128, chunk=128, busy=128)
    it.ask("a", b"x" * 60, max_tokens=20)
    it.scheduler.tick()
    large, small = it.ask("large", b"y" * 100, max_tokens=1), it.ask("small", max_tokens=1)
    ended = []
    while it.scheduler.tick():
        ended += [name for name, reply in (("large", large), ("small", small)) if reply.over and name not in ended]
    assert ended == ["large", "small"]


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_in_a_pool_that_is_always_short(seed):
    """C18 to C24: whatever is preempted when, each request is as in a pool that never is; no page leaks."""
    rng = np.random.default_rng(seed)
    asked = [
        (
            f"r{i}",
            b"p" * int(rng.integers(1, 90)),
            {
                "max_tokens": int(rng.integers(1, 50)),
                "temperature": float(rng.choice([0.0, 1.0])),
                "seed": i,
                "frequency_penalty": float(rng.choice([0.0, 0.7])),
                "lane": int(rng.integers(3)),
                "n": int(rng.choice([1, 1, 2])),
            },
        )
        for i in range(24)
    ]
    gaps = rng.integers(0, 5, len(asked))
    heard = []
    for pages in (200, 10):
        it = bench(store="paged", pages=pages, slots=5, context=144, chunk=32, busy=16)
        replies = []
        for (name, prompt, params), gap in zip(asked, gaps, strict=True):
            replies.append(it.ask(name, prompt, **params))
            for _ in range(int(gap)):
                it.scheduler.tick()
        it.run()
        heard.append(
            [[(c, one.text, one.ids, one.result.cause) for c, one in sorted(seen(r).items())] for r in replies]
        )
        assert it.all_free()
    assert it.scheduler.stats().preemptions_total.total() > 5
    assert heard[0] == heard[1]


def test_admission_wants_pages_for_the_first_piece_and_no_more():
    """C10, P10: the short piece while rows decode, the long one when none does."""
    for busy, begins in ((16, True), (64, False)):
        it = bench(store="paged", pages=8, slots=2, context=128, chunk=64, busy=busy, options={"watermark": 0.0})
        it.ask("a", b"x" * 79, max_tokens=20)  # 5 of 8 pages
        for _ in range(3 + 79 // busy):
            it.scheduler.tick()
        it.ask("b", b"y" * 60, max_tokens=2)  # 4 pages, the first piece 1 or all of them
        it.scheduler.tick()
        it.scheduler.tick()
        assert (it.scheduler.stats().rows_busy == 2) is begins
        it.run()
        assert it.all_free()


def test_a_piece_that_must_wait_anyway_preempts_nobody():
    """C3, C21, C22: what the later rows hold would not be enough for it. They go on, and are not put out turn after
    turn."""
    it = bench(store="paged", pages=8, slots=3, context=128, chunk=64, busy=64, options={"watermark": 0.0})
    first = it.ask("first", b"f" * 16, max_tokens=100)
    it.scheduler.tick()
    waits = it.ask("waits", b"w" * 100, max_tokens=5)
    for _ in range(3):
        it.scheduler.tick()
    small = it.ask("small", b"s" * 3, max_tokens=5)
    for _ in range(8):
        it.scheduler.tick()
    assert small.over
    assert it.scheduler.stats().preemptions_total.total() == 0
    it.run()
    for reply, (name, prompt, tokens) in (
        (first, ("first", b"f" * 16, 100)),
        (waits, ("waits", b"w" * 100, 5)),
        (small, ("small", b"s" * 3, 5)),
    ):
        assert seen(reply)[0].text == alone(name, prompt, max_tokens=tokens)[0]
    assert it.all_free()


def test_a_row_preempted_in_its_prompt_comes_back_when_all_of_it_fits():
    """C21: with room for its next piece alone it would be preempted again and again."""
    it = bench(store="paged", pages=8, slots=2, context=128, chunk=64, busy=16, options={"watermark": 0.0})
    first = it.ask("first", b"f" * 16, max_tokens=100)
    it.scheduler.tick()
    second = it.ask("second", b"s" * 110, max_tokens=5)
    it.run()
    assert seen(first)[0].text == alone("first", b"f" * 16, max_tokens=100)[0]
    assert seen(second)[0].text == alone("second", b"s" * 110, max_tokens=5)[0]
    assert it.scheduler.stats().preemptions_total == {"parked": 1}
    assert it.all_free()
