"""What a tick does, as a pure function of what there is to do (spec 7.1, C1 to C5)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import attrs


class Action(StrEnum):
    IDLE = "idle"
    PREFILL = "prefill"  # pieces alone
    DECODE = "decode"  # a decode of every row that can
    MIXED = "mixed"  # these, and pieces behind them


@attrs.frozen
class TickState:
    """d `decoding` rows, k `parked` prefills, c decode ticks `since_grant`, and I, the grant `interval`.

    `mixed`: decodes and pieces may share a step (spec C2).
    """

    decoding: int
    parked: int
    since_grant: int
    interval: int
    mixed: bool


@attrs.frozen
class Choice:
    """An action, and what `since_grant` becomes if it is taken."""

    action: Action
    since_grant: int = 0


def decide(state: TickState) -> tuple[Choice, ...]:
    """The actions to try, best first: one that proves impossible falls to the next (spec C3). The last is Idle."""
    prefill, idle = Choice(Action.PREFILL), Choice(Action.IDLE)
    if not state.decoding:
        return (prefill, idle) if state.parked else (idle,)
    if not state.parked:
        return (Choice(Action.DECODE), idle)
    decode = Choice(Action.DECODE, state.since_grant + 1)
    if state.mixed:
        return (Choice(Action.MIXED), Choice(Action.DECODE), prefill, idle)
    if state.since_grant >= state.interval:
        return (prefill, decode, idle)
    return (decode, prefill, idle)


def grant(lengths: Sequence[int], *, budget: int, flat: bool) -> int:
    """How many prefills of the ring get a piece this tick, from its head on: `lengths` are their next pieces' tokens.

    The first always does. `flat`: pieces of several rows may share a step, up to `budget` tokens (spec P11, C5).
    """
    if not lengths:
        return 0
    taken, tokens = 1, lengths[0]
    while flat and taken < len(lengths) and tokens + lengths[taken] <= budget:
        tokens += lengths[taken]
        taken += 1
    return taken
