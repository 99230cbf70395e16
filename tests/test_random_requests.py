"""200 random requests, whatever serves them: with a prompt cache or none, dense or paged, with pages for all or with so
few that somebody is always preempted. Each says what it says alone (docs/spec/engine.md X8, C18, C19, C52, V8)."""

import functools

import attrs
import numpy as np
import pytest
from cache_rows import VOCAB
from layered_family import layered_checkpoint
from real_scheduler import said, served
from tested_backends import backend_in_test

REQUESTS = 200
CONTEXT = 128

SHAPES = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 2.0},
    {"temperature": 0.8, "mirostat": 1, "mirostat_tau": 3.0},
    {"temperature": 1.0, "adaptive_target": 0.3},
    {"repetition_penalty": 1.3, "repeat_last_n": 20},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    {"temperature": 1.0, "logprobs": 2},
)
STOPS = ((), (), ("7",), ("0", "+-", "123"), ("/", "never said"))


@attrs.frozen
class Asked:
    """A request, and the turns after which the next one comes, or its client leaves."""

    name: str
    prompt: tuple
    params: dict
    lane: int
    gap: int
    leaves: int | None


@functools.lru_cache
def crowd(seed, windowed):
    """Prompts are a tree: some stems, branches off their middles, the same again, and whole earlier prompts that go
    on, as the turns of a chat do."""
    rng = np.random.default_rng(seed)
    prompts, requests = [], []
    for i in range(REQUESTS):
        old = prompts[int(rng.integers(len(prompts)))] if prompts and rng.random() < 0.75 else ()
        stem = old[: int(rng.integers(len(old) + 1))] if rng.random() < 0.5 else old
        fresh = tuple(rng.integers(0, VOCAB, int(rng.integers(0, 40))).tolist())
        prompts.append(((*stem, *fresh) or (1,))[:80])
        params = {
            "max_tokens": int(rng.integers(1, 24)),
            "seed": int(rng.integers(5)),
            "stop": STOPS[int(rng.integers(len(STOPS)))],
            "n": int(rng.choice([1, 1, 1, 1, 2])),
            **SHAPES[int(rng.integers(len(SHAPES)))],
        }
        leaves = int(rng.integers(0, 12)) if rng.random() < 0.15 else None
        requests.append(Asked(f"r{i}", prompts[-1], params, int(rng.integers(3)), int(rng.integers(0, 4)), leaves))
    return tuple(requests)


@functools.lru_cache
def model(windowed):
    return layered_checkpoint("full", "window 16" if windowed else "full", vocab_size=VOCAB)


@functools.lru_cache
def alone(seed, windowed, backend):
    """Each request by itself, one after the other, dense, without a cache, a step at a time, in one piece, on the
    backend that the running test is about."""
    it = served(
        checkpoint=model(windowed), cache=False, store="dense", slots=2, context=CONTEXT, chunk=128, busy=128,
        options={"force_sync": True},
    )  # fmt: skip
    found = {}
    for asked in crowd(seed, windowed):
        reply = it.ask(asked.prompt, asked.name, **asked.params)
        it.run()
        found[asked.name] = said(reply)
    return found


def serve_all(it, requests):
    replies, leaving = {}, []
    for asked in requests:
        replies[asked.name] = it.ask(asked.prompt, asked.name, lane=asked.lane, **asked.params)
        if asked.leaves is not None:
            leaving.append([asked.leaves, asked.name])
        for _ in range(asked.gap):
            it.tick()
            for each in leaving:
                each[0] -= 1
                if each[0] == 0:
                    replies[each[1]].cancel()
    for _, name in leaving:
        replies[name].cancel()
    it.run()
    return {name: said(reply) for name, reply in replies.items()}


SMALL = CONTEXT // 16 + 2
"""Pages: hardly more than a row of the whole context, so that five rows are always short."""

POOLS = {
    "dense": {"store": "dense"},
    "paged": {"store": "paged"},
    "paged, always short": {"store": "paged", "pages": SMALL},
}


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("pool", POOLS)
def test_each_of_200_requests_says_what_it_says_alone(backend, pool, cache):
    check_crowd(pool, cache, windowed=False, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("pool", POOLS)
def test_so_do_other_crowds_and_models_with_windows(pool, cache, windowed, seed):
    check_crowd(pool, cache, windowed=windowed, seed=seed)


def check_crowd(pool, cache, *, windowed, seed):
    requests, expected = crowd(seed, windowed), alone(seed, windowed, backend_in_test())
    it = served(checkpoint=model(windowed), cache=cache, slots=5, context=CONTEXT, chunk=32, busy=16, **POOLS[pool])
    found = serve_all(it, requests)
    for asked in requests:
        for choice, one in found[asked.name].items():
            whole = expected[asked.name][choice]
            if one.cause == "cancelled":
                assert asked.leaves is not None
                assert one.ids == whole.ids[: len(one.ids)]
                assert whole.text.startswith(one.text)
            else:
                assert one == whole, asked
    counted = it.scheduler.stats()
    cancelled = sum(one.cause == "cancelled" for each in found.values() for one in each.values())
    assert 5 < cancelled < 60
    assert counted.request_started_total == sum(counted.request_finished_total.values())
    assert (counted.preemptions_total.total() > 30) is (pool == "paged, always short"), counted.preemptions_total
    if cache:
        least = 4 if pool == "dense" else 10  # big pages: no more prompts are kept than rows are free
        assert it.it.cache.stats().hits >= least
        assert counted.prompt_tokens_cached_total >= 16, (
            "the shortest hit; what came back after a preemption is no part"
        )
    assert it.all_free()
