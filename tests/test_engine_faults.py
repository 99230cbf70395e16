"""Spec 1.5: every injected fault, what must follow, and that the others do not notice."""

import attrs
import numpy as np
import pytest
from engine_rows import decode, opened, plan_for, run_to_end, scripted, spec

from mlxcel.core.sequence import SequenceState
from mlxcel.errors import BackendFault, CapacityError, EngineUnhealthy, NumericFault, RowFault, TrimError
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan, InjectedFault

SCRIPTS = {"a": [*b"hello", EOS], "b": [*b"world", EOS]}


def two_rows(*faults, **options):
    """Rows a and b, prefilled: calls 1 and 2 of every per-step point are behind."""
    it = scripted(SCRIPTS, faults=FaultPlan(faults), **options)
    rows = []
    for name in "ab":
        row, plan = opened(it.engine, name)
        assert it.engine.prefill(row, plan).error is None
        rows.append(row)
    return it, rows


def finish(engine, row):
    """Decode one row to its end; its whole output."""
    outcome = None
    while outcome is None or (outcome.cause is None and outcome.error is None):
        outcome = engine.step([row])[0]
    assert outcome.error is None
    return bytes(engine.view(row).output)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("submit", 3), "injected at submit"),
        (Fault("read", 3), "injected at read"),
        (Fault("read", 3, "short"), "shape"),
        (Fault("read", 3, "out_of_range"), "outside the vocabulary"),
    ],
)
def test_a_failed_step_fails_its_rows_and_commits_nothing(fault, words):
    """Spec E17, 1.3 step 2: `backend_fault` for its rows; the row outside the step goes on."""
    it, (a, b) = two_rows(fault)
    before = it.engine.view(a)
    outcome = it.engine.step([a])[0]
    assert isinstance(outcome.error, BackendFault)
    assert str(outcome.error).startswith("inference backend error:")
    assert words in str(outcome.error)
    assert (outcome.token, outcome.cause, outcome.text) == (None, None, "")
    view = it.engine.view(a)
    assert (view.state, view.output, view.stored) == (SequenceState.FAILED, before.output, before.stored)
    assert finish(it.engine, b) == b"world"
    it.engine.close(a)
    it.engine.close(b)
    assert it.kv.stats().owned == 0


def test_lost_kv_makes_the_others_start_over_and_say_the_same():
    """Spec E18: rows outside the step lose their KV and nothing else; resumed, they give the undisturbed ids."""
    it, (a, b) = two_rows(Fault("read", 3, "lose_kv"))
    assert isinstance(it.engine.step([a])[0].error, BackendFault)
    view = it.engine.view(b)
    assert (view.state, view.stored, bytes(view.output)) == (SequenceState.PREEMPTED, 0, b"w")
    known = np.concatenate([spec("b").prompt_ids, np.array(view.output[:-1], np.int32)])
    outcome = it.engine.prefill(b, plan_for(known, 2, draw=False))
    assert (outcome.token, outcome.error) == (None, None)
    assert it.engine.view(b).state is SequenceState.DECODING
    assert finish(it.engine, b) == b"world"


def test_lost_kv_may_be_resumed_by_replaying_tokens():
    """Spec E22, C19: older tokens are fed again and draw nothing."""
    it, (a, b) = two_rows(Fault("read", 5, "lose_kv"))
    for _ in range(2):
        it.engine.step([b])
    assert isinstance(it.engine.step([a])[0].error, BackendFault)
    assert bytes(it.engine.view(b).output) == b"wor"
    it.engine.prefill(b, plan_for(spec("b").prompt_ids, draw=False))
    assert it.engine.view(b).state is SequenceState.PREFILLING
    replayed = [it.engine.step([b])[0] for _ in range(2)]
    assert [(o.token, o.text) for o in replayed] == [(None, ""), (None, "")]
    assert it.engine.view(b).state is SequenceState.DECODING
    assert finish(it.engine, b) == b"world"


def test_lost_kv_with_a_step_ahead_believes_nothing_of_it():
    it, (a, b) = two_rows(Fault("read", 3, "lose_kv"))
    tickets = []
    for row in (a, b):
        it.engine.reserve(decode(row))
        tickets.append(it.engine.submit(decode(row)))
    assert isinstance(it.engine.collect(tickets[0])[0].error, BackendFault)
    lost = it.engine.collect(tickets[1])[0]
    assert (lost.token, lost.error) == (None, None)
    view = it.engine.view(b)
    assert (view.state, view.stored, view.in_flight, bytes(view.output)) == (SequenceState.PREEMPTED, 0, 0, b"w")
    it.engine.prefill(b, plan_for(spec("b").prompt_ids, draw=False))
    assert finish(it.engine, b) == b"world"


def test_nan_fails_its_row_alone():
    it, (a, b) = two_rows(Fault("status", 3, "nan", rows=(0,)))
    bad, good = it.engine.step([a, b])
    assert isinstance(bad.error, NumericFault)
    assert (bad.token, good.error, good.token) == (None, None, ord("o"))
    assert finish(it.engine, b) == b"world"


def test_a_shortage_refuses_the_step_and_nothing_is_lost():
    it, (a, b) = two_rows(Fault("reserve", 3))
    before = it.backend.steps
    with pytest.raises(CapacityError):
        it.engine.step([a, b])
    assert it.backend.steps == before
    assert (finish(it.engine, a), finish(it.engine, b)) == (b"hello", b"world")


def test_a_short_trim_fails_the_row():
    it, (a, b) = two_rows(Fault("trim", 1))
    outcome = None
    while outcome is None or (outcome.cause is None and outcome.error is None):
        outcome = it.engine.step([a])[0]
    assert isinstance(outcome.error, TrimError)
    assert finish(it.engine, b) == b"world"


@pytest.mark.parametrize("stage", ["open.kv", "open.backend", "open.sampler", "open.finish"])
def test_a_failed_open_undoes_its_earlier_stages(stage):
    it = scripted(SCRIPTS, faults=FaultPlan([Fault(stage, 2)]), slots=2)
    first, plan = opened(it.engine, "a")
    with pytest.raises(InjectedFault):
        it.engine.open(spec("b"))
    assert it.kv.stats().owned == 1
    second, plan_b = opened(it.engine, "b")
    assert bytes(run_to_end(it.engine, second, plan_b)[0]) == b"world"
    assert bytes(run_to_end(it.engine, first, plan)[0]) == b"hello"


def test_a_detokeniser_that_raises_fails_its_row():
    it, (a, b) = two_rows(Fault("detokenise", 3))
    bad, good = it.engine.step([a, b])
    assert isinstance(bad.error, RowFault)
    assert good.token == ord("o")
    assert bytes(it.engine.view(a).output) == b"h"
    assert finish(it.engine, b) == b"world"


@attrs.define
class Watcher:
    steps: int = 0

    def step_finished(self, report):
        self.steps += 1

    def request_finished(self, result):
        raise AssertionError("no request ends in the engine itself")


def test_an_observer_that_raises_is_counted_and_logged_once(caplog):
    """Spec E16."""
    it, (a, b) = two_rows(Fault("observer", 3), Fault("observer", 4), observers=[Watcher()])
    assert (finish(it.engine, a), finish(it.engine, b)) == (b"hello", b"world")
    assert sum(it.observers.failures.values()) == 2
    assert len([record for record in caplog.records if record.name == "mlxcel.observers"]) == 1


def test_a_slow_step_moves_the_clock_and_nothing_else():
    it, (a, b) = two_rows(Fault("slow", 3, seconds=100), Fault("clock", 4, seconds=1e6))
    assert (finish(it.engine, a), finish(it.engine, b)) == (b"hello", b"world")
    assert it.clock() == 100 + 1e6


def failing_steps(count, first=1):
    return [Fault("read", call) for call in range(first, first + count)]


def test_the_guard_counts_failed_steps_in_a_row():
    """Spec E19: 7 faults, success, 7 faults stays healthy; 8 in a row ends."""
    many = {f"r{i}": [*b"xy", EOS] for i in range(30)}
    plan = FaultPlan([*failing_steps(7, 1), *failing_steps(7, 9), *failing_steps(8, 17)])
    it = scripted(many, faults=plan, slots=30)
    rows = [opened(it.engine, name) for name in many]
    survivor = rows[-1][0]
    healthy = []
    for row, row_plan in rows[:24]:
        it.engine.prefill(row, row_plan)
        healthy.append(it.engine.healthy)
    assert healthy == [True] * 23 + [False]
    with pytest.raises(EngineUnhealthy, match="8 steps failed in a row"):
        it.engine.open(spec("r0"))
    assert it.engine.view(survivor).state is SequenceState.FAILED
    assert isinstance(it.engine.view(survivor).error, EngineUnhealthy)


def test_row_errors_never_count():
    many = {f"r{i}": [*b"xy", EOS] for i in range(12)}
    it = scripted(many, faults=FaultPlan([Fault("status", call) for call in range(1, 12)]), slots=12)
    for name in many:
        row, plan = opened(it.engine, name)
        it.engine.prefill(row, plan)
    assert it.engine.healthy


def test_one_failed_step_counts_once_whatever_its_rows():
    it, rows = two_rows(Fault("read", 3), max_consecutive_faults=2)
    assert all(isinstance(o.error, BackendFault) for o in it.engine.step(rows))
    assert it.engine.healthy


LONG = {"a": [*b"hello, hello", EOS, *b"never said"], "b": [*b"world and", EOS, *b"never said"]}


def running(*faults, names="ab", behind=0, **options):
    """Rows whose prompts ran, one run of four steps in flight, and `behind` it others."""
    it = scripted(LONG, faults=FaultPlan(faults), decode_run=4, **options)
    rows = []
    for name in names:
        row, plan = opened(it.engine, name)
        it.engine.prefill(row, plan)
        rows.append(row)
    tickets = []
    for _ in range(1 + behind):
        it.engine.reserve(decode(*rows), 4)
        tickets += it.engine.submit_run(decode(*rows), 4)
    return it, rows, tickets


@pytest.mark.parametrize("nth", [3, 4, 6])
@pytest.mark.parametrize("effect", ["raise", "short", "lose_kv"])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_run_fails_once_and_keeps_what_was_read_before(nth, effect, behind):
    """Spec C54, E18, E19: what stands behind the step that failed, in its run, is not read; a row outside starts over
    where the KV is lost."""
    it, rows, tickets = running(Fault("read", nth, effect), behind=behind, max_consecutive_faults=2)
    read = [it.engine.collect(ticket) for ticket in tickets]
    good = nth - 3
    said = [[outcome.token for outcome in step] for step in read[:good]]
    assert said == [[LONG["a"][step], LONG["b"][step]] for step in range(1, 1 + good)]
    assert all(isinstance(outcome.error, BackendFault) for outcome in read[good])
    assert all((outcome.token, outcome.error) == (None, None) for step in read[good + 1 :] for outcome in step)
    assert it.engine.healthy
    for row, name in zip(rows, "ab", strict=True):
        view = it.engine.view(row)
        assert (view.state, view.output, view.in_flight) == (SequenceState.FAILED, tuple(LONG[name][: 1 + good]), 0)
        it.engine.close(row)
    assert it.kv.stats().owned == 0


def test_a_run_that_does_not_start_fails_once():
    """Spec C54, E19: with a run before it that goes well."""
    it, (a,), tickets = running(Fault("submit", 3), names="a", max_consecutive_faults=2)
    it.engine.reserve(decode(a), 4)
    tickets += it.engine.submit_run(decode(a), 4)
    outcomes = [it.engine.collect(ticket)[0] for ticket in tickets]
    assert bytes(outcome.token for outcome in outcomes[:4]) == b"ello"
    assert "injected at submit" in str(outcomes[4].error)
    assert [(outcome.token, outcome.error) for outcome in outcomes[5:]] == [(None, None)] * 3
    assert it.engine.healthy


@pytest.mark.parametrize("behind", [0, 1])
def test_nan_in_a_run_fails_its_row_alone(behind):
    """The rest of it is dropped of that row, and the other says on."""
    it, (_, b), tickets = running(Fault("status", 4, "nan", rows=(0,)), behind=behind)
    read = [it.engine.collect(ticket) for ticket in tickets]
    assert isinstance(read[1][0].error, NumericFault)
    assert [step[0].token for step in read] == [ord("e"), *[None] * (len(read) - 1)]
    assert bytes(step[1].token for step in read) == b"orld and"[: len(read)]
    assert finish(it.engine, b) == b"world and"


@pytest.mark.parametrize("behind", [0, 1])
def test_rows_that_end_in_a_run_keep_nothing_of_its_rest(behind):
    """Spec E14: cancelled, closed, or at their end."""
    it, (a, b), tickets = running(behind=behind)
    it.engine.collect(tickets[0])
    assert it.engine.cancel(a).cause == "cancelled"
    assert it.engine.close(b)
    for ticket in tickets[1:]:
        assert it.engine.collect(ticket)[0].token is None
    view = it.engine.view(a)
    assert (bytes(view.output), view.stored, view.in_flight) == (b"he", view.prompt_tokens + 1, 0)
    assert it.kv.trim(a, 100) == view.stored
    it.engine.close(a)
    assert it.kv.stats().owned == 0
