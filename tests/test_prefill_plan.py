"""Chapter 3 of docs/spec/engine.md: how prompts are cut."""

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.core.backend import BackendCaps
from mlxcel.core.plan import PrefillPlan, Span
from mlxcel.errors import UsageError
from mlxcel.plugins.prefill.chunked import ChunkedPlanner


def planner(chunk, level="R2", **caps):
    base = BackendCaps(
        level=level, platform="cpu", device="x", dtype="float32", page_sizes=(16,), run_ahead=True, mixed_steps=True
    )
    return ChunkedPlanner(chunk=chunk, level=level, caps=attrs.evolve(base, **caps))


def intervals(plan):
    return [(span.start, span.end) for span in plan.pieces]


def ids(count):
    return np.arange(count, dtype=np.int32)


@pytest.mark.parametrize(
    ("level", "prompt", "adopted", "expected"),
    [
        ("R2", 5000, 0, [(0, 2048), (2048, 4096), (4096, 5000)]),
        ("R1", 5000, 2500, [(2048, 4096), (4096, 5000)]),
        ("R2", 5000, 2500, [(2500, 4096), (4096, 5000)]),
        ("R2", 64, 64, [(63, 64)]),
        ("R1", 64, 64, [(0, 64)]),
        ("R1", 4096, 4096, [(2048, 4096)]),
    ],
)
def test_the_examples_of_the_specification(level, prompt, adopted, expected):
    assert intervals(planner(2048, level).build(ids(prompt), adopted)) == expected


@given(
    total=st.integers(1, 400),
    adopted=st.integers(0, 450),
    chunk=st.integers(1, 130),
    level=st.sampled_from(["R0", "R1", "R2"]),
    boundary=st.none() | st.integers(0, 420),
)
def test_pieces_tile_what_is_not_adopted(total, adopted, chunk, level, boundary):
    """Spec 3.1, P1, P2: tiles, absolute cuts, a terminal piece that is never empty, equal inputs give equal plans."""
    make = planner(chunk, level)
    plan = make.build(ids(total), adopted, boundary=boundary)
    spans = plan.pieces
    assert plan == make.build(ids(total), adopted, boundary=boundary)
    assert hash(plan) == hash(make.build(ids(total), adopted, boundary=boundary))
    assert plan.start <= min(adopted, total - 1)
    assert spans[0].start == plan.start
    assert spans[-1].end == total
    assert all(before.end == after.start for before, after in itertools.pairwise(spans))
    assert all(0 < span.length <= chunk for span in spans)
    assert all(span.end % chunk == 0 or span.end == boundary for span in spans[:-1])
    if boundary is not None and plan.start < boundary < total:
        assert boundary in [span.end for span in spans]
        assert plan.ends_at_boundary([span.end for span in spans].index(boundary))
    if level == "R1":
        cold = make.build(ids(total), boundary=boundary)
        assert spans == cold.pieces[len(cold.pieces) - len(spans) :]
        assert plan.reproduces(cold)
    for position in range(plan.start, total):
        span = spans[plan.piece_at(position)]
        assert span.start <= position < span.end
        assert plan.tokens_left(position) == total - position
    for outside in (plan.start - 1, total):
        with pytest.raises(IndexError):
            plan.piece_at(outside)


def test_token_ids_of_the_pieces_are_the_prompt():
    prompt = np.array([7, 5, 3, 2**31 - 1, 0], np.int32)
    plan = planner(2).build(prompt)
    assert np.concatenate([plan.token_ids(i) for i in range(len(plan.pieces))]).tolist() == prompt.tolist()
    assert [plan.is_terminal(i) for i in range(3)] == [False, False, True]


def test_widths_follow_the_level():
    """Spec P3: one width at R1 whatever the chunk, the smallest that holds it at R0, none at R2."""
    assert [s.width for s in planner(100, "R0", prefill_widths=(16, 64, 128)).build(ids(110)).pieces] == [128, 16]
    assert [s.width for s in planner(100, "R1", r1_tokens=256).build(ids(110)).pieces] == [256, 256]
    assert [s.width for s in planner(100, "R2", prefill_widths=(16, 64, 128)).build(ids(110)).pieces] == [100, 10]
    assert planner(100, "R0", prefill_widths=(16,)).build(ids(10)).trim_after(0) == 6


BASE = PrefillPlan(ids=b"\0" * 40, start=4, pieces=(Span(4, 8, 4), Span(8, 10, 4)), level="R1")
COLD = PrefillPlan(ids=b"\0" * 40, start=0, pieces=(Span(0, 4, 4), Span(4, 8, 4), Span(8, 10, 4)), level="R1")


@pytest.mark.parametrize(
    ("change", "level", "expected"),
    [
        ({}, "R1", True),
        ({"start": 3}, "R1", False),
        ({"pieces": (Span(4, 10, 8),)}, "R1", False),
        ({"pieces": (Span(4, 8, 4), Span(8, 10, 8))}, "R1", False),
        ({"pieces": (Span(4, 7, 4), Span(7, 10, 4))}, "R1", False),
        ({"adopted_prefilled": False}, "R1", False),
        ({"adopted_prefilled": False, "start": 3}, "R2", True),
        ({"ids": b"\1" * 40}, "R2", False),
    ],
)
def test_reproduces_needs_every_conjunct(change, level, expected):
    """Spec P7: below R2 each conjunct, broken alone, turns it false."""
    hit = attrs.evolve(BASE, level=level, **change)
    assert hit.reproduces(attrs.evolve(COLD, level=level)) is expected


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_below_one_is_refused(chunk):
    with pytest.raises(UsageError, match="1 token or more"):
        planner(chunk)
