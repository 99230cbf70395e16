"""One step ahead, or read before the next: nobody can tell but by the clock (spec C51 to C53, E14)."""

import pytest
from scheduler_rows import alone, bench, seen
from test_packing import cached

from mlxcel.core.params import LoopDetection
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import RUN_ROWS

ENDINGS = {
    "eos": ([*b"abcdefgh", EOS, *b"x" * 60], {}, "eos"),
    "stop_token": ([*b"abcdefgh!", *b"x" * 60], {"stop_token_ids": (ord("!"),)}, "stop_token"),
    "stop_string": ([*b"abcSTOPx", *b"x" * 60], {"stop": ("STOP",)}, "stop_string"),
    "time_limit": ([*b"y" * 90], {"t_max_predict_ms": 900.0}, "time_limit"),
    "indent_limit": ([*b"a\n  b\nc", *b"x" * 60], {"n_indent": 2}, "indent_limit"),
    "max_tokens": ([*b"z" * 90], {"max_tokens": 7}, "max_tokens"),
    "context": ([*b"z" * 90], {}, "context"),
    "loop": ([*b"ab" * 40], {"loop_detection": LoopDetection(1, 4, 3)}, "loop"),
}


def counted_runs(it):
    """The rows of each run from now on."""
    runs, submit_run = [], it.it.backend.submit_run

    def counted(plans):
        runs.append(plans[0].num_rows)
        return submit_run(plans)

    it.it.backend.submit_run = counted
    return runs


def watched():
    steps = []

    class Watch:
        def step_finished(self, report):
            steps.append(report)

        def request_finished(self, result):
            pass

    return Watch(), steps


RUNS = (1, 4)
"""Steps that a backend takes together; rows that want log-probabilities take one at a time."""


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("store", ["dense", "paged"])
@pytest.mark.parametrize("together", RUNS)
def test_ahead_or_not_every_ending_is_the_same(ending, store, together):
    """C52, C54, E14: ids, text, log-probabilities, cause and what is left of the KV."""
    script, params, cause = ENDINGS[ending]
    if together == 1:
        params = {"logprobs": 1, **params}
    found = []
    for force_sync in (False, True):
        it = bench(
            {"a": script, "b": [*b"neighbour " * 9]}, store=store, context=64, delay=0.1,
            options={"force_sync": force_sync}, decode_run=together,
        )  # fmt: skip
        runs = counted_runs(it)
        a, b = it.ask("a", **params), it.ask("b", max_tokens=20)
        it.run()
        assert bool(runs) is (together > 1 and not force_sync)
        one = seen(a)[0]
        assert one.result.cause == cause
        assert (it.scheduler.stats().steps_ahead_total == 0) is force_sync
        found.append((one.text, one.ids, one.result.detail, one.result.logprobs, seen(b)[0].text))
        assert it.all_free()
    assert found[0] == found[1]


def test_the_pieces_of_a_prompt_run_ahead_of_one_another():
    """C51, P11: each but the first is submitted before the one ahead of it is read; the reply is what it is without."""
    found = []
    for force_sync in (False, True):
        it = bench({"a": [*b"reply"]}, chunk=4, delay=0.1, options={"force_sync": force_sync})
        a = it.ask("a", b"thirteen long", max_tokens=1)
        it.run()
        assert (it.it.backend.steps, it.scheduler.stats().steps_ahead_total) == (4, 0 if force_sync else 3)
        one = seen(a)[0]
        found.append((one.ids, one.text, one.result.cause))
        assert it.all_free()
    assert found[0] == found[1]


def test_a_request_that_leaves_between_pieces_takes_what_is_in_flight_with_it():
    """C51: nothing of it runs ahead from then on, and its neighbour's reply is what it is alone."""
    it = bench({"a": [*b"reply"], "b": [*b"other"]}, chunk=4)
    a, b = it.ask("a", b"thirteen long"), it.ask("b", b"nine long", max_tokens=5)
    it.scheduler.tick()
    a.cancel()
    it.run()
    assert seen(a)[0].result.cause == "cancelled"
    assert seen(b)[0].text == "other"
    assert it.all_free()


def test_a_row_that_the_host_must_know_makes_the_step_synchronous_for_all():
    """C51: DRY runs on the host; its neighbour's reply is what it is alone, and no step runs ahead meanwhile."""
    it = bench()
    plain = it.ask("plain", max_tokens=30)
    it.run()
    assert it.scheduler.stats().steps_ahead_total > 0
    it = bench()
    plain, dry = it.ask("plain", max_tokens=30), it.ask("dry", max_tokens=10, dry_multiplier=0.8)
    while not dry.over:
        it.scheduler.tick()
    host_bound = it.scheduler.stats().steps_ahead_total
    it.run()
    assert it.scheduler.stats().steps_ahead_total > host_bound
    assert host_bound <= 1
    assert len(seen(plain)[0].ids) == 30


@pytest.mark.parametrize("together", RUNS)
def test_never_more_than_one_step_or_run_ahead(together):
    """C52, C54, by what the backend is asked: submits and reads alternate once two steps, or two runs, are on their
    way."""
    it = bench(decode_run=together)
    calls = []
    backend = it.it.backend
    submit, read = backend.submit, backend.read
    backend.submit = lambda plan: (calls.append("submit"), submit(plan))[1]
    backend.read = lambda handle: (calls.append("read"), read(handle))[1]
    it.ask("a", max_tokens=30)
    it.run()
    ahead, most = 0, 0
    for call in calls:
        ahead += 1 if call == "submit" else -1
        most = max(most, ahead)
    assert (ahead, most) == (0, 2 * together)


@pytest.mark.parametrize("together", RUNS)
def test_work_that_is_due_is_not_run_ahead_of(together):
    """C51, C54: an admission, a piece, a cancellation: what is in flight is read first."""
    observer, steps = watched()
    it = bench(observers=(observer,), chunk=16, busy=16, decode_run=together)
    first = it.ask("first", max_tokens=40)
    for _ in range(4):
        it.scheduler.tick()
    second = it.ask("second", b"y" * 40, max_tokens=3)
    before = len(steps)
    it.scheduler.tick()
    assert [type(part).__name__ for part in steps[-1].parts] == ["Decode", "Piece"], "it began at the next step"
    assert len(steps) - before <= 1 + together
    first.cancel()
    it.scheduler.tick()
    assert first.over
    it.run()
    assert len(seen(second)[0].ids) == 3


def test_rows_run_together_as_long_as_all_may():
    """C54: neither with more rows than the backend takes, nor beside one whose sampling looks at what it said, nor for
    the rest of a budget that is too short for a run."""
    it = bench(decode_run=4)
    runs = counted_runs(it)
    few = [it.ask(f"f{i}", max_tokens=60) for i in range(RUN_ROWS)]
    many = it.ask("more", max_tokens=12)
    other = it.ask("other", max_tokens=16, repetition_penalty=1.2)
    while not many.over:
        it.scheduler.tick()
    assert runs == []
    while not other.over:
        it.scheduler.tick()
    assert len(runs) <= 1  # ahead of its last token
    it.run()
    assert runs == [RUN_ROWS] * len(runs)
    assert len(runs) >= 8
    stats = it.scheduler.stats()
    assert stats.steps_ahead_total >= 4 * len(runs)
    assert all(len(seen(reply)[0].ids) == 60 for reply in few)


def test_a_cancelled_row_has_the_rest_of_its_run_dropped():
    """C30, E14: its client hears of the end before the second run in flight is read; nothing behind it is kept."""
    it = bench(decode_run=4, store="paged", cache=cached)
    a, b = it.ask("a", max_tokens=60), it.ask("b", max_tokens=40)
    for _ in range(6):
        it.scheduler.tick()
    row = it.it.engine.view(1)
    assert row.in_flight >= 4
    a.cancel()
    it.scheduler.tick()
    assert a.over
    it.run()
    one, other = seen(a)[0], seen(b)[0]
    assert len(one.ids) == len(one.result.token_ids) <= len(row.output) + 4
    assert one.result.cause == "cancelled"
    assert len(other.ids) == 40
    assert it.all_free()


def test_kv_lost_in_a_run_makes_every_row_start_over():
    """C18, E18: rows outside the failed run say what they would have said; its own end, and the scheduler goes on."""
    faults = FaultPlan([Fault("read", 9, "lose_kv")])
    it = bench(decode_run=4, faults=faults)
    first, second = it.ask("a", max_tokens=40), it.ask("b", max_tokens=40)
    it.run()
    ended = [seen(reply)[0] for reply in (first, second)]
    assert all(one.result.cause == "error" for one in ended)
    assert it.scheduler.stats().step_faults_total == 1
    assert it.all_free()
    after = it.ask("a", max_tokens=9)
    it.run()
    assert seen(after)[0].ids == alone("a", max_tokens=9)[1]
