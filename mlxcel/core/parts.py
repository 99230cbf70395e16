"""Which parts a step may hold: everything is refused here, before any forward (spec 1.2)."""

from __future__ import annotations

from collections.abc import Sequence as Listing

from mlxcel.core.backend import BackendCaps
from mlxcel.core.kv import KVSpec
from mlxcel.core.plan import Part, Piece, PrefillPlan, Scoring, id_bytes
from mlxcel.core.sequence import Sequence, SequenceState
from mlxcel.errors import BatchShapeError

_STARTABLE = (SequenceState.OPEN, SequenceState.PREFILLING, SequenceState.PREEMPTED)


def part_length(part: Part) -> int:
    """Tokens that a part feeds."""
    return part.plan.pieces[part.index].length if isinstance(part, Piece) else 1


def scoring(part: Part) -> Scoring | None:
    """What a part scores. Such a part is alone in its step."""
    return part.plan.scoring_of(part.index) if isinstance(part, Piece) else None


def check_parts(
    rows: Listing[Sequence], parts: Listing[Part], *, mixed: bool, level: str, longest: int | None = None
) -> tuple[bool, ...]:
    """Which parts draw (spec E22): a decode of its row's newest token, the terminal piece of a drawing plan.
    BatchShapeError unless these parts make a step. Without `mixed` a piece must be alone in its
    step; with `longest` it has no more tokens than that."""
    if not parts:
        raise BatchShapeError("a step needs at least one part")
    if len({row.id for row in rows}) != len(rows):
        twice = sorted({row.id for row in rows if sum(other is row for other in rows) > 1})
        raise BatchShapeError(f"sequences {twice} have two parts in one step", hint="give each row one part a step")
    pieces = sum(isinstance(part, Piece) for part in parts)
    if pieces and len(parts) > 1 and not mixed:
        raise BatchShapeError(f"at level {level} a piece runs in a step of its own, here are {len(parts)} parts")
    drawing = []
    for row, part in zip(rows, parts, strict=True):
        if isinstance(part, Piece):
            drawing.append(_check_piece(row, part))
            if part.plan.scoring is not None:
                _check_scoring(row, part.plan, len(parts))
            if longest is not None and part_length(part) > longest:
                raise BatchShapeError(
                    f"sequence {row.id}: a piece of {part_length(part)} tokens, and this model's window of positions "
                    f"was made for {longest}",
                    hint="plan with the chunk of the engine",
                )
        else:
            drawing.append(_check_decode(row))
    return tuple(drawing)


def can_run(row: Sequence, steps: int) -> bool:
    """Whether `steps` decodes of a row may be submitted before any of them is read (spec C54): its sampling allows it,
    each of them draws, and its budget, which the context bounds, pays for all (spec E13)."""
    coming = len(row.output) + row.drawing
    newest = row.prompt_length + coming - 1
    return row.runs and not row.ended and row.stored + row.fed == newest and 0 < coming <= row.max_new - steps


def longest_run(rows: Listing[Sequence], caps: BackendCaps, spec: KVSpec) -> int:
    """How many decodes of these rows may be submitted together now (spec C54): what the backend's `decode_runs` say of
    so many, or 1."""
    longest = caps.run_steps(len(rows))
    if longest == 1 or spec.windowed or spec.recurrent:
        return 1
    return longest if all(can_run(row, longest) for row in rows) else 1


def _check_piece(row: Sequence, part: Piece) -> bool:
    plan, at = part.plan, row.stored + row.fed
    if row.state not in _STARTABLE:
        raise BatchShapeError(f"sequence {row.id} is {row.state.value} and takes no piece")
    if not 0 <= part.index < len(plan.pieces):
        raise BatchShapeError(
            f"sequence {row.id}: the plan has {len(plan.pieces)} pieces, none with index {part.index}"
        )
    span = plan.pieces[part.index]
    if span.start != at:
        raise BatchShapeError(f"sequence {row.id}: piece {part.index} starts at {span.start}, the row is at {at}")
    if span.length < 1 or span.end > plan.length or (plan.is_terminal(part.index) and span.end != plan.length):
        raise BatchShapeError(
            f"sequence {row.id}: piece {part.index} is [{span.start}, {span.end}) of a plan for {plan.length} tokens",
            hint="pieces must tile the plan; the prefill planner made this one",
        )
    if plan.length > row.length or id_bytes(row.tokens(0, plan.length)) != plan.ids:
        raise BatchShapeError(f"sequence {row.id}: the plan was built for other token ids")
    if not (plan.draw and plan.is_terminal(part.index)):
        return False
    if plan.length != row.length:
        raise BatchShapeError(f"sequence {row.id}: a plan that draws must end with the row's newest token")
    _check_budget(row)
    return True


def _check_scoring(row: Sequence, plan: PrefillPlan, parts: int) -> None:
    if parts > 1:
        raise BatchShapeError(
            f"sequence {row.id}: a piece that scores runs in a step of its own, here are {parts} parts"
        )
    if plan.draw or plan.length >= row.length:
        raise BatchShapeError(
            f"sequence {row.id}: a plan that scores draws nothing, and has a token of the row behind each of its own",
            hint="Engine.score makes such a plan",
        )


def _check_decode(row: Sequence) -> bool:
    at = row.stored + row.fed
    newest = row.prompt_length + len(row.output) - 1 + row.drawing  # those still being drawn included
    if row.ended:
        raise BatchShapeError(f"sequence {row.id} is {row.state.value} and takes no step")
    if at < row.prompt_length:
        missing = row.prompt_length - at
        raise BatchShapeError(f"sequence {row.id}: {missing} prompt tokens are not computed", hint="prefill it first")
    if at > newest:
        raise BatchShapeError(f"sequence {row.id} has no token at position {at} to feed")
    if at < newest:
        return False
    _check_budget(row)
    return True


def _check_budget(row: Sequence) -> None:
    """No forward runs after the token that spends the budget or fills the context (spec E13)."""
    coming = len(row.output) + row.drawing
    if coming >= row.max_new:
        raise BatchShapeError(f"sequence {row.id}: its budget of {row.max_new} tokens is spent or in flight")
    if row.prompt_length + coming >= row.context:
        raise BatchShapeError(f"sequence {row.id}: its context of {row.context} positions is full")
