"""The pure part of a tick: what is done next (spec 7.1, C1 to C5, P11)."""

import numpy as np
import pytest

from mlxcel.core.tick import Action, Choice, TickState, decide, grant

IDLE, PREFILL, DECODE, MIXED = Action.IDLE, Action.PREFILL, Action.DECODE, Action.MIXED

TABLE = [
    # d, k, mixed, c, I -> the action and what c becomes, and what follows where it proves impossible
    ((0, 0, False, 3, 16), [(IDLE, 0)]),
    ((0, 0, True, 3, 16), [(IDLE, 0)]),
    ((0, 2, False, 3, 16), [(PREFILL, 0), (IDLE, 0)]),
    ((0, 2, True, 3, 16), [(PREFILL, 0), (IDLE, 0)]),
    ((5, 0, False, 3, 16), [(DECODE, 0), (IDLE, 0)]),
    ((5, 0, True, 3, 16), [(DECODE, 0), (IDLE, 0)]),
    ((5, 2, True, 3, 16), [(MIXED, 0), (DECODE, 0), (PREFILL, 0), (IDLE, 0)]),
    ((5, 2, False, 16, 16), [(PREFILL, 0), (DECODE, 17), (IDLE, 0)]),
    ((5, 2, False, 17, 16), [(PREFILL, 0), (DECODE, 18), (IDLE, 0)]),
    ((5, 2, False, 15, 16), [(DECODE, 16), (PREFILL, 0), (IDLE, 0)]),
    ((1, 1, False, 0, 1), [(DECODE, 1), (PREFILL, 0), (IDLE, 0)]),
    ((1, 1, False, 1, 1), [(PREFILL, 0), (DECODE, 2), (IDLE, 0)]),
]


@pytest.mark.parametrize(("state", "expected"), TABLE)
def test_every_row_of_the_table(state, expected):
    """Spec 7.1, and C3 for what follows."""
    decoding, parked, mixed, since, interval = state
    given = TickState(decoding=decoding, parked=parked, mixed=mixed, since_grant=since, interval=interval)
    assert decide(given) == tuple(Choice(action, since) for action, since in expected)


def test_ten_thousand_random_states():
    """C3: every action that is possible is tried before Idle, none that is not is, and each once."""
    rng = np.random.default_rng(7)
    for _ in range(10_000):
        decoding, parked = (int(n) for n in rng.integers(0, 4, 2) * rng.integers(0, 300, 2))
        interval = int(rng.integers(1, 4097))
        state = TickState(
            decoding=decoding,
            parked=parked,
            since_grant=int(rng.integers(0, 2 * interval)),
            interval=interval,
            mixed=bool(rng.integers(2)),
        )
        actions = [choice.action for choice in decide(state)]
        possible = {DECODE} if decoding else set()
        possible |= {PREFILL} if parked else set()
        possible |= {MIXED} if decoding and parked and state.mixed else set()
        assert actions[-1] is IDLE
        assert set(actions[:-1]) == possible
        assert len(set(actions)) == len(actions)


def test_a_parked_prompt_waits_for_no_more_than_the_interval():
    """C1, C4: decode ticks between two grants are I, whatever c was at first."""
    for interval in (1, 2, 16):
        since, run, gaps = 3, 0, []
        for _ in range(200):
            choice = decide(TickState(decoding=4, parked=1, since_grant=since, interval=interval, mixed=False))[0]
            since = choice.since_grant
            if choice.action is PREFILL:
                gaps.append(run)
                run = 0
            else:
                run += 1
        assert set(gaps[1:]) == {interval}


def test_grants_fill_the_budget_and_the_first_is_always_taken():
    """C5, P11."""
    assert grant([], budget=10, flat=True) == 0
    assert grant([99], budget=10, flat=True) == 1
    assert grant([99, 1], budget=10, flat=True) == 1
    assert grant([4, 4, 4], budget=10, flat=True) == 2
    assert grant([4, 6, 1], budget=10, flat=True) == 2
    assert grant([4, 7, 1], budget=10, flat=True) == 1, "nobody is passed for being smaller"
    assert grant([4, 4, 4], budget=10, flat=False) == 1
