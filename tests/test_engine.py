"""Chapter 1 of docs/spec/engine.md: rows, refusals, steps, run-ahead."""

import numpy as np
import pytest
from engine_rows import decode, opened, pieces, plan_for, run_to_end, scripted, spec, turn

from mlxcel.core.plan import Decode, Piece
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import (
    BatchShapeError,
    CapacityError,
    ContextTooLong,
    EmptyPrompt,
    EngineUnhealthy,
    RequestError,
    UnknownSequence,
)
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan

HELLO = [*b"hello", EOS]


def test_a_row_goes_from_open_to_closed():
    """Spec 1.1, E1, E2."""
    it = scripted({"a": HELLO})
    engine = it.engine
    row, plan = opened(engine, "a")
    assert engine.view(row).state is SequenceState.OPEN
    outcome = engine.prefill(row, plan)
    assert (outcome.token, outcome.text, outcome.appended) == (ord("h"), "h", True)
    view = engine.view(row)
    assert (view.state, view.stored, len(view.output)) == (SequenceState.DECODING, 3, 1)
    text = outcome.text
    while outcome.cause is None:
        outcome = engine.step([row])[0]
        text += outcome.text
    view = engine.view(row)
    assert (text, outcome.cause, outcome.token, outcome.appended) == ("hello", "eos", EOS, False)
    assert (view.state, view.stored, bytes(view.output)) == (SequenceState.FINISHED, 3 + 5, b"hello")
    assert engine.close(row) is True
    assert engine.close(row) is False
    with pytest.raises(UnknownSequence):
        engine.view(row)


@pytest.mark.parametrize(("max_tokens", "forwards"), [(0, 0), (1, 1), (2, 2), (5, 5)])
def test_no_forward_runs_behind_the_budget(max_tokens, forwards):
    """Spec E9, E13: the prefill counts as one."""
    it = scripted({"a": HELLO})
    row, plan = opened(it.engine, "a", max_tokens=max_tokens)
    output, text, outcome = run_to_end(it.engine, row, plan)
    assert (len(output), outcome.cause, it.backend.steps) == (max_tokens, "max_tokens", forwards)
    assert text == "hello"[:max_tokens]
    with pytest.raises(BatchShapeError, match="finished"):
        it.engine.step([row])
    assert it.backend.steps == forwards


def test_the_context_is_a_bound_that_is_reached():
    """Spec F4, F5: P + G = N; the last token is never fed."""
    it = scripted({"a": [*b"0123456789"]}, context=8)
    row, plan = opened(it.engine, "a")
    output, _text, outcome = run_to_end(it.engine, row, plan)
    assert (bytes(output), outcome.cause, it.engine.view(row).stored) == (b"01234", "context", 7)


@pytest.mark.parametrize(("asked", "cause"), [(5, "max_tokens"), (6, "context"), (2**40, "context"), (-1, "context")])
def test_the_cause_says_which_bound_it_was(asked, cause):
    it = scripted({"a": [*b"0123456789"]}, context=8)
    row, plan = opened(it.engine, "a", max_tokens=asked)
    assert run_to_end(it.engine, row, plan)[2].cause == cause


def test_sequence_ids_are_never_used_twice():
    it = scripted({"a": HELLO}, slots=1)
    first, _ = opened(it.engine, "a")
    it.engine.close(first)
    second, _ = opened(it.engine, "a")
    assert (first, second) == (1, 2)
    with pytest.raises(UnknownSequence, match="sequence 1"):
        it.engine.step([first])


OPEN_REFUSALS = [
    (np.zeros(0, np.int32), EmptyPrompt, "no token"),
    (np.array([1, 259], np.int32), RequestError, "token id 259"),
    (np.array([1, -1], np.int32), RequestError, "token id -1"),
    (np.zeros(256, np.int32), ContextTooLong, "256 tokens, the context holds 256"),
    (np.zeros(999, np.int32), ContextTooLong, "999 tokens"),
]


@pytest.mark.parametrize(("ids", "kind", "words"), OPEN_REFUSALS)
def test_open_refuses(ids, kind, words):
    it = scripted({"a": HELLO})
    with pytest.raises(kind, match=words):
        it.engine.open(SequenceSpec("a", ids, spec("a").params))
    assert it.kv.stats().owned == 0
    assert it.engine.open(spec("a")) == 1


def test_a_stop_id_beyond_the_vocabulary_is_refused():
    """Spec S46: for every client."""
    it = scripted({"a": HELLO})
    with pytest.raises(RequestError, match="stop_token_ids: 259") as caught:
        it.engine.open(spec("a", stop_token_ids=[3, 259]))
    assert caught.value.field == "stop_token_ids"
    assert it.kv.stats().owned == 0


def test_open_refuses_without_room():
    it = scripted({"a": HELLO, "b": HELLO}, slots=1)
    it.engine.open(spec("a"))
    with pytest.raises(CapacityError, match="all 1 rows are taken"):
        it.engine.open(spec("b"))


def refused_parts(it):
    """(what, parts) to be refused before a forward. Row 1 decodes, row 2 is new, row 3 ended, row 4 is closed."""
    engine = it.engine
    decoding, plan = opened(engine, "a")
    engine.prefill(decoding, plan)
    fresh, fresh_plan = opened(engine, "b", b"abcdef", chunk=4)
    ended, ended_plan = opened(engine, "c", max_tokens=1)
    engine.prefill(ended, ended_plan)
    closed, closed_plan = opened(engine, "d")
    engine.close(closed)
    other = plan_for(b"abcdeX", 4)
    return [
        ("empty", [], BatchShapeError, "at least one"),
        ("twice", decode(decoding, decoding), BatchShapeError, "two parts"),
        ("twice, two kinds", [Decode(fresh), Piece(fresh, fresh_plan, 0)], BatchShapeError, "two parts"),
        ("unknown", decode(99), UnknownSequence, "99"),
        ("closed", decode(closed), UnknownSequence, str(closed)),
        ("closed piece", pieces(closed, closed_plan), UnknownSequence, str(closed)),
        ("decode before prefill", decode(fresh), BatchShapeError, "6 prompt tokens are not computed"),
        ("decode an ended row", decode(decoding, ended), BatchShapeError, "finished"),
        ("piece of a decoding row", [Piece(decoding, plan, 0)], BatchShapeError, "takes no piece"),
        ("no such piece", [Piece(fresh, fresh_plan, 2)], BatchShapeError, "none with index 2"),
        ("no such piece either", [Piece(fresh, fresh_plan, -1)], BatchShapeError, "none with index -1"),
        ("piece out of order", [Piece(fresh, fresh_plan, 1)], BatchShapeError, "starts at 4, the row is at 0"),
        ("another's plan", [Piece(fresh, other, 0)], BatchShapeError, "other token ids"),
        ("a plan too long", [Piece(fresh, plan_for(b"abcdefg", 4), 0)], BatchShapeError, "other token ids"),
        ("a plan too short", [Piece(fresh, plan_for(b"abc"), 0)], BatchShapeError, "newest token"),
    ]


@pytest.mark.parametrize("case", range(15))
@pytest.mark.parametrize("call", ["reserve", "submit"])
def test_refused_before_any_forward(call, case):
    """Spec 1.2: each "refused" cell, its class, and the forward counter did not move."""
    it = scripted(dict.fromkeys("abcd", HELLO))
    _what, parts, kind, words = refused_parts(it)[case]
    before = it.backend.steps, it.backend.tokens, it.kv.stats()
    with pytest.raises(kind, match=words):
        getattr(it.engine, call)(parts)
    assert (it.backend.steps, it.backend.tokens, it.kv.stats()) == before


def test_submit_takes_what_was_reserved_and_nothing_else():
    """Spec V17."""
    it = scripted({"a": HELLO, "b": HELLO})
    engine = it.engine
    a, plan_a = opened(engine, "a")
    b, plan_b = opened(engine, "b")
    engine.prefill(a, plan_a)
    engine.prefill(b, plan_b)
    with pytest.raises(BatchShapeError, match="not the ones reserved"):
        engine.submit(decode(a))
    engine.reserve(decode(a))
    with pytest.raises(BatchShapeError, match="not the ones reserved"):
        engine.submit(decode(a, b))
    ticket = engine.submit(decode(a))
    with pytest.raises(BatchShapeError, match="not the ones reserved"):
        engine.submit(decode(a))
    assert [outcome.token for outcome in engine.collect(ticket)] == [ord("e")]
    with pytest.raises(BatchShapeError, match="not the oldest"):
        engine.collect(ticket)


def test_at_most_one_step_runs_ahead():
    it = scripted({"a": HELLO})
    engine = it.engine
    row, plan = opened(engine, "a")
    engine.prefill(row, plan)
    tickets = []
    for _ in range(2):
        engine.reserve(decode(row))
        tickets.append(engine.submit(decode(row)))
    engine.reserve(decode(row))
    with pytest.raises(BatchShapeError, match="2 steps are in flight"):
        engine.submit(decode(row))
    with pytest.raises(BatchShapeError, match="not the oldest"):
        engine.collect(tickets[1])
    with pytest.raises(BatchShapeError, match="in flight"):
        engine.step([row])
    assert [engine.collect(ticket)[0].token for ticket in tickets] == [ord("e"), ord("l")]


def run_ahead(it, row, plan):
    """Drive one row with a step always in flight while the engine takes one."""
    engine, flight, tokens, ending = it.engine, [], [], None
    parts = pieces(row, plan)
    while True:
        nxt = [parts.pop(0)] if parts else decode(row)
        try:
            engine.reserve(nxt)
            flight.append(engine.submit(nxt))
        except BatchShapeError:
            pass
        if not flight:
            return tokens, ending
        if len(flight) == 2 or ending or (engine.view(row).in_flight and not parts):
            outcome = engine.collect(flight.pop(0))[0]
            tokens += [outcome.token] if outcome.appended else []
            ending = ending or outcome.cause


@pytest.mark.parametrize(("script", "params"), [(HELLO, {}), (HELLO, {"max_tokens": 3}), ([*b"0123456789"], {})])
@pytest.mark.parametrize("chunk", [1, 2, 2048])
def test_run_ahead_changes_nothing(script, params, chunk):
    """Spec E13, E14, C52: same ids and cause; an overrun is dropped and its position taken back."""
    alone = scripted({"a": script}, context=9)
    row, plan = opened(alone.engine, "a", chunk=chunk, **params)
    output, _text, outcome = run_to_end(alone.engine, row, plan)
    ahead = scripted({"a": script}, context=9)
    row2, plan2 = opened(ahead.engine, "a", chunk=chunk, **params)
    tokens, cause = run_ahead(ahead, row2, plan2)
    assert (tuple(tokens), cause) == (output, outcome.cause)
    assert ahead.engine.view(row2).stored == alone.engine.view(row).stored
    if cause != "eos":
        assert ahead.backend.steps == alone.backend.steps


def test_a_decode_may_follow_a_terminal_piece_in_flight():
    it = scripted({"a": HELLO})
    engine = it.engine
    row, plan = opened(engine, "a")
    engine.reserve(pieces(row, plan))
    first = engine.submit(pieces(row, plan))
    engine.reserve(decode(row))
    second = engine.submit(decode(row))
    assert engine.view(row).in_flight == 2
    assert [engine.collect(t)[0].token for t in (first, second)] == [ord("h"), ord("e")]


def test_an_overrun_is_dropped_and_taken_back():
    """Spec E2, E14."""
    it = scripted({"a": [ord("x"), EOS, ord("y")]})
    engine = it.engine
    row, plan = opened(engine, "a")
    engine.prefill(row, plan)
    tickets = []
    for _ in range(2):
        engine.reserve(decode(row))
        tickets.append(engine.submit(decode(row)))
    assert engine.collect(tickets[0])[0].cause == "eos"
    dropped = engine.collect(tickets[1])[0]
    assert (dropped.token, dropped.cause, dropped.error, dropped.text) == (None, None, None, "")
    assert engine.view(row).stored == 3 + 1
    assert it.kv.trim(row, 99) == 3 + 1


def test_close_with_a_step_in_flight_waits_for_it():
    it = scripted({"a": HELLO, "b": HELLO})
    engine = it.engine
    row, plan = opened(engine, "a")
    engine.reserve(pieces(row, plan))
    ticket = engine.submit(pieces(row, plan))
    assert engine.close(row) is True
    assert engine.close(row) is False
    assert it.kv.stats().owned == 1
    assert engine.open_sequences == ()
    assert len(engine.collect(ticket)) == 1
    assert it.kv.stats().owned == 0


def test_decode_rows_and_pieces_share_a_step():
    """Spec C2, E15: a mixed step gives each row what separate steps give; outcomes in the order of the parts."""
    it = scripted({"a": HELLO, "b": [*b"world", EOS]})
    engine = it.engine
    a, plan_a = opened(engine, "a")
    b, plan_b = opened(engine, "b", b"abcdef", chunk=4)
    engine.prefill(a, plan_a)
    first = turn(engine, Piece(b, plan_b, 0), Decode(a))
    assert [(o.sequence_id, o.token) for o in first] == [(b, None), (a, ord("e"))]
    second = turn(engine, Decode(a), Piece(b, plan_b, 1))
    assert [(o.sequence_id, o.token) for o in second] == [(a, ord("l")), (b, ord("w"))]
    assert it.backend.tokens == 3 + (4 + 1) + (1 + 2)


def test_a_level_without_mixed_steps_refuses_them():
    """Spec P11, C2."""
    it = scripted({"a": HELLO, "b": HELLO}, level="R1", mixed_steps=False)
    engine = it.engine
    a, plan_a = opened(engine, "a")
    b, plan_b = opened(engine, "b")
    engine.prefill(a, plan_a)
    with pytest.raises(BatchShapeError, match="at level R1 a piece runs in a step of its own"):
        engine.reserve([Decode(a), *pieces(b, plan_b)])
    engine.prefill(b, plan_b)
    assert [o.token for o in engine.step([b, a])] == [ord("e"), ord("e")]


def test_prefill_and_step_are_loops_over_the_same_parts():
    """Spec 1.2: the bits of the same parts submitted by hand."""
    loops, hand = scripted({"a": HELLO}), scripted({"a": HELLO})
    row, plan = opened(loops.engine, "a", b"abcdef", chunk=4)
    seen = []
    outcomes = [loops.engine.prefill(row, plan, seen.append), *loops.engine.step([row])]
    assert tuple(seen) == plan.pieces
    row2, plan2 = opened(hand.engine, "a", b"abcdef", chunk=4)
    by_hand = [turn(hand.engine, part)[0] for part in (*pieces(row2, plan2), Decode(row2))]
    assert outcomes == by_hand[1:]
    assert (loops.backend.steps, loops.backend.tokens) == (hand.backend.steps, hand.backend.tokens)


def test_a_piece_is_started_before_the_one_ahead_of_it_is_read():
    """Spec P11, C52: one step ahead at most."""
    it = scripted({"a": HELLO})
    row, plan = opened(it.engine, "a", b"abcdefgh", chunk=2)
    started = []
    assert it.engine.prefill(row, plan, lambda span: started.append(it.backend.steps)).token == HELLO[0]
    assert started == [2, 3, 4, 4]


@pytest.mark.parametrize("last", range(4))
def test_a_caller_that_gives_up_has_heard_of_all_that_ran(last):
    """Spec E3, E11: a piece in flight, be it the one that draws, never was; the prompt goes on where it stopped."""
    it = scripted({"a": HELLO})
    row, plan = opened(it.engine, "a", b"abcdefgh", chunk=2)

    def stop_at_one(span):
        if span == plan.pieces[last]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        it.engine.prefill(row, plan, stop_at_one)
    view = it.engine.view(row)
    assert (view.stored, view.in_flight) == (plan.pieces[last].end, 0)
    assert it.kv.trim(row, 10**6) == view.stored
    if last < 3:
        assert view.output == ()
        assert it.engine.prefill(row, plan).token == HELLO[0]
    assert it.engine.step([row])[0].token == HELLO[1]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_piece_without_room_hides_none_before_it(nth):
    """Spec E4: the one in flight has run when the refusal is heard, and that was told."""
    it = scripted({"a": HELLO}, faults=FaultPlan([Fault("reserve", n) for n in (nth, nth + 1)]))
    row, plan = opened(it.engine, "a", b"abcdef", chunk=2)
    ran = []
    with pytest.raises(CapacityError):
        it.engine.prefill(row, plan, ran.append)
    assert ran == list(plan.pieces[: nth - 1])
    assert it.engine.view(row).stored == 2 * len(ran)


def test_a_cancelled_row_keeps_its_text_and_gives_its_tail():
    euro = "€".encode()
    it = scripted({"a": [ord("a"), *euro]})
    row, plan = opened(it.engine, "a")
    it.engine.prefill(row, plan)
    assert it.engine.step([row])[0].text == ""
    outcome = it.engine.cancel(row)
    assert (outcome.cause, outcome.text) == ("cancelled", "�")
    assert it.engine.view(row).state is SequenceState.FINISHED
    assert it.engine.cancel(row).cause == "cancelled"


def test_shutdown_is_idempotent_and_final():
    it = scripted({"a": HELLO})
    row = it.engine.open(spec("a"))
    it.engine.shutdown()
    it.engine.shutdown()
    assert it.backend.closed
    assert it.kv.stats().owned == 0
    assert it.engine.close(row) is False
    with pytest.raises(EngineUnhealthy, match="shut down"):
        it.engine.open(spec("a"))
