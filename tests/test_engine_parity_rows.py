"""What `engine-parity` makes of streams: rows, their words, exit codes (docs/spec/clients.md 5.4, 5.5, 5.7)."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from parity_rows import row, stream

from mlxcel.core.plan import Decode, Piece, PrefillPlan, Span, StepReport, id_bytes
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.tools.parity.options import GROUPS, ParityOptions
from mlxcel.tools.parity.pairs import PAIRS, compare, exit_code, first_difference, letters
from mlxcel.tools.parity.report import how_it_ran, says
from mlxcel.tools.parity.stream import Failed, Missing, NotAvailable
from mlxcel.tools.parity.watch import Company, RowWatch

BOUND = 0.125  # a power of two: gaps are exact


def between(one: Any, other: Any, group: str = "client") -> Any:
    return compare(group, one, other, BOUND, case="greedy", left="l", right="r")


@pytest.mark.parametrize(
    ("left", "right", "step"),
    [
        ((), (), None),
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (9, 2, 3), 0),
        ((1, 2, 3), (1, 9, 8), 1),
        ((1, 2, 3), (1, 2), 2),
        ((1,), (1, 2, 3), 1),
        ((), (1,), 0),
    ],
)
def test_the_first_step_that_differs(left: tuple[int, ...], right: tuple[int, ...], step: int | None) -> None:
    """5.7: 2."""
    assert first_difference(left, right) == step


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (stream(65, 66), stream(65, 66), "identical (2 tokens)"),
        (
            stream(65, 66, gap=0.25),
            stream(65, 34, best=(((65, -1.0), (900, -1.25)), ((34, -1.0), (900, -1.5)))),
            'diverge@1 left=66 "B" gap=0.25 right=34 "\\"" gap=0.5',
        ),
        (stream(65, 66), stream(65, 66, gap=0.25), "identical (2 tokens, scores differ from step 0)"),
        (stream(65), stream(10), 'diverge@0 (first token) left=65 "A" gap=0.5 right=10 "\\n" gap=0.5'),
        (stream(65, 66), stream(65), 'diverge@1 left=66 "B" gap=0.5 right=<end>'),
        (stream(65), stream(65, 66), 'diverge@1 left=<end> right=66 "B" gap=0.5'),
        (
            stream(65, best=(((65, -1.0),),)),
            stream(66),
            'diverge@0 (first token) left=65 "A" gap=none right=66 "B" gap=0.5',
        ),
        (Failed("BackendFault: gone"), Missing(NotAvailable.STORAGE_REFUSED), "failed: BackendFault: gone"),
        (stream(65), Failed("gone"), "failed: gone"),
        *((stream(65), Missing(reason), f"n/a: {reason}") for reason in NotAvailable if reason != "no hit"),
        (stream(65), Missing(NotAvailable.NO_HIT, "granule_floor"), "n/a: no hit (granule_floor)"),
        (stream(65, missing=Missing(NotAvailable.NO_PAGED_LAUNCH)), stream(65), "n/a: no paged launch"),
    ],
)
def test_what_a_row_says(one: Any, other: Any, words: str) -> None:
    """5.7: 1."""
    assert says(between(one, other), ByteTokenizer()) == words


def test_words_of_what_is_not_available_are_those_of_the_specification() -> None:
    """5.4."""
    assert {str(reason) for reason in NotAvailable} == {
        *("storage refused", "no paged launch", "family has no reusable prefix", "no hit", "backend unavailable"),
        "batch 1 only",
    }


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ({}, {}, "near-tie"),
        ({"gap": BOUND}, {"gap": BOUND}, "near-tie"),
        ({"gap": BOUND * 1.01}, {}, "diverge"),
        ({}, {"gap": BOUND * 1.01}, "diverge"),
        ({"second": 70}, {}, "diverge"),  # the right side's token is none of the left's two best
        ({}, {"second": 70}, "diverge"),
    ],
)
def test_the_rule_of_the_two_best(left: dict[str, Any], right: dict[str, Any], result: str) -> None:
    """5.4, 5.7: 2: a swapped pair within the bound, on both sides, and between backends alone."""
    one = stream(65, 66, **{"gap": 0.01, "second": 67, **left})
    other = stream(65, 67, **{"gap": 0.02, "second": 66, **right})
    assert between(one, other, "backend").result == result
    assert between(one, other).result == "diverge"


def test_a_lone_candidate_and_the_end_of_a_stream_are_no_near_tie() -> None:
    alone = stream(65, best=(((65, -1.0),),))
    assert between(alone, stream(66, gap=0.0, second=65), "backend").result == "diverge"
    assert between(stream(65, 66), stream(65), "backend").result == "diverge"


def test_a_near_tie_says_how_far_the_backends_are_apart() -> None:
    """5.4: scores are of the left stream, by both."""
    one = stream(65, gap=0.01, second=66, scores=(-0.5, -2.0, -1.0))
    other = stream(66, gap=0.02, second=65, scores=(-0.5, -5.0, -1.25))
    found = between(one, other, "backend")
    assert found.max_logprob_diff == 3
    words = 'near-tie@0 (first token) left=65 "A" gap=0.01 right=66 "B" gap=0.02'
    assert says(found, ByteTokenizer()) == f"{words} largest difference of log-probabilities 3"
    assert between(one, attrs.evolve(other, scores=()), "backend").max_logprob_diff is None


@pytest.mark.parametrize(
    ("results", "options", "code"),
    [
        (["identical"], {}, 0),
        (["diverge", "identical"], {}, 0),  # recorded
        (["diverge", "identical"], {"expect_identical": True}, 1),
        (["near-tie", "n/a"], {"expect_identical": True}, 0),
        (["n/a", "n/a"], {}, 3),
        (["n/a", "identical"], {"require": ("storage",)}, 3),  # no row of it at all
        (["n/a", "identical"], {"require": ("client",)}, 3),
        (["identical"], {"require": ("client",)}, 0),
        (["failed", "diverge"], {"expect_identical": True}, 3),
        (["n/a", "diverge"], {"expect_identical": True, "require": ("client",)}, 3),
    ],
)
def test_exit_codes(results: list[str], options: dict[str, Any], code: int) -> None:
    """5.5."""
    rows = [row(result) for result in results]
    assert exit_code(rows, **{"require": (), "expect_identical": False, **options}) == code


def test_arms_are_those_that_the_groups_need() -> None:
    """5.2."""
    assert tuple(PAIRS) == GROUPS
    assert letters(GROUPS) == ("a", "b", "c", "d", "e", "f", "g", "h", "x")
    assert letters(["cache"]) == ("d", "e", "f")


def test_options_that_contradict_each_other() -> None:
    from mlxcel.errors import UsageError

    with pytest.raises(UsageError, match="--chunks 64,64: both are the same"):
        ParityOptions(chunks=(64, 64))
    with pytest.raises(UsageError, match="--require chunk: --pairs leaves it out"):
        ParityOptions(groups=("client",), require=("chunk",))


def plan_of(ids: np.ndarray, start: int, *ends: int) -> PrefillPlan:
    edges = (start, *ends)
    spans = tuple(Span(low, high, high - low + 1) for low, high in zip(edges, ends, strict=False))
    return PrefillPlan(id_bytes(ids), start, spans, "R2")


def test_a_row_is_followed_through_its_steps() -> None:
    """5.4: what ran, with whom, by which route; steps without the row are not counted."""
    ids, others = np.arange(8, dtype=np.int32), np.arange(4, dtype=np.int32)
    mine, theirs = plan_of(ids, 2, 5, 8), plan_of(others, 0, 4)
    watch = RowWatch()
    watch.follow(ids)

    def step(*parts: Any, **routes: int) -> None:
        watch.step_finished(StepReport(1, parts, (), 0, routes))

    step(Piece(7, theirs, 0), route=100)
    step(Decode(7), route=100)
    step(Decode(7), Piece(9, mine, 0), paged_gather=2)
    step(Piece(9, mine, 1), paged_gather=1)
    step(Decode(7), route=100)
    step(Decode(7), Decode(8), Decode(9), paged_kernel=3)
    step(Decode(9), paged_kernel=3)
    assert watch.pieces == [(2, 5, 1), (5, 8, 1)]
    assert watch.adopted == (0, 2)
    assert watch.launches == {
        "mixed": {"paged_gather": 2},
        "prefill": {"paged_gather": 1},
        "decode": {"paged_kernel": 6},
    }
    assert watch.company == Company(1, 1, 3)
    assert watch.plan == mine
    watch.follow(ids)
    step(Decode(9), paged_kernel=3)  # a step that was still under way
    assert (watch.pieces, watch.launches, watch.company) == ([], {}, Company())


def test_how_a_stream_ran_in_words() -> None:
    """5.4: padding, adopted positions, routes by phase, and pages without a launch over them."""
    ran = stream(
        65,
        adopted=(0, 8),
        pieces=((8, 12, 4), (12, 14, 0)),
        kv_storage="paged",
        launches={"prefill": {"dense_kernel": 2}, "decode": {"script": 3, "ring_kernel": 1}},
        company=Company(1, 2, 4),
    )
    assert how_it_ran(ran) == (
        "adopted 0-8, pieces 8-12+4 12-14; paged storage, no paged launch; "
        "prefill dense_kernel 2; decode ring_kernel 1, script 3; steps of 2 to 4 rows, as row 1 or later"
    )
    paged = attrs.evolve(ran, launches={"decode": {"ref_paged_gather": 3}})
    assert "no paged launch" not in how_it_ran(paged)
    assert paged.paged_launches == 3
