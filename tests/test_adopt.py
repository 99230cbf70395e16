"""KV that leaves a row and comes into another (docs/spec/engine.md 1.2, 2.5): adopt, detach, share, unwind, preempt."""

import attrs
import numpy as np
import pytest
from cache_rows import IDS, STEPS, STORES, caching, detached, finished, go_on, ids_of, refusal
from engine_rows import TOKENIZER, opened
from layered_family import layered_checkpoint
from real_engine import assert_same_bits
from tested_backends import KeepingNumpy

from mlxcel.core.handover import reach
from mlxcel.core.kv import FullKV, KVSpec, SlidingKV
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.prefix import Reject
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import (
    AdoptError,
    BatchShapeError,
    CapacityError,
    EmptyPrompt,
    RewindError,
    TrimError,
    UnknownSequence,
)
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import scripted_engine

pytestmark = pytest.mark.on_jax(most=1)

LAYERS = {"full": ("full", "full"), "windows": ("window 16", "full", "window 130")}


@pytest.fixture(scope="module", params=[(store, layers) for store in STORES for layers in LAYERS], ids="-".join)
def made(backend, request):
    store, layers = request.param
    return caching(layered_checkpoint(*LAYERS[layers]), store=store)


@pytest.fixture(scope="module")
def alone(backend):
    return {name: caching(layered_checkpoint(*layers)).run(IDS, STEPS) for name, layers in LAYERS.items()}


def lone(made, alone):
    return alone["windows" if made.cache._kv_spec.windowed else "full"]


@pytest.mark.parametrize("length", [129, 1, 15, 16, 17, 127, 128, 149])
def test_an_adopted_row_is_the_bits_of_one_that_computed_all(made, alone, length):
    """Spec V14, X6: adopted positions are neither recomputed nor written, and what follows is the same. The rings of
    LAYERS hold all 154 positions."""
    before = made.engine.kv_stats
    prefix = detached(made)
    assert (prefix.length, prefix.prefilled) == (len(IDS) + STEPS - 1, len(IDS))
    row = made.engine.adopt(made.spec(IDS, max_tokens=STEPS), prefix, length)
    assert made.engine.view(row).stored == made.engine.view(row).adopted == length
    plan = made.plan(IDS, adopted=length)
    assert plan.reproduces(made.plan(IDS))
    logits, output = go_on(made, row, plan)
    assert_same_bits(lone(made, alone).logits, logits)
    assert output == lone(made, alone).ids
    if made.engine.shares:
        assert made.engine.kv_stats.cached == len(prefix.pages)
        made.engine.release(prefix)
    assert made.engine.kv_stats == before


def test_only_the_rest_of_the_prompt_is_fed(made):
    """Spec V14: not recomputed, by the tokens of the forwards."""
    prefix = detached(made)
    row = made.engine.adopt(made.spec(IDS, max_tokens=1), prefix, 140)
    fed = []
    made.engine.prefill(row, made.plan(IDS, adopted=140), on_piece=lambda span: fed.append((span.start, span.end)))
    assert fed == [(140, 150)]
    made.real.close(row)
    if made.engine.shares:
        made.engine.release(prefix)


def test_a_dense_buffer_is_adopted_once_and_a_paged_one_any_number_of_times(made, alone):
    """Spec V13."""
    prefix = detached(made)
    rows = [made.engine.adopt(made.spec(IDS, max_tokens=STEPS), prefix, 100)]
    if not made.engine.shares:
        with pytest.raises(AdoptError, match="can be adopted once"):
            made.engine.adopt(made.spec(IDS), prefix, 100)
    else:
        rows.append(made.engine.adopt(made.spec(IDS, max_tokens=STEPS), prefix, 149))
        made.engine.release(prefix)
    for row, start in zip(rows, (100, 149), strict=False):
        logits, output = go_on(made, row, made.plan(IDS, adopted=start))
        assert_same_bits(lone(made, alone).logits, logits)
        assert output == lone(made, alone).ids


@pytest.mark.parametrize("fault", ["open.backend", "open.sampler", "open.finish"])
@pytest.mark.parametrize("store", STORES)
def test_a_stage_that_fails_leaves_the_record_as_it_was(store, fault):
    """Spec 1.2: stages are undone, and a page that had moved goes back to its holder."""
    faults = FaultPlan([Fault(fault, 2)])
    made = scripted_engine({"a": [65, 66]}, tokenizer=TOKENIZER, kv_store=STORES[store], faults=faults)
    engine = made.engine
    row, plan = opened(engine, "a", max_tokens=2)
    engine.prefill(row, plan)
    engine.step([row])
    prefix = engine.detach(row)
    spec = engine.view(row).spec
    engine.close(row)
    before = engine.kv_stats
    with pytest.raises(Exception, match="injected"):
        engine.adopt(spec, prefix, 2)
    assert engine.kv_stats == before
    again = engine.adopt(spec, prefix, 2)
    assert engine.view(again).stored == 2


@pytest.mark.parametrize("store", STORES)
def test_every_refusal_of_a_prefix(store):
    """Spec 1.2, 8.6: each field of X2, and lengths. Nothing is spent by a refusal."""
    made = caching(store=store)
    engine = made.engine
    prefix = detached(made)
    before = engine.kv_stats

    def adopting(length=100, spec=None, **changes):
        return refusal(lambda: engine.adopt(spec or made.spec(IDS), attrs.evolve(prefix, **changes), length))

    def key(**changes):
        return {"key": attrs.evolve(prefix.key, **changes)}

    def model(**changes):
        return key(model=attrs.evolve(prefix.key.model, **changes))

    assert adopting(prefix.length + 1, made.spec(ids_of(300))) is Reject.NO_MATCH
    assert adopting(150) is Reject.GRANULE_FLOOR
    assert adopting(0) is Reject.PREFIX_TOO_SHORT
    assert adopting(spec=made.spec(ids_of(150, seed=1))) is Reject.NO_MATCH
    assert adopting(spec=made.spec(IDS, salt="a")) is Reject.NO_MATCH
    assert adopting(spec=made.spec(IDS, isolation=b"a")) is Reject.NO_MATCH
    assert adopting(**key(version=0)) is Reject.NO_MATCH
    assert adopting(**model(fingerprint="other")) is Reject.NO_MATCH
    assert adopting(**model(quantisation="Q4_1")) is Reject.NO_MATCH
    assert adopting(**model(adapter="a")) is Reject.ADAPTER_MISMATCH
    assert adopting(**model(adapter_scale=0.5)) is Reject.ADAPTER_MISMATCH
    assert adopting(**model(rope="yarn")) is Reject.ROPE_REGIME_MISMATCH
    assert adopting(**key(dtype="bfloat16")) is Reject.KV_MODE_MISMATCH
    assert adopting(**key(kv_mode="int8")) is Reject.KV_MODE_MISMATCH
    assert adopting(**key(level="R0")) is Reject.KV_MODE_MISMATCH
    assert adopting(**key(store="other")) is Reject.MODE_MISMATCH
    assert adopting(**key(page_size=64)) is Reject.LAYOUT_CONSTRAINTS
    assert adopting(epoch=1) is Reject.FAULT
    with pytest.raises(EmptyPrompt):
        engine.adopt(made.spec([]), prefix, 100)
    assert engine.kv_stats == before
    assert not engine.open_sequences
    assert engine.view(engine.adopt(made.spec(IDS), prefix, 100)).stored == 100


def test_at_r1_only_whole_pieces_that_were_prefilled():
    """Spec V15, 3.2."""

    class AtR1(KeepingNumpy):
        @property
        def caps(self):
            return attrs.evolve(super().caps, level="R1", mixed_steps=False, r1_tokens=16)

    made = caching(backend=AtR1(), chunk=32)
    prefix = detached(made, ids=IDS[:60], steps=40)
    assert (prefix.length, prefix.prefilled) == (99, 60)
    long = made.spec(np.concatenate([prefix.ids, IDS[:9]]))
    assert refusal(lambda: made.engine.adopt(long, prefix, 96)) is Reject.DECODED_POSITIONS
    assert refusal(lambda: made.engine.adopt(long, prefix, 33)) is Reject.GRANULE_FLOOR
    row = made.engine.adopt(long, prefix, 32)
    assert made.plan(long.prompt_ids, adopted=32).reproduces(made.plan(long.prompt_ids))
    made.engine.close(row)


def test_recurrent_layers_are_neither_handed_over_nor_taken():
    """Spec X14."""
    made = caching(layered_checkpoint("state", "full"))
    row = finished(made)
    assert refusal(lambda: made.engine.detach(row)) is Reject.MODEL_OWNED_STATE
    assert refusal(lambda: made.engine.share(row)) is Reject.MODEL_OWNED_STATE
    other = detached(caching())
    assert refusal(lambda: made.engine.adopt(made.spec(IDS), other, 10)) is Reject.MODEL_OWNED_STATE
    assert made.engine.view(row).state is SequenceState.FINISHED


@pytest.mark.on_jax(most=0)
def test_a_ring_that_went_round_is_adopted_only_where_it_holds_what_is_seen(backend):
    """Spec X15: a ring of ceil128(16 + 1 - 1 + 16) = 128 that saw 303 positions holds [175, 303): 190 and later."""
    made = caching(layered_checkpoint("window 16", "full"), chunk=1)
    ids = ids_of(300)
    prefix = detached(made, ids=ids, steps=4)
    assert (prefix.payload.written, prefix.payload.reach) == (303, 303 - 128 + 15)
    assert refusal(lambda: made.engine.adopt(made.spec(ids), prefix, 189)) is Reject.LAYOUT_CONSTRAINTS
    cold = caching(layered_checkpoint("window 16", "full"), chunk=1).run(ids, 4)
    for length in (190, 250, 299):
        row = made.engine.adopt(made.spec(ids, max_tokens=4), prefix, length)
        logits, output = go_on(made, row, made.plan(ids, adopted=length))
        assert_same_bits(cold.logits, logits)
        assert output == cold.ids


def test_reach_by_hand():
    spec = KVSpec((FullKV(1, 8, 8), SlidingKV(1, 8, 8, 16), SlidingKV(1, 8, 8, 100)))
    assert spec.layers[1].ring(context=512, chunk=1) == 128
    assert spec.layers[2].ring(context=512, chunk=1) == 128
    assert reach(spec, 128, context=512, chunk=1) == 0
    assert reach(spec, 129, context=512, chunk=1) == 1 + 99
    assert reach(KVSpec((FullKV(1, 8, 8),)), 500, context=512, chunk=1) == 0


def test_detach_refuses_rows_that_run_and_rows_that_failed(made):
    running = made.engine.open(made.spec(IDS))
    for state in ("open", "decoding"):
        with pytest.raises(BatchShapeError, match=f"is {state}"):
            made.engine.detach(running)
        if state == "open":
            made.engine.prefill(running, made.plan(IDS))
    ticket = submit(made, [Decode(running)])
    made.engine.cancel(running)
    with pytest.raises(BatchShapeError, match="with 1 steps in flight"):
        made.engine.detach(running)
    made.engine.collect(ticket)
    with pytest.raises(BatchShapeError, match=r"151 positions to hand over, 150 are stored"):
        made.engine.detach(running, 151)
    prefix = made.engine.detach(running)
    assert prefix.length == 150, "the step that was dropped does not count (spec E14)"
    made.engine.release(prefix)
    made.real.close(running)
    with pytest.raises(UnknownSequence):
        made.engine.detach(running)


def submit(made, parts):
    made.engine.reserve(parts)
    return made.engine.submit(parts)


def test_a_detached_row_is_seen_as_it_ended_and_closes(made):
    row = finished(made)
    prefix = made.engine.detach(row, 33)
    assert len(prefix.pages) == -(-33 // made.kv.page_size)
    assert made.engine.view(row).stored == len(IDS) + STEPS - 1
    assert (made.engine.kv_stats.owned, made.engine.kv_stats.cached) == (0, len(prefix.pages))
    with pytest.raises(AdoptError):
        made.engine.detach(row)
    made.engine.release(prefix)
    assert made.engine.close(row)


# --- unwind -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4])
def test_unwound_positions_are_fed_again_with_the_same_bits(made, alone, count):
    """Spec 1.2: what remains keeps its bits, replayed decodes draw nothing (E22)."""
    row = made.engine.open(made.spec(IDS, max_tokens=STEPS + 3))
    made.engine.prefill(row, made.plan(IDS))
    for _ in range(4):
        made.engine.step([row])
    made.engine.unwind(row, count)
    assert made.engine.view(row).stored == 154 - count
    for _ in range(count):
        assert made.engine.step([row])[0].token is None
    outcome = made.engine.step([row])[0]
    assert outcome.token is not None
    logits, output = made.real.close(row)
    longer = caching(made_checkpoint(made)).run(IDS, 6)
    assert_same_bits(longer.logits, logits)
    assert output == longer.ids


def made_checkpoint(made):
    return layered_checkpoint(*LAYERS["windows" if made.cache._kv_spec.windowed else "full"])


def test_unwinding_into_the_prompt_goes_on_with_pieces(backend):
    made = caching()
    row = made.engine.open(made.spec(IDS, max_tokens=STEPS))
    made.engine.prefill(row, made.plan(IDS))
    made.engine.unwind(row, 7)
    view = made.engine.view(row)
    assert (view.state, view.stored, view.prefilled) == (SequenceState.PREFILLING, 143, 143)
    plan = made.plan(IDS, adopted=143, draw=False)
    assert made.engine.prefill(row, plan).token is None
    assert made.engine.view(row).state is SequenceState.DECODING
    while made.engine.step([row])[0].cause is None:
        pass
    cold = caching().run(IDS, STEPS)
    logits, output = made.real.close(row)
    assert_same_bits(cold.logits, logits)
    assert output == cold.ids


def test_unwind_refusals(made):
    """Spec 1.2: n < 0, n > 16, n > stored - A; a step in flight; a row that ended."""
    prefix = detached(made)
    row = made.engine.adopt(made.spec(IDS), prefix, 145)
    made.engine.prefill(row, made.plan(IDS, adopted=145))
    for count, words in ((-1, "must be 0 to 16"), (17, "must be 0 to 16"), (6, "5 of its own are stored")):
        with pytest.raises(BatchShapeError, match=words):
            made.engine.unwind(row, count)
    ticket = submit(made, [Decode(row)])
    with pytest.raises(BatchShapeError, match="a step in flight"):
        made.engine.unwind(row, 1)
    made.engine.collect(ticket)
    made.engine.cancel(row)
    with pytest.raises(BatchShapeError, match="stays what it is"):
        made.engine.unwind(row, 1)
    made.real.close(row)
    if made.engine.shares:
        made.engine.release(prefix)


@pytest.mark.on_jax(most=0)
def test_recurrent_state_goes_back_by_its_last_step_and_no_further(backend):
    """Spec 2.1, V11: one step, by the older copy; none when a dropped step has written that."""
    checkpoint = layered_checkpoint("state", "full")
    made = caching(checkpoint)
    row = made.engine.open(made.spec(IDS, max_tokens=9))
    made.engine.prefill(row, made.plan(IDS))
    made.engine.step([row])
    with pytest.raises(RewindError, match="goes back by 1 positions, not by 2"):
        made.engine.unwind(row, 2)
    made.engine.unwind(row, 1)
    with pytest.raises(RewindError, match="goes back by 0"):
        made.engine.unwind(row, 1)
    assert made.engine.step([row])[0].token is None
    while made.engine.step([row])[0].cause is None:
        pass
    cold = caching(checkpoint).run(IDS, 9, keep=False)
    logits, output = made.real.close(row)
    assert_same_bits(cold.logits, logits)
    assert output == cold.ids


def test_a_short_trim_is_an_error_of_the_row():
    """Spec 1.2, E14: raised, and the row failed."""
    made = scripted_engine({"a": [65] * 9}, tokenizer=TOKENIZER, kv_store=PagedKV, faults=FaultPlan([Fault("trim", 1)]))
    row, plan = opened(made.engine, "a", max_tokens=9)
    made.engine.prefill(row, plan)
    made.engine.step([row])
    with pytest.raises(TrimError, match="kept 2 positions where 3 are valid"):
        made.engine.unwind(row, 1)
    assert made.engine.view(row).state is SequenceState.FAILED


# --- preempt and resume -----------------------------------------------------------------------------------------------


@pytest.mark.on_jax(most=2)
@pytest.mark.parametrize("when", ["open", "prefilling", "decoding"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3}], ids=str)
def test_a_preempted_row_goes_on_as_if_nothing_had_been(made, when, params):
    """Spec C18, C19: KV and slot are gone, and nothing else; nothing known is drawn again."""
    undisturbed = caching(made_checkpoint(made)).run(IDS, 8, keep=False, **params)
    engine, before = made.engine, made.engine.kv_stats
    row = engine.open(made.spec(IDS, max_tokens=8, **params))
    plan = made.plan(IDS)
    if when == "prefilling":
        plan = attrs.evolve(plan, pieces=made.plan(IDS[:100]).pieces + made.plan(IDS, adopted=100).pieces)
        engine.collect(submit(made, [Piece(row, plan, 0)]))
    elif when == "decoding":
        engine.prefill(row, plan)
        for _ in range(3):
            engine.step([row])
    engine.preempt(row)
    view = engine.view(row)
    assert (view.state, view.stored) == (SequenceState.PREEMPTED, 0)
    assert engine.kv_stats == before, "its pages and its slot are free"
    others = [engine.open(made.spec(IDS)) for _ in range(made.engine.settings.slots)]
    known = engine.tokens(row)[:-1] if view.output else IDS
    back = made.plan(known, draw=not view.output)
    with pytest.raises(CapacityError):
        engine.reserve([Piece(row, back, 0)])
    with pytest.raises(CapacityError):
        engine.resume(row)
    assert engine.view(row).state is SequenceState.PREEMPTED
    for other in others:
        engine.close(other)
    outcome = engine.prefill(row, back)
    assert (outcome.token is None) == bool(view.output)
    while outcome.cause is None:
        outcome = engine.step([row])[0]
    logits, output = made.real.close(row)
    assert_same_bits(undisturbed.logits, logits)
    assert output == undisturbed.ids


def test_a_resumed_row_begins_behind_a_prefix(made, alone):
    """Spec C19: the prompt cache may serve it."""
    prefix = detached(made)
    row = made.engine.open(made.spec(IDS, max_tokens=STEPS))
    made.engine.prefill(row, made.plan(IDS))
    made.engine.step([row])
    made.engine.preempt(row)
    made.engine.resume(row, prefix, 150)
    with pytest.raises(BatchShapeError, match="has its slot"):
        made.engine.resume(row)
    known = made.engine.tokens(row)[:-1]
    assert made.engine.view(row).stored == 150
    made.engine.prefill(row, made.plan(known, adopted=150, draw=False))
    logits, output = go_on_decoding(made, row)
    assert_same_bits(lone(made, alone).logits, logits)
    assert output == lone(made, alone).ids
    if made.engine.shares:
        made.engine.release(prefix)


def go_on_decoding(made, row):
    while made.engine.step([row])[0].cause is None:
        pass
    return made.real.close(row)


def test_preempting_twice_is_once_and_an_ended_row_is_refused(made):
    row = made.engine.open(made.spec(IDS))
    made.engine.prefill(row, made.plan(IDS))
    ticket = submit(made, [Decode(row)])
    with pytest.raises(BatchShapeError, match="1 steps in flight"):
        made.engine.preempt(row)
    made.engine.collect(ticket)
    made.engine.preempt(row)
    made.engine.preempt(row)
    made.engine.cancel(row)
    with pytest.raises(BatchShapeError, match="is finished"):
        made.engine.preempt(row)
    made.real.close(row)
