"""The scheduler on a thread of its own: many clients, a step that hangs, a death (spec C31, C36, C37, C62)."""

import random
import threading

import pytest
from engine_rows import spec
from other_threads import PATIENCE
from scheduler_rows import alone, bench, seen

from mlxcel.core.events import Delta, Ended
from mlxcel.core.outbox import MAX_BYTES, Outbox
from mlxcel.core.watchdog import Watchdog
from mlxcel.errors import EngineUnhealthy, QueueFull
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.clock import ManualClock


def test_clients_of_many_threads_share_the_rows():
    it = bench(slots=3, options={"max_queue_depth": 64})
    found = {}

    def client(name):
        for turn in range(5):
            found[name, turn] = seen(it.ask(f"{name}{turn}", max_tokens=12))[0].text

    with it.scheduler:
        it.scheduler.start()
        threads = [threading.Thread(target=client, args=(name,)) for name in "abcdefgh"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    assert found == {(name, turn): alone(f"{name}{turn}", max_tokens=12)[0] for name in "abcdefgh" for turn in range(5)}
    assert it.all_free()


def test_closing_ends_what_runs_and_all_threads():
    before = set(threading.enumerate())
    it = bench(lambda row: [120] * 100_000, context=100_000)
    it.scheduler.start()
    assert it.scheduler.wait_ready(PATIENCE)
    reply = it.ask("a", max_tokens=90_000)
    assert reply.get(PATIENCE) is not None
    it.scheduler.close()
    it.scheduler.close()
    assert set(threading.enumerate()) <= before
    assert seen_end(reply).cause == "cancelled"
    with pytest.raises(EngineUnhealthy, match="closed"):
        it.ask("b")


def seen_end(reply):
    return [event for event in reply if isinstance(event, Ended)][-1].result


def test_a_listener_that_hears_of_an_end_may_ask_for_the_next_request():
    """On the engine's thread, in the midst of its work: it must not wait for itself (C15)."""
    it = bench()
    replies, done = [], threading.Event()

    def ask_next():
        if len(replies) == 4:
            done.set()
        elif not replies or replies[-1].over:
            replies.append(it.ask("abcd"[len(replies)], max_tokens=3))
            replies[-1].listen(ask_next)

    it.scheduler.start()
    ask_next()
    assert done.wait(PATIENCE)
    assert [seen(reply)[0].text for reply in replies] == [alone(name, max_tokens=3)[0] for name in "abcd"]
    it.scheduler.close()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_who_asks_again_at_the_end_of_a_reply_does_not_wait(run_ahead):
    """C8: of a queue that holds nothing. The one place is as good as free when the client hears of the end, and stays
    so while a step that was begun before is in flight; a second request would wait."""
    options = {"max_queue_depth": 0, "force_sync": not run_ahead}
    it = bench(lambda row: [120, 120, EOS, EOS], slots=1, options=options)
    replies, refused = [it.ask("first")], []

    def ask_next():
        if len(replies) < 4 and replies[-1].over:
            replies.append(it.ask(f"next {len(replies)}"))
            replies[-1].listen(ask_next)
            try:
                it.ask("too many")
            except QueueFull as error:
                refused.append(error)

    replies[0].listen(ask_next)
    it.run()
    for _ in range(3):
        replies.append(it.ask(f"later {len(replies)}"))
        while not replies[-1].over:
            it.scheduler.tick()
    it.run()
    assert [seen(reply)[0].text for reply in replies] == ["xx"] * 7
    assert len(refused) == 3
    assert it.all_free()


def test_a_cancel_from_another_thread_ends_a_row_that_runs():
    """C31."""
    it = bench(lambda row: [120] * 100_000, context=100_000)
    with it.scheduler:
        it.scheduler.start()
        reply = it.ask("a", max_tokens=90_000)
        assert reply.get(PATIENCE) is not None
        reply.cancel()
        assert seen_end(reply).cause == "cancelled"
        assert seen(it.ask("b", max_tokens=2))[0].result.cause == "max_tokens"


def test_h_k13_what_serves_is_warmed_up_on_its_own_thread():
    """H-K13, C62: rows of the warm-up run through prefill and decode there, and nobody hears of them."""
    it = bench()
    where = []
    submit = it.it.backend.submit
    it.it.backend.submit = lambda plan: (where.append(threading.current_thread().name), submit(plan))[1]
    with it.scheduler:
        it.scheduler.start(warm_up=[spec("warm", max_tokens=3), spec("hot", max_tokens=2, temperature=1.0)])
        assert it.scheduler.wait_ready(PATIENCE)
        assert where == ["mlxcel-engine"] * 5
        assert it.ended == []
        assert seen(it.ask("a", max_tokens=4))[0].result.cause == "max_tokens"


def test_a_dead_engine_thread_is_unhealthy_and_says_so():
    """C37: a mistake of ours is told to every client, in words of its own."""
    it = bench(slots=1)
    started = threading.Event()

    def broken(ticket):
        started.wait(PATIENCE)
        raise ZeroDivisionError("a mistake")

    it.it.engine.collect = broken
    it.scheduler.start()
    replies = [it.ask("a", max_tokens=9), it.ask("b", max_tokens=9)]
    started.set()
    for reply in replies:
        result = seen_end(reply)
        assert (result.cause, result.detail) == ("error", "engine_unhealthy")
        assert "the engine thread died: ZeroDivisionError" in str(result.error)
    assert it.scheduler.join(PATIENCE)
    with pytest.raises(EngineUnhealthy, match="died"):
        it.ask("c")
    assert not it.scheduler.healthy
    it.scheduler.close()


def test_a_hanging_step_is_noticed_and_every_client_told():
    """C36: the engine's thread cannot; the watchdog tells them. What the step gives later is dropped."""
    it = bench(options={"decode_timeout": 60.0})
    hangs, goes_on = threading.Event(), threading.Event()
    read = it.it.backend.read

    def slow(handle):
        hangs.set()
        goes_on.wait(PATIENCE)
        return read(handle)

    it.it.backend.read = slow
    it.scheduler.start()
    replies = [it.ask("a", max_tokens=9), it.ask("b", max_tokens=9)]
    assert hangs.wait(PATIENCE)
    assert not it.scheduler._watchdog.look(), "its time is not over"
    it.clock.advance(61.0)
    assert it.scheduler._watchdog.look()
    for reply in replies:
        result = seen_end(reply)
        assert (result.detail, str(result.error)) == ("engine_unhealthy", "no step finished for 60 s")
    with pytest.raises(EngineUnhealthy, match="no step finished"):
        it.ask("c")
    goes_on.set()
    it.scheduler._thread.join(PATIENCE)
    assert not it.scheduler._thread.is_alive()
    assert sorted(result.request_id for result in it.ended) == ["a", "b", "c"]
    assert it.all_free()
    it.scheduler.close()


def test_the_watchdog_watches_only_while_rows_exist():
    """C36, in the order of events on a clock: idle time and a finished step do not count, 0 is off, it fires once."""
    clock, fired = ManualClock(), []
    dog = Watchdog(10.0, clock, fired.append)
    clock.advance(100)
    assert not dog.look()
    dog.busy(True)
    clock.advance(9)
    dog.step_finished()
    clock.advance(9)
    assert not dog.look()
    dog.busy(False)
    clock.advance(50)
    assert not dog.look()
    dog.busy(True)
    dog.busy(True)
    clock.advance(10)
    assert dog.look()
    dog.look()
    assert fired == [10.0]
    off = Watchdog(0, clock, fired.append)
    off.busy(True)
    clock.advance(1e9)
    assert not off.look()


def test_a_choice_ends_once_whoever_ends_it():
    """E20: the engine's thread and the watchdog's may both want to."""
    for _ in range(20):
        outbox, results = Outbox(1), []
        barrier = threading.Barrier(4)

        def end(outbox=outbox, results=results, barrier=barrier):
            barrier.wait(PATIENCE)
            results.append(outbox.end(Ended(0, None)))

        threads = [threading.Thread(target=end) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(results) == [False, False, False, True]
        assert isinstance(outbox.get(0), Ended)
        assert outbox.get(0) is None


def test_a_storm_of_clients_in_a_pool_that_is_short():
    """C15 to C31 at once: eight threads submit, read, cancel, run out of time; every text is its own, none leaks."""
    it = bench(store="paged", pages=14, slots=4, context=144, options={"max_queue_depth": 6})
    wrong, causes = [], set()

    def client(number):
        pick = random.Random(number)
        for turn in range(12):
            name = f"c{number}.{turn}"
            asked = {"max_tokens": pick.randint(0, 40), "n": pick.choice([1, 1, 3]), "lane": pick.randint(0, 2)}
            try:
                reply = it.ask(name, b"abcdefghij" * pick.randint(1, 8), timeout=pick.choice([0, 0, 1e-9]), **asked)
            except QueueFull:
                causes.add("rejected")
                continue
            if pick.random() < 0.3:
                reply.cancel()
            for choice, one in seen(reply).items():
                causes.add(one.result.cause)
                if one.text != (f"{name}{choice or ''}-" * 200)[: len(one.ids)]:
                    wrong.append((name, one.text))

    with it.scheduler:
        it.scheduler.start()
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    assert wrong == []
    assert {"max_tokens", "cancelled"} <= causes <= {"max_tokens", "cancelled", "rejected"}
    counted = it.scheduler.stats()
    assert counted.request_started_total == sum(counted.request_finished_total.values()) == len(it.ended)
    assert it.all_free()


def test_a_poll_does_not_wait(monkeypatch):
    """Each event is followed by a poll that finds none: even a wait of no time costs more than the event."""
    monkeypatch.setattr(threading.Condition, "wait", lambda *args: pytest.fail("waited"))
    outbox = Outbox(1)
    assert outbox.get(0) is None
    for text in ("one", "two"):
        outbox.put(Delta(0, text))
    assert [outbox.get(0).text for _ in range(2)] == ["one", "two"]
    assert outbox.get(0) is None


def test_what_was_read_counts_no_more():
    """Whether all was read in between, or something always waits."""
    large = "x" * (MAX_BYTES // 4)
    outbox = Outbox(1)
    for _ in range(9):
        assert outbox.put(Delta(0, large))
        assert outbox.get(0).text == large
    assert outbox.put(Delta(0, large))
    for _ in range(9):
        assert outbox.put(Delta(0, large))
        outbox.get(0)
    assert [outbox.put(Delta(0, large)) for _ in range(4)] == [True, True, True, False]
