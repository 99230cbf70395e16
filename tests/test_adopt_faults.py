"""Faults and interrupts around rows that are handed over (spec 1.5, 2.5)."""

import attrs
import pytest
from cache_rows import IDS, STEPS, caching, detached, go_on, refusal
from engine_rows import TOKENIZER, opened, scripted
from real_engine import assert_same_bits
from tested_backends import KeepingNumpy

from mlxcel.core.prefix import FORMAT, KVKey, ModelIdentity, Reject
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import (
    BatchShapeError,
    NumericFault,
)
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import scripted_engine


def test_rows_that_lost_their_kv_hand_nothing_over():
    """Spec E18, X10: after a loss neither what was detached before nor a row that had ended by then may be used."""
    faults = FaultPlan([Fault("read", 4, "lose_kv")])
    made = scripted_engine(
        {"a": [65] * 3, "b": [66] * 9, "c": [67] * 9}, tokenizer=TOKENIZER, kv_store=PagedKV, faults=faults
    )
    engine = made.engine
    ended, plan = opened(engine, "a", max_tokens=1)
    engine.prefill(ended, plan)
    later, plan = opened(engine, "a", max_tokens=1)
    engine.prefill(later, plan)
    prefix = engine.detach(ended)
    adopted = engine.adopt(engine.view(ended).spec, prefix, 2)
    row, plan = opened(engine, "b", max_tokens=9)
    engine.prefill(row, plan)
    assert engine.step([row])[0].error.code == "backend_fault"
    assert refusal(lambda: engine.detach(later)) is Reject.FAULT
    assert refusal(lambda: engine.adopt(engine.view(later).spec, prefix, 2)) is Reject.FAULT
    assert engine.view(adopted).state is SequenceState.PREEMPTED, "what it began with is gone"
    assert engine.view(adopted).stored == 0


def test_an_interrupt_before_a_page_was_copied_takes_the_row_back():
    """Nobody knows whether the copy was made: the row computes its positions anew, with the same bits."""

    class Interrupted(KeepingNumpy):
        armed = False

        def submit(self, plan):
            if self.armed and len(plan.page_copies):
                self.armed = False
                raise KeyboardInterrupt
            return super().submit(plan)

    backend = Interrupted()
    made = caching(backend=backend)
    prefix = detached(made)
    row = made.engine.adopt(made.spec(IDS, max_tokens=STEPS), prefix, 140)
    backend.armed = True
    with pytest.raises(KeyboardInterrupt):
        made.engine.prefill(row, made.plan(IDS, adopted=140))
    assert made.engine.view(row).state is SequenceState.PREEMPTED
    made.kv.check()
    logits, output = go_on(made, row, made.plan(IDS))
    cold = caching().run(IDS, STEPS)
    assert_same_bits(cold.logits, logits)
    assert output == cold.ids


def test_a_row_that_failed_is_never_handed_over():
    """Spec X10."""
    made = scripted(
        {"a": [65] * 5},
        kv_store=PagedKV,
        faults=FaultPlan([Fault("status", 1)]),
    )
    row, plan = opened(made.engine, "a", max_tokens=5)
    assert isinstance(made.engine.prefill(row, plan).error, NumericFault)
    with pytest.raises(BatchShapeError, match="is failed"):
        made.engine.detach(row)


def test_no_field_of_a_key_can_pass_for_another():
    """Spec X2, hand case J15: each field is tagged, with its length."""
    model = ModelIdentity("f", "q", "r")
    base = KVKey(model, "float32", "R2", "float32", "paged", 16)
    others = [
        attrs.evolve(base, salt="x"),
        attrs.evolve(base, isolation=b"x"),
        attrs.evolve(base, model=attrs.evolve(model, adapter="x")),
        attrs.evolve(base, model=attrs.evolve(model, fingerprint="fx")),
        attrs.evolve(base, model=attrs.evolve(model, quantisation="qx")),
        attrs.evolve(base, model=attrs.evolve(model, rope="x")),
        attrs.evolve(base, model=attrs.evolve(model, adapter_scale=2.0)),
        attrs.evolve(base, dtype="x"),
        attrs.evolve(base, kv_mode="x"),
        attrs.evolve(base, level="R1"),
        attrs.evolve(base, store="x"),
        attrs.evolve(base, page_size=32),
        attrs.evolve(base, version=FORMAT + 1),
        attrs.evolve(base, rings=(1, 28)),
        attrs.evolve(base, rings=(12, 8)),
        attrs.evolve(base, model=attrs.evolve(model, backend="x")),
        attrs.evolve(base, salt=""),
    ]
    roots = [each.root() for each in (base, *others)]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == 32 for root in roots)
    assert all(base.difference(other) is not None for other in others)
    assert base.difference(attrs.evolve(base)) is None
