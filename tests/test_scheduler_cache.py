"""The scheduler with the prompt cache: a hit changes time and nothing else (spec C10, C13, C23, X8, X10)."""

import numpy as np
import pytest
from scheduler_rows import bench, seen

from mlxcel.plugins.kv.prefix_cache import PrefixCache
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import SCRIPTED_KV

LONG = bytes(range(65, 91)) * 3  # 78 tokens


def cached(it):
    return PrefixCache(
        kv=it.kv,
        kv_spec=SCRIPTED_KV,
        key=it.engine.kv_key,
        level=it.engine.level,
        chunk=64,
        page_bytes=16,
        clock=it.clock,
    )


def test_the_same_request_again_computes_one_token_and_says_the_same():
    """H-J1, X6, X8: three times; usage reports what was adopted, the events say it too."""
    it = bench(store="paged", cache=cached)
    texts, reused = [], []
    for _ in range(3):
        before = it.it.backend.tokens
        reply = it.ask("a", LONG, max_tokens=5)
        it.run()
        one = seen(reply)[0]
        texts.append((one.text, one.ids, one.result.cause))
        reused.append(one.result.cached_tokens)
        assert it.it.backend.tokens - before <= 78 - reused[-1] + 5
    assert texts == [texts[0]] * 3
    assert reused == [0, 77, 77]
    assert it.scheduler.stats().prompt_tokens_cached_total == 154
    assert it.all_free()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", [97, 112, 113, 127])
def test_what_is_cached_keeps_no_prompt_from_a_pool_for_one(length, n):
    """C23, V20: a tail that the cache holds too is copied before it is written to, and there is no page for that: the
    cache lets go of it."""
    it = bench(store="paged", pages=8, slots=1, context=128, chunk=128, busy=128, cache=cached)
    prompt = (LONG * 2)[:length]
    for end in (b"", b"!"):
        reply = it.ask("a", prompt[: length - len(end)] + end, max_tokens=1, n=n)
        it.run()
        assert [one.result.cause for one in seen(reply).values()] == ["max_tokens"] * n
    assert it.all_free()


def test_a_request_may_keep_out_of_the_cache():
    """Spec 8.1, `cache_prompt`: neither read nor filled."""
    it = bench(store="paged", cache=cached)
    for allowed, expected in ((False, 0), (True, 0), (False, 0), (True, 77)):
        reply = it.ask("a", LONG, max_tokens=2, cache_prompt=allowed)
        it.run()
        assert seen(reply)[0].result.cached_tokens == expected


def test_choices_compute_their_prompt_once():
    """C13: one prefill; the others begin with its pages."""
    counts = {}
    for n in (1, 4):
        it = bench(store="paged", cache=cached, slots=4)
        reply = it.ask("a", LONG, max_tokens=3, n=n)
        it.run()
        heard = seen(reply)
        assert all(len(heard[choice].ids) == 3 for choice in range(n))
        counts[n] = it.it.backend.tokens
        assert [heard[choice].result.cached_tokens >= 64 for choice in range(n)] == [False] + [True] * (n - 1)
    assert counts[4] < 2 * counts[1]


def test_the_cache_gives_way_before_any_row_does():
    """C23: the second step of reclaim; nobody is preempted for what nobody uses."""
    it = bench(store="paged", pages=12, slots=2, context=128, cache=cached)
    for name in "abc":
        it.ask(name, name.encode() * 60, max_tokens=4)
        it.run()
    assert it.it.kv.stats().cached > 8
    reply = it.ask("d", b"d" * 100, max_tokens=20)
    it.run()
    counted = it.scheduler.stats()
    assert len(seen(reply)[0].ids) == 20
    assert counted.reclaims_total["cache"] > 0
    assert counted.preemptions_total.total() == 0


def test_a_failed_row_leaves_nothing_and_a_cancelled_one_what_it_had():
    """X10."""
    it = bench(store="paged", cache=cached, faults=FaultPlan([Fault("read", 4)]))
    it.ask("fails", LONG, max_tokens=9, cache_prompt=True)
    it.run()
    after_failure = it.it.kv.stats().cached
    reply = it.ask("goes", b"z" * 60, max_tokens=50)
    for _ in range(5):
        it.scheduler.tick()
    reply.cancel()
    it.run()
    assert it.it.kv.stats().cached > after_failure
    assert it.all_free()


def test_lost_kv_empties_the_cache():
    """E18: eviction reason `fault`."""
    holder = []
    it = bench(
        store="paged", cache=lambda engine: holder.append(cached(engine)) or holder[0],
        faults=FaultPlan([Fault("read", 6, "lose_kv")]),
    )  # fmt: skip
    it.ask("first", LONG, max_tokens=2)
    it.run()
    it.ask("second", b"y" * 40, max_tokens=9)
    it.run()
    assert holder[0].stats().evictions["fault"] > 0
    reply = it.ask("first", LONG, max_tokens=2)
    it.run()
    assert seen(reply)[0].result.cached_tokens == 0


@pytest.mark.parametrize("level", ["R2", "R1", "R0"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("pages", [200, 14])
def test_cache_or_not_random_trees_of_prompts_say_the_same(seed, pages, level):
    """X8, C18: shared prefixes, seeds, penalties, stops, early cancels; pool large, and so small that it is always
    short."""
    rng = np.random.default_rng(seed)
    stems = [bytes(rng.integers(97, 123, 40).astype(np.uint8)) for _ in range(3)]
    asked = [
        (
            f"r{i}",
            stems[int(rng.integers(3))][: int(rng.integers(1, 41))] + bytes(rng.integers(97, 123, 5).astype(np.uint8)),
            {
                "max_tokens": int(rng.integers(1, 40)),
                "temperature": float(rng.choice([0.0, 1.0])),
                "seed": i,
                "frequency_penalty": float(rng.choice([0.0, 0.7])),
                "stop": ("9-r",) if rng.random() < 0.3 else (),
                "n": int(rng.choice([1, 1, 1, 2])),
            },
            rng.random() < 0.1,
        )
        for i in range(40)
    ]
    gaps = rng.integers(0, 5, len(asked))
    found = []
    for cache in (None, cached):
        it = bench(
            store="paged", pages=pages, slots=5, context=144, chunk=64, busy=16, cache=cache, level=level,
            mixed_steps=level != "R1", options={"max_queue_depth": 99},
        )  # fmt: skip
        replies = []
        for (name, prompt, params, goes), gap in zip(asked, gaps, strict=True):
            replies.append(it.ask(name, prompt, **params))
            for _ in range(int(gap)):
                it.scheduler.tick()
            if goes:
                replies[-1].cancel()
        it.run()
        assert it.all_free()
        found.append([{c: (one.text, one.ids, one.result.cause) for c, one in seen(r).items()} for r in replies])
    for (_, _, _, goes), cold, warm in zip(asked, *found, strict=True):
        assert goes or cold == warm
    assert it.scheduler.stats().prompt_tokens_cached_total > 100 or level == "R1", "at R1 whole chunks alone are reused"
