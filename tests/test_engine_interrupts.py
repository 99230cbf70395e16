"""What a KeyboardInterrupt, or a plugin that misbehaves, leaves behind: an engine that goes on and closes."""

import attrs
import numpy as np
import pytest
from engine_rows import CAPS, decode, opened, pieces, plan_for, run_to_end, scripted, spec, turn

from mlxcel.core.plan import Decode, Piece, Span
from mlxcel.core.sequence import SequenceState
from mlxcel.direct import generate
from mlxcel.errors import BackendFault, BatchShapeError, EngineUnhealthy, NumericFault, TrimError
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import ScriptedBackend

SCRIPTS = {"a": [*b"hello", EOS], "b": [*b"world", EOS]}


def interrupted_at(monkeypatch, owner, method, nth):
    """`owner.method` raises KeyboardInterrupt in its nth call from now on, before it does anything."""
    real, calls = getattr(owner, method), iter(range(1, 10**6))

    def call(self, *args, **options):
        if next(calls) == nth:
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(owner, method, call)


def two_rows(scripts=SCRIPTS, **options):
    it = scripted(scripts, **options)
    rows = []
    for name in "ab":
        row, plan = opened(it.engine, name)
        it.engine.prefill(row, plan)
        rows.append(row)
    return it, rows


def said(engine, row):
    """Decode one row to its end; all it said."""
    while engine.view(row).ending is None:
        assert engine.step([row])[0].error is None
    return bytes(engine.view(row).output)


def kept_positions(it, row):
    return it.kv.trim(row, 10**6)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(ScriptedBackend, "submit"), (ScriptedBackend, "read"), (DenseKV, "advance"), (ChainSampler, "pack")],
)
def test_an_interrupted_step_never_was(monkeypatch, owner, method):
    """Spec E3, E8, E11: the rows are where they were, in the KV store too, and say what they would have said."""
    it, (a, b) = two_rows()
    before = it.engine.view(a), it.engine.view(b)
    interrupted_at(monkeypatch, owner, method, 1)
    with pytest.raises(KeyboardInterrupt):
        it.engine.step([a, b])
    assert (it.engine.view(a), it.engine.view(b)) == before
    assert [kept_positions(it, row) for row in (a, b)] == [view.stored for view in before]
    assert (said(it.engine, a), said(it.engine, b)) == (b"hello", b"world")


@pytest.mark.parametrize("method", ["submit", "read"])
@pytest.mark.parametrize("nth", [1, 3])
def test_an_interrupted_request_leaves_room_for_the_next(monkeypatch, method, nth):
    """Spec E8: one slot, so that a row that leaked would refuse the second request."""
    it = scripted(SCRIPTS, slots=1)
    planner = ChunkedPlanner(chunk=2, level="R2", caps=CAPS)
    with monkeypatch.context() as patch:
        interrupted_at(patch, ScriptedBackend, method, nth)
        first = generate(it.engine, spec("a"), planner=planner, clock=it.clock)
    assert (first.cause, first.text) == ("cancelled", "" if nth == 1 else "h")
    assert generate(it.engine, spec("b"), planner=planner, clock=it.clock).text == "world"
    assert it.kv.stats().owned == 0


@pytest.mark.parametrize("method", ["submit", "read"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 6])
def test_an_interrupted_run_never_was_behind_what_was_read(monkeypatch, method, nth):
    """Spec C54, E3, E11: the rows go on behind the last step that was read, in the KV store too, whichever step of two
    runs it was."""
    it, (a, b) = two_rows(scripts={"a": [*b"hello, hello", EOS], "b": [*b"world, world", EOS]}, decode_run=4)
    tickets, read = [], 0

    def run_twice():
        nonlocal read
        for _ in range(2):
            it.engine.reserve(decode(a, b), 4)
            tickets.extend(it.engine.submit_run(decode(a, b), 4))
        for ticket in tickets:
            it.engine.collect(ticket)
            read += 1

    with monkeypatch.context() as patch:
        interrupted_at(patch, ScriptedBackend, method, nth)
        with pytest.raises(KeyboardInterrupt):
            run_twice()
    if method == "submit":  # the run that was not started, in which it was
        assert len(tickets) == 4 * ((nth - 1) // 4)
        for ticket in tickets:
            it.engine.collect(ticket)
        read = len(tickets)
    else:
        assert read == nth - 1
        for ticket in tickets[nth:]:
            assert [outcome.token for outcome in it.engine.collect(ticket)] == [None, None]
    for row in (a, b):
        view = it.engine.view(row)
        assert (len(view.output), view.in_flight) == (1 + read, 0)
        assert kept_positions(it, row) == view.stored == view.prompt_tokens + read
    assert (said(it.engine, a), said(it.engine, b)) == (b"hello, hello", b"world, world")


def test_an_interrupt_in_collect_voids_the_step_that_builds_on_it(monkeypatch):
    """Spec E12: no token of the later step may follow one that nobody read. The closed row gives its pages back."""
    it, (a, b) = two_rows()
    tickets = []
    for _ in range(2):
        it.engine.reserve(decode(a, b))
        tickets.append(it.engine.submit(decode(a, b)))
    it.engine.close(b)
    with monkeypatch.context() as patch:
        interrupted_at(patch, ScriptedBackend, "read", 1)
        with pytest.raises(KeyboardInterrupt):
            it.engine.collect(tickets[0])
    assert [outcome.token for outcome in it.engine.collect(tickets[1])] == [None, None]
    assert it.kv.stats().owned == 1
    assert said(it.engine, a) == b"hello"


@pytest.mark.parametrize("resume", ["draw", "replay"])
def test_a_row_resumes_before_its_lost_step_is_collected(resume):
    """Spec E18, E3: a prompt of one token, whose lost position must not pass for a stored one."""
    it = scripted(SCRIPTS, faults=FaultPlan([Fault("read", 3, "lose_kv")]))
    rows = []
    for name in "ab":
        row, plan = opened(it.engine, name, b"x")
        it.engine.prefill(row, plan)
        rows.append(row)
    a, b = rows
    tickets = []
    for row in (a, b):
        it.engine.reserve(decode(row))
        tickets.append(it.engine.submit(decode(row)))
    assert isinstance(it.engine.collect(tickets[0])[0].error, BackendFault)
    assert it.engine.view(b).state is SequenceState.PREEMPTED
    with pytest.raises(BatchShapeError, match="1 prompt tokens are not computed"):
        it.engine.reserve(decode(b))
    known = b"xw" if resume == "draw" else b"x"
    part = Piece(b, plan_for(known, draw=resume == "draw"), 0)
    behind = plan_for(b"xw", 1)
    with pytest.raises(BatchShapeError, match="the row is at 0"):
        it.engine.reserve([Piece(b, behind, 1)])
    it.engine.reserve([part])
    ticket = it.engine.submit([part])
    assert it.engine.collect(tickets[1])[0].token is None
    assert it.engine.collect(ticket)[0].token == (ord("o") if resume == "draw" else None)
    assert said(it.engine, b) == b"world"


def test_an_unhealthy_engine_stays_so():
    """Spec E19: a step that was in flight and went well heals nothing."""
    it, (a, b) = two_rows(faults=FaultPlan([Fault("read", 3)]), max_consecutive_faults=1)
    tickets = []
    for row in (a, b):
        it.engine.reserve(decode(row))
        tickets.append(it.engine.submit(decode(row)))
    it.engine.collect(tickets[0])
    assert not it.engine.healthy
    assert it.engine.collect(tickets[1])[0].token is None
    assert not it.engine.healthy
    assert isinstance(it.engine.view(b).error, EngineUnhealthy)
    with pytest.raises(EngineUnhealthy, match="1 steps failed in a row"):
        it.engine.open(spec("a"))


def test_a_row_keeps_its_first_error():
    """Spec 1.2: a row that has ended keeps its ending, whatever the step ahead of it comes to."""
    it, (a, _b) = two_rows(faults=FaultPlan([Fault("status", 3), Fault("read", 4)]))
    tickets = []
    for _ in range(2):
        it.engine.reserve(decode(a))
        tickets.append(it.engine.submit(decode(a)))
    assert isinstance(it.engine.collect(tickets[0])[0].error, NumericFault)
    assert it.engine.collect(tickets[1])[0].error is None
    assert isinstance(it.engine.view(a).error, NumericFault)


def test_an_overrun_that_fails_is_taken_back():
    """Spec E14."""
    it = scripted({"a": [ord("x"), EOS, ord("y")]}, faults=FaultPlan([Fault("read", 3)]))
    row, plan = opened(it.engine, "a")
    it.engine.prefill(row, plan)
    tickets = []
    for _ in range(2):
        it.engine.reserve(decode(row))
        tickets.append(it.engine.submit(decode(row)))
    assert it.engine.collect(tickets[0])[0].cause == "eos"
    assert it.engine.collect(tickets[1])[0].error is None
    assert kept_positions(it, row) == it.engine.view(row).stored == 4


BAD_PIECES = [
    (Span(0, 0, 0), Span(0, 3, 3)),
    (Span(0, 9, 9),),
    (Span(0, 2, 2),),
    (Span(0, -1, 1),),
]


@pytest.mark.parametrize("spans", BAD_PIECES)
def test_pieces_that_do_not_tile_their_plan_are_refused(spans):
    """A planner may be a plugin. An empty piece that draws would read its neighbour's logits."""
    it = scripted(SCRIPTS)
    row, plan = opened(it.engine, "a")
    bad = attrs.evolve(plan, pieces=spans)
    with pytest.raises(BatchShapeError, match="of a plan for 3 tokens"):
        it.engine.reserve([Piece(row, bad, 0)])
    assert run_to_end(it.engine, row, plan)[1] == "hello"


@pytest.mark.parametrize("table", [[], [-1], [8], [0, -1]])
def test_a_page_table_that_does_not_cover_the_row_fails_the_step(monkeypatch, table):
    """Spec E5: a page that is not the row's would be written to another's."""
    it, (a, b) = two_rows()
    with monkeypatch.context() as patch:
        patch.setattr(DenseKV, "page_table", lambda self, sequence_id: np.array(table, np.int32))
        before = it.backend.steps
        error = it.engine.step([a])[0].error
    assert isinstance(error, BackendFault)
    assert "'dense' gives 4 positions the pages" in str(error)
    assert it.backend.steps == before
    assert said(it.engine, b) == b"world"


@pytest.mark.parametrize(("owner", "method"), [(ChainSampler, "pack"), (ChainSampler, "draw"), (DenseKV, "advance")])
def test_a_plugin_that_raises_in_a_step_fails_its_rows(monkeypatch, owner, method):
    it, (a, b) = two_rows()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lambda self, *args, **options: 1 / 0)
        error = it.engine.step([a])[0].error
    assert isinstance(error, BackendFault)
    assert "ZeroDivisionError" in str(error)
    assert said(it.engine, b) == b"world"


def test_a_trim_that_raises_fails_its_row_alone(monkeypatch):
    it, (a, b) = two_rows()
    for _ in range(4):
        it.engine.step([a, b])
    monkeypatch.setattr(DenseKV, "trim", lambda self, sequence_id, length: 1 / 0 if sequence_id == a else length)
    ended = it.engine.step([a, b])
    assert isinstance(ended[0].error, TrimError)
    assert ended[1].cause == "eos"


def test_shutdown_frees_the_device_whatever_a_plugin_raises(monkeypatch):
    it, _rows = two_rows()
    monkeypatch.setattr(DenseKV, "free", lambda self, sequence_id: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        it.engine.shutdown()
    assert it.backend.closed
    assert it.engine.open_sequences == ()
    it.engine.shutdown()


def test_a_mixed_step_may_be_interrupted_too(monkeypatch):
    """A piece that never ran may run again."""
    it = scripted(SCRIPTS)
    a, plan_a = opened(it.engine, "a")
    it.engine.prefill(a, plan_a)
    b, plan_b = opened(it.engine, "b")
    parts = [Decode(a), *pieces(b, plan_b)]
    with monkeypatch.context() as patch:
        interrupted_at(patch, ScriptedBackend, "read", 1)
        with pytest.raises(KeyboardInterrupt):
            turn(it.engine, *parts)
    assert [outcome.token for outcome in turn(it.engine, *parts)] == [ord("e"), ord("w")]
