"""Faults at every kind of step: the row fails with a message, others go on (spec 1.5, E17 to E20)."""

import attrs
import pytest
from scheduler_rows import STORES, alone, bench, seen

from mlxcel.errors import BackendFault, EngineUnhealthy, NumericFault
from mlxcel.testing.faults import Fault, FaultPlan

NAMES = ("a", "b", "c")


def crowd(faults, *, store="dense", **options):
    """Three rows, the third coming when the others decode, so that prefill, decode and mixed steps all occur."""
    it = bench(faults=FaultPlan(faults), store=store, chunk=16, **options)
    replies = [it.ask("a", b"a" * 40, max_tokens=12), it.ask("b", b"b" * 20, max_tokens=12)]
    for _ in range(5):
        it.scheduler.tick()
    replies.append(it.ask("c", b"c" * 40, max_tokens=12))
    it.run()
    return it, [seen(reply)[0] for reply in replies]


def undisturbed(name):
    return alone(name, name.encode() * (20 if name == "b" else 40), max_tokens=12)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize("effect", ["submit", "raise", "short", "out_of_range"])
def test_a_failed_step_fails_its_rows_and_no_others(store, nth, effect):
    """E18, row by row of 1.5: prefill, mixed and decode steps, ahead or not."""
    point = "submit" if effect == "submit" else "read"
    fault = Fault(point, nth) if effect in ("submit", "raise") else Fault(point, nth, effect)
    it, heard = crowd([fault], store=store)
    failed = [one for one in heard if one.result.cause == "error"]
    if nth == 1 and effect in ("short", "out_of_range"):
        assert not failed, "the first step draws nothing, so that there is no id to be wrong"
        return
    assert failed
    for name, one in zip(NAMES, heard, strict=True):
        text, ids, cause = undisturbed(name)
        if one in failed:
            assert isinstance(one.result.error, BackendFault)
            assert one.result.detail == "backend_fault"
            assert str(one.result.error).startswith("inference backend error:")
            assert text.startswith(one.text), "what was streamed before stays true"
            assert ids[: len(one.ids)] == one.ids
        else:
            assert (one.text, one.ids, one.result.cause) == (text, ids, cause)
    assert it.scheduler.stats().step_faults_total == 1
    assert it.all_free()
    again = it.ask("again", max_tokens=3)
    it.run()
    assert seen(again)[0].result.cause == "max_tokens"


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("nth", range(1, 12))
def test_rows_outside_a_step_that_lost_the_kv_start_over(store, nth):
    """E18 with kv_intact False: they resume with the ids of an undisturbed run, and nothing is streamed twice."""
    it, heard = crowd([Fault("read", nth, "lose_kv")], store=store, mixed_steps=False, level="R0")
    for name, one in zip(NAMES, heard, strict=True):
        text, ids, cause = undisturbed(name)
        if one.result.cause == "error":
            assert ids[: len(one.ids)] == one.ids
        else:
            assert (one.text, one.ids, one.result.cause) == (text, ids, cause)
    assert any(one.result.cause == "error" for one in heard)
    if nth in (1, 2):  # the piece of one row, while the other waits its turn
        assert any(one.result.cause != "error" for one in heard)
    assert it.all_free()


@pytest.mark.parametrize("nth", range(2, 10))
def test_a_numeric_fault_is_its_rows_alone(nth):
    it, heard = crowd([Fault("status", nth, "nan", rows=(0,))])
    failed = [one for one in heard if one.result.cause == "error"]
    assert len(failed) == 1
    assert isinstance(failed[0].result.error, NumericFault)
    for name, one in zip(NAMES, heard, strict=True):
        if one not in failed:
            assert (one.text, one.ids, one.result.cause) == undisturbed(name)
    assert it.all_free()


@pytest.mark.parametrize("nth", range(1, 14))
@pytest.mark.parametrize("store", STORES)
def test_a_shortage_is_no_ending(store, nth):
    """C24, V17: a row without a page waits or starts over; it is not failed, and no forward runs unreserved."""
    it, heard = crowd([Fault("reserve", nth), Fault("reserve", nth + 1), Fault("reserve", nth + 3)], store=store)
    for name, one in zip(NAMES, heard, strict=True):
        assert (one.text, one.ids, one.result.cause) == undisturbed(name)
    assert it.all_free()


@pytest.mark.parametrize("stage", ["open.kv", "open.backend", "open.sampler", "open.finish"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_row_that_cannot_be_opened_is_rejected(stage, nth):
    it, heard = crowd([Fault(stage, nth)])
    causes = [one.result.cause for one in heard]
    assert causes[nth - 1] == "rejected"
    assert causes.count("max_tokens") == 2
    assert it.all_free()


@pytest.mark.parametrize("point", ["detokenise", "trim"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_fault_behind_the_forward_is_its_rows_alone(point, nth):
    it, heard = crowd([Fault(point, nth)])
    failed = [one for one in heard if one.result.cause == "error"]
    assert len(failed) <= 1
    for name, one in zip(NAMES, heard, strict=True):
        if one not in failed:
            assert (one.text, one.ids, one.result.cause) == undisturbed(name)
    assert it.all_free()


def test_an_observer_that_raises_is_only_counted():
    """E16."""
    it, heard = crowd([Fault("observer", 3)])
    assert [one.result.cause for one in heard] == ["max_tokens"] * 3
    assert it.all_free()


@pytest.mark.parametrize("point", ["clock", "slow"])
def test_a_jump_of_the_clock_moves_nothing_but_times(point):
    it, heard = crowd([Fault(point, 4, seconds=500.0)])
    for name, one in zip(NAMES, heard, strict=True):
        assert (one.text, one.ids, one.result.cause) == undisturbed(name)
    assert heard[0].result.timings.ended >= 500
    assert it.all_free()


def test_seven_faults_a_success_and_seven_more_stay_healthy():
    """E19."""
    faults = [Fault("submit", n) for n in (*range(1, 8), *range(9, 16))]
    it = bench(faults=FaultPlan(faults))
    for i in range(15):
        reply = it.ask(f"r{i}", max_tokens=1)
        it.run()
        assert seen(reply)[0].result.cause == ("max_tokens" if i in (7, 14) else "error") or i == 14
    assert it.scheduler.healthy


def test_eight_failed_steps_in_a_row_end_everything_and_say_so(caplog):
    """E19: open and waiting rows end with `engine_unhealthy`, nothing new is taken, nothing leaks."""
    it = bench(faults=FaultPlan([Fault("submit", n) for n in range(1, 100)]), slots=1, options={"force_sync": True})
    replies = [it.ask(f"r{i}", max_tokens=5) for i in range(12)]
    it.run()
    details = [seen(reply)[0].result.detail for reply in replies]
    assert details == ["backend_fault"] * 8 + ["engine_unhealthy"] * 4
    assert not it.scheduler.healthy
    with pytest.raises(EngineUnhealthy, match="8 steps failed in a row"):
        it.ask("late")
    assert "8 steps failed in a row" in caplog.text
    assert len(it.ended) == 13
    assert it.all_free()
    it.scheduler.close()


def test_rows_that_waited_for_their_turn_end_too_when_the_engine_falls_sick():
    """E19: those that are parked as well."""
    it = bench(faults=FaultPlan([Fault("submit", n) for n in range(2, 100)]), level="R0", mixed_steps=False, slots=8)
    replies = [it.ask(f"r{i}", b"x" * 100, max_tokens=5) for i in range(10)]
    it.run()
    assert {seen(reply)[0].result.detail for reply in replies} == {"backend_fault", "engine_unhealthy"}
    assert it.all_free()


class _WrongPlanner:
    """Cuts a prompt of b's as no step can take it: its last piece ends behind the prompt."""

    def __init__(self, inner):
        self._inner = inner

    def build(self, ids, adopted=0, **options):
        plan = self._inner.build(ids, adopted, **options)
        if ids[0] == ord("b"):
            *pieces, last = plan.pieces
            return attrs.evolve(plan, pieces=(*pieces, attrs.evolve(last, end=len(ids) + 5)))
        return plan


@pytest.mark.parametrize("chunk", [8, 64])
def test_a_planners_mistake_is_its_rows_alone(chunk):
    """Found out ahead of a piece in flight too."""
    it = bench(planned=_WrongPlanner, chunk=chunk, busy=chunk)
    good, bad = it.ask("a", b"a" * 20, max_tokens=3), it.ask("b", b"b" * 20, max_tokens=3)
    it.run()
    assert seen(good)[0].result.cause == "max_tokens"
    result = seen(bad)[0].result
    assert (result.cause, result.detail) == ("error", "batch_shape")
    assert it.all_free()
