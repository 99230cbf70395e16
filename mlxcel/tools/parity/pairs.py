"""Which arms are compared with which, and what the comparison says (docs/spec/clients.md 5.2, 5.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from mlxcel.tools.parity.options import GROUPS
from mlxcel.tools.parity.stream import Failed, Found, Missing, Stream

PAIRS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "client": (("a", "b"),),
    "storage": (("b", "c"), ("a", "c")),
    "cache": (("f", "d"), ("d", "e")),
    "chunk": (("f", "g"),),
    "batch": (("b", "h"),),
    "backend": (("a", "x"),),
}
"""Arms by their letters, in the order of the rows."""

Result = Literal["identical", "diverge", "near-tie", "n/a", "failed"]


@attrs.frozen
class Row:
    """A case and a pair. Tokens are None behind the end of the shorter stream, gaps where there is no step to have one;
    `step` is the first that differs. `scores_step` is the first before it whose candidates have other scores, though
    the tokens are the same: the bits are not. `reason` says why there is nothing to compare."""

    case: str
    group: str
    left: str
    right: str
    result: Result
    length: int = 0  # tokens of streams that are identical
    step: int | None = None
    left_token: int | None = None
    right_token: int | None = None
    left_gap: float | None = None
    right_gap: float | None = None
    max_logprob_diff: float | None = None
    scores_step: int | None = None
    reason: str | None = None


def letters(groups: Iterable[str]) -> tuple[str, ...]:
    """Arms that these groups need, in the order they run."""
    return tuple(sorted({letter for group in groups for pair in PAIRS[group] for letter in pair}))


def rows(
    cases: Iterable[str],
    groups: Iterable[str],
    names: Mapping[str, str],
    found: Mapping[tuple[str, str], Found],
    bound: float,
) -> list[Row]:
    """All rows, by case, group and pair. `found` is by case and letter, `names` are those of the arms, `bound` is that
    of the gaps of a near tie."""
    wanted = [group for group in GROUPS if group in set(groups)]
    return [
        compare(group, found[case, left], found[case, right], bound, case=case, left=names[left], right=names[right])
        for case in cases
        for group in wanted
        for left, right in PAIRS[group]
    ]


def compare(group: str, one: Found, other: Found, bound: float, *, case: str, left: str, right: str) -> Row:
    """Only backends may differ by a near tie."""
    row = Row(case, group, left, right, "identical")
    sides = (one, other)
    if failed := [side for side in sides if isinstance(side, Failed)]:
        return attrs.evolve(row, result="failed", reason=failed[0].message)
    why = [side.missing if isinstance(side, Stream) else side for side in sides]
    if missing := [each for each in why if isinstance(each, Missing)]:
        return attrs.evolve(row, result="n/a", reason=str(missing[0]))
    first, second = (side for side in sides if isinstance(side, Stream))
    return _compared(row, first, second, bound)


def _compared(row: Row, one: Stream, other: Stream, bound: float) -> Row:
    backends = row.group == "backend"
    step = first_difference(one.token_ids, other.token_ids)
    if backends:
        row = attrs.evolve(row, max_logprob_diff=largest_difference(one, other))
    else:
        row = attrs.evolve(row, scores_step=first_difference(one.best[:step], other.best[:step]))
    if step is None:
        return attrs.evolve(row, length=len(one.token_ids))
    return attrs.evolve(
        row,
        result="near-tie" if backends and is_near_tie(one, other, step, bound) else "diverge",
        step=step,
        left_token=_token(one, step),
        right_token=_token(other, step),
        left_gap=_gap(one, step),
        right_gap=_gap(other, step),
    )


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int | None:
    """The first step at which two streams differ, in what they have there or in having it; None where they are
    equal."""
    if left == right:
        return None
    pairs = zip(left, right, strict=False)
    return next((step for step, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def is_near_tie(left: Stream, right: Stream, step: int, bound: float) -> bool:
    """Whether each side's token is among the other's two best at this step, and both gaps are at most `bound`."""
    one, other = _token(left, step), _token(right, step)
    if one is None or other is None:
        return False
    among = one in dict(right.best[step][:2]) and other in dict(left.best[step][:2])
    return among and left.gap(step) <= bound and right.gap(step) <= bound


def largest_difference(left: Stream, right: Stream) -> float | None:
    """Of what both say of the same tokens; None where one was not asked."""
    if not left.scores or len(left.scores) != len(right.scores):
        return None
    return max(abs(one - other) if one != other else 0.0 for one, other in zip(left.scores, right.scores, strict=True))


def exit_code(rows: Iterable[Row], *, require: Iterable[str], expect_identical: bool) -> int:
    """Of docs/spec/clients.md 5.5: 3 for an arm that failed, rows none of which compares anything, or a group that is
    required and does not; 1 for a divergence where identity is expected."""
    rows, needed = list(rows), set(require)
    if any(row.result == "failed" for row in rows) or all(row.result == "n/a" for row in rows):
        return 3
    compared = {row.group for row in rows if row.result != "n/a"}
    if needed - compared or any(row.result == "n/a" and row.group in needed for row in rows):
        return 3
    return 1 if expect_identical and any(row.result == "diverge" for row in rows) else 0


def _token(stream: Stream, step: int) -> int | None:
    return stream.token_ids[step] if step < len(stream.token_ids) else None


def _gap(stream: Stream, step: int) -> float | None:
    if step >= len(stream.best):
        return None
    gap = stream.gap(step)
    return None if math.isinf(gap) else gap
