"""A row that decodes by itself, a step ahead: what it says is what it says without."""

import pytest
from engine_rows import CAPS, scripted, spec

from mlxcel.core.engine import Engine
from mlxcel.core.lone_row import LoneRow
from mlxcel.direct import generate
from mlxcel.errors import CapacityError
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan

LONG = [*b"hello, world, and hello again", EOS, *b"never"]
PLANNER = ChunkedPlanner(chunk=2048, level="R2", caps=CAPS)


def run(it, request, **options):
    return generate(it.engine, request, planner=PLANNER, clock=it.clock, **options)


def told(result):
    error = result.error
    return result.token_ids, result.text, result.cause, result.detail, None if error is None else str(error)


ENDS = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 7},
    {"stop": ("wor",)},
    {"stop_token_ids": (ord("w"),)},
    {"dry_multiplier": 0.8, "max_tokens": 9},
    {"repetition_penalty": 1.2, "temperature": 0.7, "max_tokens": 9},
]


RUNS = (1, 4)
"""Steps that a backend takes together."""


@pytest.mark.parametrize("together", RUNS)
@pytest.mark.parametrize("params", ENDS, ids=str)
def test_run_ahead_changes_no_reply(params, together):
    """Spec C52, C54 for the direct client: ids, text and cause; and the engine is as idle behind it."""
    results, steps = [], []
    for run_ahead in (True, False):
        it = scripted({"a": LONG}, decode_run=together)
        results.append(told(run(it, spec("a", **params), run_ahead=run_ahead)))
        steps.append(it.backend.steps)
        assert it.engine.open_sequences == ()
        assert it.kv.stats().owned == 0
        assert told(run(it, spec("a", max_tokens=3)))[0] == tuple(LONG[:3])  # no step is left in flight
    assert results[0] == results[1]
    # More where what ended the row was not known ahead: the rest of what was read, and what was submitted behind it.
    assert steps[0] - steps[1] in range(2 * together)
    if "max_tokens" in params:
        assert steps[0] == steps[1]


def test_a_step_is_started_before_the_one_before_it_is_read():
    it = scripted({"a": LONG})
    started, seen = it.backend.steps, []
    run(it, spec("a", max_tokens=5), on_text=lambda text: seen.append(it.backend.steps - started))
    assert seen == [1, 3, 4, 5, 5]  # the prompt's; then two in flight, until the budget is spent


def test_runs_are_started_before_the_ones_before_them_are_read():
    """Spec C54: one step, then two runs in flight as long as the budget pays for all of one, then single steps."""
    it = scripted({"a": LONG}, decode_run=4)
    started, seen = it.backend.steps, []
    result = run(it, spec("a", max_tokens=16), on_text=lambda text: seen.append(it.backend.steps - started))
    assert result.text == bytes(LONG[:16]).decode()
    #       prompt, 1 step and 4, then 4 and 4 …          the 12th is read with 1 behind it
    assert seen == [1, 6, 10, 10, 10, 10, 14, 14, 14, 14, 15, 15, 15, 15, 16, 16]


@pytest.mark.parametrize("together", RUNS)
@pytest.mark.parametrize("call", range(1, 9))
def test_a_failing_step_loses_nothing_before_it(call, together):
    """Spec E8, C54: with steps in flight behind the one that fails, of the same run or of another."""
    results = []
    for run_ahead in (True, False):
        it = scripted({"a": LONG}, faults=FaultPlan([Fault("read", call)]), decode_run=together)
        results.append(told(run(it, spec("a", max_tokens=8), run_ahead=run_ahead)))
        assert it.engine.open_sequences == ()
        assert it.kv.stats().owned == 0
    assert results[0] == results[1]


@pytest.mark.parametrize("together", RUNS)
@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_listener_that_stops_leaves_no_step_in_flight(stop, together):
    it = scripted({"a": LONG}, decode_run=together)

    def listen(text):
        if text == "l":
            raise stop

    if stop is ValueError:
        with pytest.raises(ValueError):
            run(it, spec("a"), on_text=listen)
    else:
        assert told(run(it, spec("a"), on_text=listen))[1:3] == ("hel", "cancelled")
    assert it.engine.open_sequences == ()
    assert it.kv.stats().owned == 0
    assert told(run(it, spec("a", max_tokens=3)))[0] == tuple(LONG[:3])


@pytest.mark.parametrize("nth", [2, 3, 4])
@pytest.mark.parametrize(
    ("method", "together"),
    [("reserve", 1), ("submit", 1), ("collect", 1), ("reserve", 4), ("submit_run", 4), ("collect", 4)],
)
def test_an_interrupted_call_leaves_no_step_in_flight(monkeypatch, method, nth, together):
    it = scripted({"a": LONG}, decode_run=together)
    real, calls = getattr(Engine, method), iter(range(1, 10**6))

    def call(self, *args, **options):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, method, call)
        result = run(it, spec("a"))
    assert result.cause == "cancelled"
    assert result.text == bytes(LONG[: len(result.text)]).decode()
    assert told(run(it, spec("a", max_tokens=3)))[0] == tuple(LONG[:3])


def test_a_run_that_does_not_fit_is_a_step():
    """C54: the row's last page has room for three positions more, and no other page is free."""
    it = scripted({"a": LONG}, decode_run=4, kv_store=PagedKV, page_size=8, pages=2, slots=2, context=16)
    asked = spec("a", b"abcde")
    row, other = it.engine.open(asked), it.engine.open(asked)
    for each in (row, other):
        it.engine.prefill(each, PLANNER.build(asked.prompt_ids))
    lone, sizes, run_of = LoneRow(it.engine, row), [], it.backend.submit_run
    it.backend.submit_run = lambda plans: (sizes.append(int(plans[0].positions[0])), run_of(plans))[1]
    assert [lone.step().token for _ in range(3)] == LONG[1:4]
    assert sizes == []
    it.engine.close(other)
    assert [lone.step().token for _ in range(5)] == LONG[4:9]
    assert sizes == [9]  # behind one step, where each run begins
    it.engine.close(row)
    lone.drop()
    assert it.kv.stats().owned == 0


@pytest.mark.parametrize("together", RUNS)
def test_a_step_that_does_not_fit_ahead_waits_for_the_one_in_flight(monkeypatch, together):
    it = scripted({"a": LONG}, decode_run=together)
    row = it.engine.open(spec("a"))
    it.engine.prefill(row, PLANNER.build(spec("a").prompt_ids))
    lone, real, refused = LoneRow(it.engine, row), it.kv.reserve, []

    def reserve(parts):
        if it.engine.view(row).in_flight and not refused:
            refused.append(parts)
            raise CapacityError("no page is free")
        return real(parts)

    monkeypatch.setattr(it.kv, "reserve", reserve)
    assert [lone.step().token for _ in range(4)] == LONG[1:5]
    assert refused
    it.engine.close(row)
    lone.drop()
    assert it.engine.open_sequences == ()
