"""Recurrent state in two copies (docs/spec/engine.md 2.4): the formulas, row invariance, and steps that must not count.

The rows also keep windows and pages, so that what takes back a state takes back the rest.
"""

import numpy as np
import pytest
from company import PATIENT, check_company, company
from disturbed_rows import DisturbedRows, interrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_family import Layered, layered_checkpoint, layered_logits
from real_engine import assert_same_bits, real_engine
from tested_backends import loaded_family

from mlxcel.core.plan import Decode
from mlxcel.core.sequence import SequenceState

LAYERS = ("state", "window 16", "full", "state+experts")
STEPS = 6
LOGITS_TOLERANCE = 1e-5
"""Of the largest logit: float32 sums in four layers of this small model come within 1e-6 of float64."""


def ids_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 61, length)


PROMPTS = [ids_of(length, seed=length) for length in (5, 20, 1)]


@pytest.fixture(scope="module")
def checkpoint():
    return layered_checkpoint(*LAYERS)


@pytest.fixture(scope="module")
def alone(backend, checkpoint):
    """What each of PROMPTS comes to, undisturbed: (logits [STEPS + 1, V], ids)."""
    real = real_engine(checkpoint, Layered(), slots=4, chunk=8)
    return [real.alone(prompt, STEPS, 8) for prompt in PROMPTS]


@pytest.fixture
def rows(backend, checkpoint):
    """Rows over PROMPTS in an engine with one slot more."""
    return DisturbedRows(real_engine(checkpoint, Layered(), slots=4, chunk=8), PROMPTS, STEPS, chunk=8)


# --- the formulas and row invariance ---------------------------------------------------------------------------------


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("length", [1, 2, 150, 3, 40])
def test_a_recurrence_is_the_formula_in_any_pieces(backend, checkpoint, length):
    loaded, ids = loaded_family(Layered(), checkpoint), ids_of(length)
    bounds = {"context": 256, "chunk": 256}
    whole, expected = loaded.logits(ids, **bounds), layered_logits(checkpoint, ids)
    assert np.abs(whole - expected).max() <= LOGITS_TOLERANCE * np.abs(expected).max()
    for chunk in (1, 7, 64):
        assert_same_bits(whole, loaded.logits(ids, list(range(chunk, length, chunk)), **bounds), f"chunk {chunk}")


def test_a_layer_that_keeps_positions_has_no_state_and_the_other_way_round(backend, checkpoint):
    """A family's mistake is told by its layer, before numbers come of it."""

    class Crossed(Layered):
        def recur(self, ctx, i, x):
            return self.attend(ctx, 1, x, "full", 0.0) if i == 0 else super().recur(ctx, i, x)

        def attend(self, ctx, i, x, kind, softcap):
            q = ctx.xp.reshape(x, (-1, 3, 8))
            return ctx.attend(q, q, q, layer=0, scale=1.0)

    with pytest.raises(TypeError, match="layer 0 keeps recurrent state: nothing can be attended to"):
        loaded_family(Crossed(), checkpoint).logits([1, 2])

    class Reversed(Layered):
        def attend(self, ctx, i, x, kind, softcap):
            return ctx.state_scan(lambda state, values: (state, values[0]), (x,), layer=i)

    with pytest.raises(TypeError, match="layer 1 keeps positions: it has no recurrent state"):
        loaded_family(Reversed(), checkpoint).logits([1, 2])


@pytest.fixture(scope="module", params=[LAYERS, ("state",), ("full", "state")], ids=" ".join)
def engines(backend, request):
    checkpoint = layered_checkpoint(*request.param)
    return [real_engine(checkpoint, Layered(), slots=9, chunk=chunk) for chunk in (64, 2048)]


@pytest.mark.on_jax(most=1)
@settings(max_examples=8, **PATIENT)
@given(data=st.data())
def test_rows_with_state_do_not_know_their_company(engines, data):
    """Batches, shuffled places, chunks, joining and leaving; a slot's next row as fresh."""
    small, large = engines
    check_company(small, data.draw(company(small.vocab, chunks=(1, 7, 64))), alone=large)
    check_company(large, data.draw(company(large.vocab, chunks=(1, 7, 64, 2048))))


@pytest.mark.slow
@settings(max_examples=150, **PATIENT)
@given(data=st.data())
def test_rows_with_state_do_not_know_their_company_at_length(engines, data):
    small, large = engines
    lengths = (1, 2, 9, 16, 40, 127, 129, 200)
    check_company(small, data.draw(company(small.vocab, lengths=lengths, chunks=(1, 7, 64))), alone=large)


# --- steps that must not count ---------------------------------------------------------------------------------------


def test_a_step_ahead_changes_no_bit(rows, alone):
    while going := rows.going:
        rows.turn(going, going)
    rows.check(alone)


def test_rows_that_join_at_different_steps_ahead(rows, alone):
    """Copies turn by the row's own steps, not by those of the engine."""
    turn = 0
    while going := rows.going:
        turn += 1
        rows.turn(going[turn % 2 :] or going, going[: 1 + turn % 3])
    rows.check(alone)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("method", ["submit", "read"])
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_an_interrupted_step_leaves_the_state_before_it(monkeypatch, rows, alone, before, method, behind):
    """Spec E12, V11: after an odd and an even number of steps, in a prompt and behind it."""
    for _ in range(before):
        rows.turn(rows.going)
    with monkeypatch.context() as patch:
        interrupted(patch, rows.real.backend, method, behind=behind)
        with pytest.raises(KeyboardInterrupt):
            rows.turn(rows.going)
    assert SequenceState.PREEMPTED not in {rows.engine.view(row).state for row in rows.prompts}
    rows.to_end()
    rows.check(alone)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("before", range(6))
def test_an_interrupted_submit_ahead_leaves_the_step_in_flight(monkeypatch, rows, alone, before):
    """The step that never was wrote over the copy that the one in flight had read; that one counts."""
    for _ in range(before):
        rows.turn(rows.going)
    with monkeypatch.context() as patch:
        interrupted(patch, rows.real.backend, "submit", nth=2)
        with pytest.raises(KeyboardInterrupt):
            rows.turn(rows.going, rows.going)
    rows.to_end()
    rows.check(alone)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("before", range(6))
def test_an_interrupt_with_a_step_ahead_voids_both_copies(monkeypatch, rows, alone, before):
    """The rows that both steps hold lose their KV, and a replay brings them back; a row of one step goes on."""
    first, second, third = rows.prompts
    for _ in range(before):
        rows.turn(rows.going)
    both = [row for row in (first, second) if row in rows.going]
    with monkeypatch.context() as patch:
        interrupted(patch, rows.real.backend, "read")
        with pytest.raises(KeyboardInterrupt):
            rows.turn([first, second], [*reversed(both), third])
    states = {row: rows.engine.view(row).state for row in rows.prompts}
    assert [states[row] for row in both] == [SequenceState.PREEMPTED] * len(both)
    assert states[third] is not SequenceState.PREEMPTED
    assert [rows.engine.view(row).stored for row in both] == [0] * len(both)
    rows.to_end()
    rows.check(alone)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("before", range(6))
def test_two_interrupts_void_both_copies_too(monkeypatch, rows, alone, before):
    """The step ahead never was, and wrote all the same; then the one in flight is void."""
    for _ in range(before):
        rows.turn(rows.going)
    with monkeypatch.context() as patch:
        interrupted(patch, rows.real.backend, "read")
        interrupted(patch, rows.real.backend, "submit", nth=2)
        with pytest.raises(KeyboardInterrupt):
            rows.turn(rows.going, rows.going)
    rows.to_end()
    rows.check(alone)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_interrupt_between_the_rows_of_a_step(monkeypatch, rows, alone, nth):
    """Some rows of the step are resolved when it comes, and the step ahead has written over what they read."""
    for _ in range(4):
        rows.turn(rows.going)
    with monkeypatch.context() as patch:
        interrupted(patch, rows.engine._finish, "resolve", nth=nth, behind=False)
        with pytest.raises(KeyboardInterrupt):
            rows.turn(rows.going, rows.going)
    rows.to_end()
    rows.check(alone)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("kv_intact", [True, False])
def test_a_fault_of_another_row_and_a_replay(monkeypatch, rows, alone, before, kv_intact):
    """Spec E18: with the KV lost every row starts over, a second time too; else rows outside the step go on."""
    for _ in range(before):
        rows.turn(rows.going)
    for _ in range(2):
        rows.lose_kv(monkeypatch, kv_intact=kv_intact)
        preempted = [rows.engine.view(row).state is SequenceState.PREEMPTED for row in rows.going]
        assert preempted == [not kv_intact] * len(preempted)
        rows.turn(rows.going)
    rows.to_end()
    rows.check(alone)


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("ending", range(1, 5))
@pytest.mark.parametrize("ahead", [False, True])
def test_a_slot_after_an_overrun_is_as_fresh(backend, checkpoint, alone, ending, ahead):
    """Spec E14, V11: one slot. A row ends by a stop id with a step in flight, after an odd and an even number of
    steps; the next row in its slot knows nothing of it."""
    real = real_engine(checkpoint, Layered(), slots=1, chunk=8)
    _logits, output = alone[0]
    at = output.index(output[ending])  # where that id is drawn first
    row = real.open(PROMPTS[0], stop_token_ids=(output[at],))
    real.engine.prefill(row, real.plan(PROMPTS[0]))
    while real.engine.view(row).ending is None:
        parts = [Decode(row)]
        tickets = []
        for _ in range(2):
            real.engine.reserve(parts)
            tickets.append(real.engine.submit(parts))
            if not ahead:
                break
        for ticket in tickets:
            real.engine.collect(ticket)
    assert real.engine.view(row).ending.cause == "stop_token"
    real.engine.close(row)
    for index, (expected, ids) in enumerate(alone):
        got, said = real.alone(PROMPTS[index], STEPS, 8)
        assert_same_bits(expected, got)
        assert said == ids
    assert real.engine.kv_stats.owned == 0


SCENES = {
    "state": (LAYERS, 8, (1, 3, 8), (5, 20, 1)),
    "rings": (("window 16", "full"), 64, (40, 64), (5, 250, 130)),
}
"""Kinds of layers, the engine's chunk, that of the pieces, and lengths of prompts: short ones for many turns of the
copies, long ones for rings that wrap."""


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=12, **PATIENT)
@given(data=st.data())
def test_rows_come_to_the_same_end_whatever_happens(backend, scene, data):
    check_scene(*SCENES[scene], data)


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=200, **PATIENT)
@given(data=st.data())
def test_rows_come_to_the_same_end_whatever_happens_at_length(scene, data):
    check_scene(*SCENES[scene], data)


def check_scene(layers, longest, chunks, lengths, data):
    """Spec E12, E18: random steps, one or two at a time, with interrupts and faults among them."""
    checkpoint, prompts = layered_checkpoint(*layers), [ids_of(length, seed=length) for length in lengths]
    undisturbed = real_engine(checkpoint, Layered(), slots=4, chunk=longest)
    expected = [undisturbed.alone(prompt, STEPS, longest) for prompt in prompts]
    chunk = data.draw(st.sampled_from(chunks))
    rows = DisturbedRows(real_engine(checkpoint, Layered(), slots=4, chunk=longest), prompts, STEPS, chunk)
    events = st.sampled_from(["step", "step", "ahead", "ahead", "submit", "read", "second", "both", "lose", "fault"])
    for event in data.draw(st.lists(events, max_size=12)):
        going = rows.going
        if not going:
            break
        some = data.draw(st.permutations(going))[: data.draw(st.integers(1, len(going)))]
        later = None if event == "step" else data.draw(st.permutations(going))
        with pytest.MonkeyPatch.context() as patch:
            if event in ("lose", "fault"):
                rows.lose_kv(patch, kv_intact=event == "fault")
                continue
            behind = data.draw(st.booleans())
            if event in ("submit", "second", "both"):
                interrupted(patch, rows.real.backend, "submit", nth=1 if event == "submit" else 2, behind=behind)
            if event in ("read", "both"):
                interrupted(patch, rows.real.backend, "read", behind=behind)
            try:
                rows.turn(some, later)
            except KeyboardInterrupt:
                assert event in ("submit", "read", "second", "both")
    rows.to_end()
    rows.check(expected)
