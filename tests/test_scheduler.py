"""Requests through the scheduler, on a script and the manual clock (spec 7)."""

import gc
import weakref

import numpy as np
import pytest
from engine_rows import spec
from scheduler_rows import STORES, alone, bench, drained, seen

from mlxcel.choices import choices
from mlxcel.core.events import Delta, Started
from mlxcel.core.request import Request
from mlxcel.errors import (
    ContextTooLong,
    EmptyPrompt,
    QueueFull,
    RequestError,
    RequestTimeout,
    ShuttingDown,
    SlowClient,
)

BUDGETS = (1, 2, 3, 5, 8, 40, 40, 40)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_h_g5_short_replies_leave_the_others_alone(store, slots):
    """H-G5: a row that ends early, and who takes its slot, touch nobody."""
    it = bench(store=store, slots=slots)
    replies = [it.ask(f"row{i}", b"p" * (i + 1), max_tokens=n) for i, n in enumerate(BUDGETS)]
    it.run()
    for i, (reply, n) in enumerate(zip(replies, BUDGETS, strict=True)):
        one = seen(reply)[0]
        assert (one.text, one.ids, one.result.cause) == alone(f"row{i}", b"p" * (i + 1), max_tokens=n)
        assert len(one.ids) == n
    assert it.all_free()


@pytest.mark.parametrize("concurrency", range(1, 10))
def test_h_g7_joins_at_random_steps_mix_no_replies(concurrency):
    """H-G7: each stream carries its own marker, at odd sizes and with late joiners."""
    rng = np.random.default_rng(concurrency)
    it = bench(store="paged", slots=4)
    replies = {}
    for i in range(concurrency):
        budget = int(rng.integers(1, 30))
        replies[f"m{i}"] = (budget, it.ask(f"m{i}", b"x" * int(rng.integers(1, 90)), max_tokens=budget))
        for _ in range(int(rng.integers(0, 6))):
            it.scheduler.tick()
    it.run()
    for name, (budget, reply) in replies.items():
        assert seen(reply)[0].text == (f"{name}-" * 200)[:budget]


def test_events_of_a_row_come_in_order():
    """C16: started, deltas, one end."""
    it = bench()
    reply = it.ask("a", max_tokens=3, before="said before: ")
    it.run()
    assert [type(event) for event in reply][:2] == [Started, Delta]
    assert reply.ended
    assert reply.get(0) is None
    it = bench()
    reply = it.ask("a", max_tokens=3, before="said before: ")
    it.run()
    one = seen(reply)[0]
    assert one.text == "said before: a-a"
    assert one.result.timings.accepted <= one.result.timings.started <= one.result.timings.first_token


def test_max_tokens_zero_runs_no_forward():
    """E9."""
    it = bench()
    reply = it.ask("a", max_tokens=0)
    it.run()
    assert (seen(reply)[0].result.cause, it.it.backend.steps) == ("max_tokens", 0)
    assert it.all_free()


@pytest.mark.parametrize("budget", [1, 2, 5])
@pytest.mark.parametrize("force_sync", [False, True])
def test_no_forward_runs_behind_the_last_token(budget, force_sync):
    """E13, with and without run-ahead."""
    it = bench(options={"force_sync": force_sync})
    it.ask("a", max_tokens=budget)
    it.run()
    assert it.it.backend.steps == budget


def test_choices_are_rows_of_one_request():
    """C13: each with its own index, seed and text; choice 0 keeps the seed, and any seed sent back repeats its row."""
    it = bench(slots=2)
    reply = it.ask("a", max_tokens=6, n=3, temperature=1.0, seed=42)
    it.run()
    heard = seen(reply)
    assert {choice: one.text for choice, one in heard.items()} == {0: "a-a-a-", 1: "a1-a1-", 2: "a2-a2-"}
    seeds = [heard[choice].result.params.seed for choice in range(3)]
    assert seeds[0] == 42
    assert seeds[1] == 0x6AF9300FDEC9B9E0  # spec 4.9, check value
    assert len(set(seeds)) == 3
    assert [result.request_id for result in it.ended] == ["a"] * 3


def test_a_request_is_checked_before_the_queue():
    """C9: refused at the door, with its end record, and nobody else notices."""
    it = bench(context=32)
    running = it.ask("a", max_tokens=4)
    it.scheduler.tick()
    for prompt, error in ((b"x" * 32, ContextTooLong), (b"", EmptyPrompt)):
        with pytest.raises(error):
            it.ask("bad", prompt)
    with pytest.raises(RequestError):
        it.ask("bad", stop_token_ids=(10_000,))
    cut = it.ask("cut", b"0123456789" * 4, truncate_prompt_tokens=-1, max_tokens=4)
    it.run()
    assert seen(running)[0].result.cause == "max_tokens"
    result = seen(cut)[0].result
    assert (result.truncated_tokens, len(result.prompt_ids)) == (12, 28)
    counted = it.scheduler.stats()
    assert counted.request_started_total == 5
    assert counted.request_finished_total == {"rejected": 3, "max_tokens": 2}


def test_a_request_says_what_is_wrong_with_itself():
    row = spec("a")
    with pytest.raises(RequestError, match="priority is 3, it must be 0, 1 or 2"):
        Request((row,), lane=3)
    with pytest.raises(RequestError, match="timeout is -1"):
        Request((row,), timeout=-1)
    with pytest.raises(ValueError, match="at least one choice"):
        Request(())
    with pytest.raises(ValueError, match="another prompt"):
        Request((choices(spec("a", n=2))[0], choices(spec("a", b"other", n=2))[1]))


def test_h_k7_the_queue_is_bounded_and_decides_at_once():
    """H-K7, C8: rows 1, queue 2, ten requests: the overflow is answered before the running row's next step."""
    it = bench(slots=1, options={"max_queue_depth": 2})
    replies = [it.ask("a", max_tokens=5)]
    it.scheduler.tick()
    before, refused = it.it.backend.steps, []
    for i in range(9):
        try:
            replies.append(it.ask(f"r{i}", max_tokens=2))
        except QueueFull as error:
            refused.append((error.code, 1 <= error.values["retry_after"] <= 60))
    assert refused == [("queue_full", True)] * 7
    assert (len(replies), it.it.backend.steps) == (3, before)
    it.run()
    assert [seen(reply)[0].result.cause for reply in replies] == ["max_tokens"] * 3
    assert it.scheduler.stats().request_finished_total == {"max_tokens": 3, "rejected": 7}
    assert len(it.ended) == 10


def test_a_free_place_is_no_queue():
    """C8: what will run at once does not wait, though no tick has come yet."""
    it = bench(slots=2, options={"max_queue_depth": 1})
    for i in range(3):
        it.ask(f"r{i}", max_tokens=1)
    with pytest.raises(QueueFull):
        it.ask("r3", max_tokens=1)
    it.run()
    it.ask("r4", max_tokens=1)


def test_lanes_go_by_virtual_arrival():
    """C7: a lane is T_age of waiting; ties go by number."""
    it = bench(slots=1, options={"ageing": 10.0})
    order = []
    first = it.ask("first", max_tokens=3)
    it.scheduler.tick()
    asked = {"low": it.ask("low", lane=2, max_tokens=1)}
    it.clock.advance(19.0)
    asked["high"] = it.ask("high", lane=0, max_tokens=1)  # arrives at 19, before the low one's 20
    asked["normal"] = it.ask("normal", lane=1, max_tokens=1)  # 29
    it.clock.advance(2.0)
    asked["late"] = it.ask("late", lane=0, max_tokens=1)  # 21: too late to pass the low one
    while it.scheduler.tick():
        order += [name for name, reply in asked.items() if reply.over and name not in order]
    assert order == ["high", "low", "late", "normal"]
    assert first.over


def test_without_ageing_there_are_no_lanes():
    """C7: T_age 0."""
    it = bench(slots=1, options={"ageing": 0.0})
    it.ask("first", max_tokens=3)
    it.scheduler.tick()
    asked = {"low": it.ask("low", lane=2, max_tokens=1), "high": it.ask("high", lane=0, max_tokens=1)}
    order = []
    while it.scheduler.tick():
        order += [name for name, reply in asked.items() if reply.over and name not in order]
    assert order == ["low", "high"]


def test_a_low_request_under_endless_high_load_starts():
    """C7: within 2 * T_age of the clock that steps advance, plus what already runs."""
    it = bench(slots=1, delay=0.5, options={"ageing": 2.0, "max_queue_depth": 1000})
    low = None
    for i in range(60):
        if i == 5:
            low = (it.clock(), it.ask("low", lane=2, max_tokens=1))
        it.ask(f"h{i}", lane=0, max_tokens=2)
        it.scheduler.tick()
        it.scheduler.tick()
    it.run()
    asked, reply = low
    started = seen(reply)[0].result.timings.started
    backlog = 5 * 2 * 0.5  # of high requests that were there before it
    assert started - asked <= 2 * 2.0 + backlog + 1.0


def test_a_timeout_counts_the_queue():
    """C14: queued it is rejected, running it is cancelled, code `timeout`."""
    it = bench(slots=1, delay=1.0)
    runs, waits = it.ask("runs", max_tokens=40, timeout=10), it.ask("waits", max_tokens=40, timeout=5)
    it.run()
    running, queued = seen(runs)[0], seen(waits)[0]
    assert (running.result.cause, queued.result.cause) == ("cancelled", "rejected")
    for one in (running, queued):
        assert one.result.detail == "timeout"
        assert isinstance(one.result.error, RequestTimeout)
    assert 8 <= len(running.ids) <= 11
    assert queued.ids == ()
    assert it.all_free()


def test_a_request_that_ended_does_not_wait_for_its_deadline():
    """C14, H-K7: what is over is let go of, though an older one goes on and an hour is left of its time."""
    it = bench(lambda row: [120] * 1000, slots=2, context=1000)
    older = it.ask("older", max_tokens=900, timeout=3600)
    it.scheduler.tick()
    ended = [weakref.ref(it.ask(f"row{i}", max_tokens=3, timeout=3600)._outbox) for i in range(4)]
    for _ in range(40):
        it.scheduler.tick()
    it.ended.clear()
    gc.collect()
    assert not older.over
    assert [outbox() for outbox in ended] == [None] * 4
    it.clock.advance(3600)
    it.run()
    assert seen(older)[0].result.detail == "timeout"


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("store", STORES)
def test_h_k3_cancel_in_every_phase(store, when):
    """H-K3, C30, C31: queued, in its pieces, decoding: it ends within two steps, pages come back, others go on."""
    it = bench(store=store, slots=2, chunk=16)
    stays = it.ask("stays", max_tokens=20)
    goes = it.ask("goes", b"long prompt " * 8, max_tokens=20)
    queued = it.ask("queued", max_tokens=20)
    for _ in range(when):
        it.scheduler.tick()
    goes.cancel()
    queued.cancel()
    goes.cancel()
    steps = it.it.backend.steps
    while not goes.over:
        it.scheduler.tick()
    assert it.it.backend.steps - steps <= 2
    it.run()
    assert [seen(reply)[0].result.cause for reply in (goes, queued)] == ["cancelled"] * 2
    assert seen(stays)[0].text == alone("stays", max_tokens=20)[0]
    assert it.all_free()
    goes.cancel()
    it.run()
    assert len(it.ended) == 3


def test_h_k5_cancel_right_after_submit_is_harmless():
    """H-K5: a hundred times, before the first tick."""
    it = bench(slots=2, options={"max_queue_depth": 200})
    replies = [it.ask(f"r{i}", max_tokens=5) for i in range(100)]
    for reply in replies:
        reply.cancel()
    other = it.ask("other", max_tokens=5)
    it.run()
    assert {seen(reply)[0].result.cause for reply in replies} == {"cancelled"}
    assert seen(other)[0].result.cause == "max_tokens"
    assert it.it.backend.steps == 5
    assert it.all_free()


def test_cancelling_a_request_ends_all_its_choices():
    """C13."""
    it = bench(slots=2)
    reply = it.ask("a", max_tokens=50, n=4)
    for _ in range(3):
        it.scheduler.tick()
    reply.cancel()
    it.run()
    assert [one.result.cause for one in seen(reply).values()] == ["cancelled"] * 4


def test_a_cancelled_row_hands_out_its_tail():
    """F13: text that waited for a stop string comes with the end."""
    it = bench({"a": list(b"xEN" + b"x" * 50)})
    reply = it.ask("a", stop=("END!",), max_tokens=50)
    while not any(
        type(event) is Delta and event.token_ids == (ord("N"),) for event in iter(lambda: reply.get(0), None)
    ):
        it.scheduler.tick()
    reply.cancel()
    it.run()
    text = "".join(event.text for event in reply if type(event) is Delta)
    assert text.startswith("EN")


def test_a_slow_reader_costs_the_others_nothing():
    """C15: the engine thread never waits; what is unread is merged without loss, and too much of it ends the row."""
    it = bench(lambda row: list(b"y" * 4000), context=4096)
    slow, quick = it.ask("slow", max_tokens=2000), it.ask("quick", max_tokens=2000)
    heard = []
    while it.scheduler.tick():
        heard += drained(quick)
    assert len(heard) > 1500
    events = list(slow)
    assert len(events) <= 256 + 3
    assert "".join(event.text for event in events if type(event) is Delta) == "y" * 2000
    assert sum(len(event.token_ids) for event in events if type(event) is Delta) == 2000


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch):
    """C15: beyond the bound of bytes the row is cancelled as a slow client."""
    monkeypatch.setattr("mlxcel.core.outbox.MAX_BYTES", 1000)
    it = bench(lambda row: list(b"y" * 4000), context=4096)
    slow, other = it.ask("slow", max_tokens=2000), it.ask("other", max_tokens=50)
    it.run()
    result = seen(slow)[0].result
    assert (result.cause, result.detail) == ("cancelled", "slow_client")
    assert isinstance(result.error, SlowClient)
    assert len(result.token_ids) < 200
    assert seen(other)[0].result.cause == "max_tokens"
    assert it.scheduler.stats().slow_clients_total == 1


def test_a_listener_that_raises_is_a_client_that_left():
    it = bench()
    reply = it.ask("a", max_tokens=40)

    def gone():
        raise RuntimeError("the loop is closed")

    reply.listen(gone)
    other = it.ask("b", max_tokens=4)
    it.run()
    assert seen(reply)[0].result.cause == "cancelled"
    assert seen(other)[0].result.cause == "max_tokens"
    assert it.scheduler.stats().slow_clients_total == 0


def test_draining_takes_nothing_new_and_finishes_what_it_has():
    """C60."""
    it = bench(slots=1)
    running, waiting = it.ask("a", max_tokens=10), it.ask("b", max_tokens=10)
    it.scheduler.tick()
    it.scheduler.drain()
    assert not it.scheduler.healthy
    with pytest.raises(ShuttingDown):
        it.ask("c")
    it.scheduler.join()
    assert [seen(reply)[0].result.cause for reply in (running, waiting)] == ["max_tokens"] * 2
    assert not it.scheduler.tick()


def test_a_drain_with_a_limit_cuts_off_what_is_left():
    """C60: an error event, and the engine is clean."""
    it = bench(slots=1, delay=1.0)
    short, long = it.ask("a", max_tokens=3), it.ask("b", max_tokens=200)
    it.scheduler.tick()
    it.scheduler.drain(limit=10.0)
    it.scheduler.join()
    assert seen(short)[0].result.cause == "max_tokens"
    cut = seen(long)[0].result
    assert (cut.cause, cut.detail) == ("cancelled", "shutting_down")
    assert 3 <= len(cut.token_ids) <= 10
    assert it.all_free()
    it.scheduler.close()
    it.scheduler.close()


@pytest.mark.parametrize("store", STORES)
def test_h_k14_every_request_has_one_end_record(store):
    """H-K14, E20: 500 mixed requests: finished, cancelled, timed out, rejected."""
    rng = np.random.default_rng(5)
    it = bench(store=store, pages=40 if store == "paged" else None, slots=4, delay=0.01, context=128)
    replies, rejected = [], 0
    for i in range(500):
        try:
            replies.append(
                it.ask(
                    f"r{i}",
                    b"z" * int(rng.integers(1, 60)),
                    max_tokens=int(rng.integers(0, 12)),
                    lane=int(rng.integers(3)),
                    timeout=float(rng.choice([0.0, 0.05, 1.0])),
                )
            )
        except QueueFull:
            rejected += 1
        if rng.random() < 0.2 and replies:
            replies[int(rng.integers(len(replies)))].cancel()
        for _ in range(int(rng.integers(0, 4))):
            it.scheduler.tick()
    it.run()
    counted = it.scheduler.stats()
    assert counted.request_started_total == sum(counted.request_finished_total.values()) == 500
    assert len(it.ended) == 500
    assert sorted(result.request_id for result in it.ended) == sorted(f"r{i}" for i in range(500))
    for reply in replies:
        seen(reply)
    assert {"max_tokens", "cancelled", "rejected"} <= set(counted.request_finished_total)
    assert (counted.num_requests_running, counted.num_requests_waiting, counted.rows_busy) == (0, 0, 0)
    assert it.all_free()
    assert it.it.engine.open_sequences == ()


def test_prompts_are_scored_once_for_all_choices():
    """P5: with `prompt_logprobs` the prompt is scored on a row of its own, which waits its turn like any piece."""
    it = bench(chunk=16)
    busy = it.ask("busy", max_tokens=30)
    it.scheduler.tick()
    reply = it.ask("a", b"q" * 40, max_tokens=3, prompt_logprobs=0, n=2)
    it.run()
    heard = seen(reply)
    for choice in (0, 1):
        scored = heard[choice].result.prompt_logprobs
        assert scored[0] is None
        assert [entry.token for entry in scored[1:]] == list(b"q" * 39)
        assert len(heard[choice].ids) == 3
    assert seen(busy)[0].text == alone("busy", max_tokens=30)[0]
    one = it.ask("one", b"q", max_tokens=0, prompt_logprobs=0)
    it.run()
    assert seen(one)[0].result.prompt_logprobs == (None,)
    assert it.all_free()


def test_rows_stand_in_admission_order_and_decode_before_pieces():
    """C50."""
    orders = []

    class Watch:
        def step_finished(self, report):
            orders.append([(type(part).__name__, part.sequence_id) for part in report.parts])

        def request_finished(self, result):
            pass

    it = bench(observers=(Watch(),), chunk=8, busy=8)
    for i in range(4):
        it.ask(f"r{i}", b"w" * 20, max_tokens=5)
        it.scheduler.tick()
    it.run()
    assert any(len({kind for kind, _ in order}) == 2 for order in orders), "some step was mixed"
    for order in orders:
        kinds = [kind for kind, _ in order]
        assert kinds == sorted(kinds), "decodes first"
        decodes = [number for kind, number in order if kind == "Decode"]
        assert decodes == sorted(decodes)
