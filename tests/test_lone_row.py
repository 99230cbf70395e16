"""A row that decodes by itself, a step ahead: what it says is what it says without."""

import pytest
from engine_rows import CAPS, scripted, spec

from mlxcel.core.engine import Engine
from mlxcel.core.lone_row import LoneRow
from mlxcel.direct import generate
from mlxcel.errors import CapacityError
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


@pytest.mark.parametrize("params", ENDS, ids=str)
def test_run_ahead_changes_no_reply(params):
    """Spec C52 for the direct client: ids, text and cause; and the engine is as idle behind it."""
    results, steps = [], []
    for run_ahead in (True, False):
        it = scripted({"a": LONG})
        results.append(told(run(it, spec("a", **params), run_ahead=run_ahead)))
        steps.append(it.backend.steps)
        assert it.engine.open_sequences == ()
        assert it.kv.stats().owned == 0
        assert told(run(it, spec("a", max_tokens=3)))[0] == tuple(LONG[:3])  # no step is left in flight
    assert results[0] == results[1]
    assert steps[0] - steps[1] in (0, 1)  # one more where what ended the row was not known ahead
    if "max_tokens" in params:
        assert steps[0] == steps[1]


def test_a_step_is_started_before_the_one_before_it_is_read():
    it = scripted({"a": LONG})
    started, seen = it.backend.steps, []
    run(it, spec("a", max_tokens=5), on_text=lambda text: seen.append(it.backend.steps - started))
    assert seen == [1, 3, 4, 5, 5]  # the prompt's; then two in flight, until the budget is spent


@pytest.mark.parametrize("call", range(1, 6))
def test_a_failing_step_loses_nothing_before_it(call):
    """Spec E8: with a step in flight behind the one that fails."""
    results = []
    for run_ahead in (True, False):
        it = scripted({"a": LONG}, faults=FaultPlan([Fault("read", call)]))
        results.append(told(run(it, spec("a", max_tokens=5), run_ahead=run_ahead)))
        assert it.engine.open_sequences == ()
        assert it.kv.stats().owned == 0
    assert results[0] == results[1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_listener_that_stops_leaves_no_step_in_flight(stop):
    it = scripted({"a": LONG})

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
@pytest.mark.parametrize("method", ["reserve", "submit", "collect"])
def test_an_interrupted_call_leaves_no_step_in_flight(monkeypatch, method, nth):
    it = scripted({"a": LONG})
    real, calls = getattr(Engine, method), iter(range(1, 10**6))

    def call(self, *args, **options):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, method, call)
        result = run(it, spec("a"))
    assert result.cause == "cancelled"
    assert result.text == "hello"[: len(result.text)]
    assert told(run(it, spec("a", max_tokens=3)))[0] == tuple(LONG[:3])


def test_a_step_that_does_not_fit_ahead_waits_for_the_one_in_flight(monkeypatch):
    it = scripted({"a": LONG})
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
