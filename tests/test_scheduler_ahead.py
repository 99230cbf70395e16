"""One step ahead, or read before the next: nobody can tell but by the clock (spec C51 to C53, E14)."""

import pytest
from scheduler_rows import bench, seen

from mlxcel.core.params import LoopDetection
from mlxcel.testing.byte_tokenizer import EOS

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


def watched():
    steps = []

    class Watch:
        def step_finished(self, report):
            steps.append(report)

        def request_finished(self, result):
            pass

    return Watch(), steps


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("store", ["dense", "paged"])
def test_ahead_or_not_every_ending_is_the_same(ending, store):
    """C52, E14: ids, text, log-probabilities, cause and what is left of the KV."""
    script, params, cause = ENDINGS[ending]
    found = []
    for force_sync in (False, True):
        it = bench(
            {"a": script, "b": [*b"neighbour " * 9]}, store=store, context=64, delay=0.1,
            options={"force_sync": force_sync},
        )  # fmt: skip
        a, b = it.ask("a", logprobs=1, **params), it.ask("b", max_tokens=20)
        it.run()
        one = seen(a)[0]
        assert one.result.cause == cause
        assert (it.scheduler.stats().steps_ahead_total == 0) is force_sync
        found.append((one.text, one.ids, one.result.detail, one.result.logprobs, seen(b)[0].text))
        assert it.all_free()
    assert found[0] == found[1]


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


def test_never_more_than_one_step_ahead():
    """C52, by what the backend is asked: submits and reads alternate once two steps are on their way."""
    it = bench()
    calls = []
    backend = it.it.backend
    submit, read = backend.submit, backend.read
    backend.submit = lambda plan: (calls.append("submit"), submit(plan))[1]
    backend.read = lambda handle: (calls.append("read"), read(handle))[1]
    it.ask("a", max_tokens=20)
    it.run()
    ahead, most = 0, 0
    for call in calls:
        ahead += 1 if call == "submit" else -1
        most = max(most, ahead)
    assert (ahead, most) == (0, 2)


def test_work_that_is_due_is_not_run_ahead_of():
    """C51: an admission, a piece, a cancellation: the step in flight is read first."""
    observer, steps = watched()
    it = bench(observers=(observer,), chunk=16, busy=16)
    first = it.ask("first", max_tokens=40)
    for _ in range(4):
        it.scheduler.tick()
    second = it.ask("second", b"y" * 40, max_tokens=3)
    before = len(steps)
    it.scheduler.tick()
    assert [type(part).__name__ for part in steps[-1].parts] == ["Decode", "Piece"], "it began at the next step"
    assert len(steps) - before <= 2
    first.cancel()
    it.scheduler.tick()
    assert first.over
    it.run()
    assert len(seen(second)[0].ids) == 3
