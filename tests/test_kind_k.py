"""The scheduler over a real model: preemption, hang-ups, queue, drain, threads, end records (hand cases K).

Health and signals of a server (H-K9, and the signal of H-K11) are the server's own; here is what they stand on.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from other_threads import PATIENCE
from real_scheduler import random_ids, said, served

from mlxcel.core.events import Ended, Started
from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.errors import QueueFull, ShuttingDown

pytestmark = pytest.mark.on_jax(most=0)

STORES = ("dense", "paged")

LONG = [random_ids(40, seed=seed) for seed in range(3)]
KINDS = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "mirostat": {"temperature": 1.0, "seed": 5, "mirostat": 2},
    "penalties": {"repetition_penalty": 1.3, "dry_multiplier": 1.5, "dry_allowed_length": 1},
    "held text": {"temperature": 1.0, "seed": 6, "stop": ("0123", "/.-", "987")},
}


def alone(prompt, **params):
    return served(cache=False, store="dense").answer(prompt, **params)


@pytest.mark.parametrize("cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("kind", KINDS)
def test_h_k1_a_preempted_request_has_no_gap_and_no_repeat(backend, kind, cache):
    """Pages for 1.5 of three long requests: ids, text and log-probabilities are those of the request alone, and what
    was streamed is what the result holds."""
    params = {"max_tokens": 60, "logprobs": 1, **KINDS[kind]}
    it = served(cache=cache, store="paged", pages=10, slots=3, context=128)
    replies = [it.ask(prompt, **params) for prompt in LONG]
    it.run()
    assert it.scheduler.stats().preemptions_total.total() > 0
    assert [said(reply)[0] for reply in replies] == [alone(prompt, **params) for prompt in LONG]
    assert it.all_free()


@pytest.mark.parametrize("behind", [40, 52])
def test_h_k1_pages_before_one_that_a_row_shares_with_the_cache_come_free_too(behind):
    """C23, X12: two rows compute one beginning at a time, the first leaves its pages to the cache, and the second
    shares the page behind them. It is alone then, and must get every page there is."""
    ids = random_ids(60, seed=9)
    it = served(store="paged", pages=8, slots=2, context=128, options={"watermark": 0.0})
    first = it.ask(ids[:behind], max_tokens=1)
    second = it.ask(ids, max_tokens=68)
    it.run()
    assert [said(first)[0], said(second)[0]] == [alone(ids[:behind], max_tokens=1), alone(ids, max_tokens=68)]
    assert it.all_free()


@pytest.mark.parametrize("ticks", range(38, 44))
def test_h_k1_pages_that_a_victim_shared_with_the_cache_come_free_too(backend, ticks):
    """C23: the prompt of a later row is kept as soon as it is computed, and then the cache has every page of that row.
    The first row, which needs one more, must get it once the later one gave way."""
    it = served(store="paged", pages=8, slots=2, context=128, busy=48, options={"watermark": 0.0})
    first = it.ask(LONG[0], max_tokens=88)
    for _ in range(ticks):
        it.tick()
    prompt = random_ids(48, seed=7)  # three whole pages; the first row is about to take its sixth of eight
    later = it.ask(prompt, max_tokens=60)
    it.run()
    assert said(first)[0] == alone(LONG[0], max_tokens=88)
    assert said(later)[0] == alone(prompt, max_tokens=60)
    assert it.all_free()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 6, 12])
def test_h_k3_a_client_that_leaves_frees_its_row_in_every_phase(backend, store, ticks):
    """Queued, in its pieces, decoding: within two steps; the rest says what it says alone."""
    it = served(store=store, slots=2, chunk=16)
    stays = it.ask(LONG[0], max_tokens=20)
    goes = it.ask(random_ids(90, seed=9), max_tokens=30)
    queued = it.ask(LONG[1], max_tokens=20)
    for _ in range(ticks):
        it.tick()
    before = it.scheduler.stats().steps_total.total()
    goes.cancel()
    queued.cancel()
    while not (goes.over and queued.over):
        it.tick()
    assert it.scheduler.stats().steps_total.total() - before <= 2
    assert it.scheduler.stats().rows_busy <= 1
    it.run()
    assert [said(reply)[0].cause for reply in (goes, queued)] == ["cancelled", "cancelled"]
    assert said(stays)[0] == alone(LONG[0], max_tokens=20)
    assert it.all_free()


@pytest.mark.parametrize("store", STORES)
def test_h_k5_an_abort_before_the_first_tick_is_harmless(store):
    it = served(store=store)
    for _ in range(100):
        it.ask(LONG[0], max_tokens=5).cancel()
    reply = it.ask(LONG[1], max_tokens=5)
    it.run()
    assert said(reply)[0] == alone(LONG[1], max_tokens=5)
    assert it.scheduler.stats().request_finished_total == {"cancelled": 100, "max_tokens": 1}
    assert it.all_free()


def test_h_k7_the_overflow_is_answered_before_the_next_step():
    it = served(store="paged", slots=1, options={"max_queue_depth": 2})
    replies = [it.ask(LONG[0], max_tokens=5)]
    it.tick()
    steps, refused = it.scheduler.stats().steps_total.total(), []
    for _ in range(9):
        try:
            replies.append(it.ask(LONG[1], max_tokens=5))
        except QueueFull as error:
            refused.append((error.code, error.values["retry_after"] >= 1))
    assert (len(replies), refused) == (3, [("queue_full", True)] * 7)
    assert it.scheduler.stats().steps_total.total() == steps
    it.run()
    assert [said(reply)[0] for reply in replies] == [alone(ids, max_tokens=5) for ids in (LONG[0], LONG[1], LONG[1])]


@pytest.mark.parametrize("limit", [0.0, 5.0])
def test_h_k11_a_drain_refuses_what_is_new_and_finishes_what_runs(limit):
    """With a limit what is left then is cancelled, and says why."""
    it = served(store="paged", slots=2)
    replies = [it.ask(prompt, max_tokens=20) for prompt in LONG]
    for _ in range(4):
        it.tick()
    it.scheduler.drain(limit)
    assert not it.scheduler.healthy
    with pytest.raises(ShuttingDown):
        it.ask(LONG[0], max_tokens=1)
    if limit:
        it.it.clock.advance(2 * limit)
    it.run()
    expected = "cancelled" if limit else "max_tokens"
    for prompt, reply in zip(LONG, replies, strict=True):
        events = list(reply)
        result = next(event.result for event in events if isinstance(event, Ended))
        assert result.cause == expected
        assert isinstance(result.error, ShuttingDown) is bool(limit)
        whole = alone(prompt, max_tokens=20).ids
        assert result.token_ids == whole[: len(result.token_ids)]
        assert len(result.token_ids) == 20 or limit
    it.scheduler.close()
    assert it.all_free()


def test_h_k13_the_first_request_of_each_thread_works(backend):
    """Clients on threads of their own, the engine on another; behind a warm-up through the real path."""
    it = served(store="paged", slots=3)
    expected = [alone(prompt, max_tokens=10) for prompt in LONG]
    found = {}

    def client(index):
        found[index] = said(it.ask(LONG[index % 3], max_tokens=10))[0]

    with it.scheduler:
        it.scheduler.start(warm_up=[spec(LONG[0])])
        assert it.scheduler.wait_ready(PATIENCE)
        threads = [threading.Thread(target=client, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert [found[index] for index in range(6)] == expected * 2


def spec(ids):
    return SequenceSpec("warm", np.asarray(ids, np.int32), SamplingParams(temperature=0, seed=0, max_tokens=2))


@pytest.mark.parametrize("store", STORES)
def test_h_k14_500_mixed_requests_have_500_ends(backend, store):
    """Finished, cancelled, rejected, never begun, of length zero: one end record each, one Ended event each."""
    rng = np.random.default_rng(3)
    it = served(
        store=store, slots=4, context=64, pages=6 if store == "paged" else None, options={"max_queue_depth": 6}
    )  # fmt: skip
    replies, refused = [], 0
    for n in range(500):
        try:
            prompt = random_ids(int(rng.integers(1, 30)), seed=n)
            replies.append(it.ask(prompt, f"r{n}", max_tokens=int(rng.integers(0, 6))))
        except QueueFull:
            refused += 1
        if replies and rng.random() < 0.15:
            replies[-1].cancel()
        for _ in range(int(rng.integers(0, 3))):
            it.tick()
    it.run()
    assert sorted(result.request_id for result in it.ended) == sorted(f"r{n}" for n in range(500))
    counted = it.scheduler.stats()
    assert counted.request_started_total == sum(counted.request_finished_total.values()) == 500
    assert counted.request_finished_total["rejected"] == refused > 0
    assert {"cancelled", "max_tokens"} <= set(counted.request_finished_total)
    for reply in replies:
        kinds = [type(event) for event in reply]
        assert kinds.count(Ended) == 1
        assert kinds[-1] is Ended
        assert kinds.count(Started) <= 1
    assert it.all_free()
