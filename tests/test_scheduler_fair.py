"""Long prompts among short ones: who waits for whom, on the clock that steps advance (spec C4, C5, P10)."""

import itertools

import pytest
from scheduler_rows import bench, seen

from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.errors import UsageError

INTERVAL, DELAY = 4, 1.0
SEPARATE = {"level": "R0", "mixed_steps": False, "delay": DELAY}


def test_one_long_and_ten_short_prompts_keep_the_bound():
    """C4: a prompt of n pieces among k parked has its first token within n * k * (I * t_decode + t_piece), and decoding
    rows go on meanwhile."""
    it = bench(chunk=2, slots=12, context=512, options={"grant_interval": INTERVAL, "max_queue_depth": 64}, **SEPARATE)
    decoding = it.ask("d", b"d", max_tokens=390)
    it.scheduler.tick()
    long = it.ask("long", b"l" * 200, max_tokens=1)
    short = [it.ask(f"s{i}", b"ss", max_tokens=1) for i in range(10)]
    it.run()
    for pieces, reply in ((100, long), *((1, reply) for reply in short)):
        times = seen(reply)[0].result.timings
        assert times.first_token - times.started <= pieces * 11 * (INTERVAL * DELAY + DELAY)
    ids = seen(decoding)[0]
    assert len(ids.ids) == 390
    steps = it.scheduler.stats().steps_total
    assert steps["decode"] + steps["prefill"] == it.it.backend.steps
    mean = (ids.result.timings.last_token - ids.result.timings.first_token) / 389
    assert mean <= DELAY + DELAY / INTERVAL + 1e-9


def test_parked_prompts_are_served_in_turn():
    """C5: one piece each, in admission order; a short prompt behind a long one does not wait for it."""
    pieces = []

    class Watch:
        def step_finished(self, report):
            pieces.extend(part.sequence_id for part in report.parts if hasattr(part, "plan"))

        def request_finished(self, result):
            pass

    it = bench(chunk=4, observers=(Watch(),), **SEPARATE)
    for name, length in (("a", 20), ("b", 8), ("c", 12)):
        it.ask(name, b"x" * length, max_tokens=1)
    it.run()
    assert pieces == [1, 2, 3, 1, 2, 3, 1, 3, 1, 1]


def test_a_flat_step_walks_the_ring_until_its_budget_is_full():
    """P11, C5."""
    steps = []

    class Watch:
        def step_finished(self, report):
            steps.append([part.sequence_id for part in report.parts if hasattr(part, "plan")])

        def request_finished(self, result):
            pass

    it = bench(chunk=4, observers=(Watch(),), options={"max_prefill_tokens": 9})
    for name in "abc":
        it.ask(name, b"x" * 12, max_tokens=1)
    it.run()
    assert steps[:4] == [[1, 2], [3, 1], [2, 3], [1, 2]]


@pytest.mark.parametrize("level", ["R2", "R0"])
def test_the_chunk_follows_the_load_and_changes_no_reply(level):
    """P10: short pieces while rows decode, whole ones when they do not; the pieces reported are the pieces executed."""
    adaptive = {"adaptive": True, "grant_interval": 1} if level == "R0" else {}
    it = bench(chunk=64, busy=16, level=level, context=512, options=adaptive)
    quiet = it.ask("quiet", b"q" * 200, max_tokens=8)
    it.run()
    pieces = [(span.start, span.end) for span in seen(quiet)[0].result.pieces]
    assert pieces == [(0, 64), (64, 128), (128, 192), (192, 200)]
    busy = it.ask("busy", max_tokens=9)
    it.scheduler.tick()
    loaded = it.ask("loaded", b"q" * 200, max_tokens=8)
    it.run()
    one = seen(loaded)[0]
    spans = [(span.start, span.end) for span in one.result.pieces]
    assert spans[0] == (0, 16)
    assert (128, 192) in spans, "once nothing decodes it runs whole chunks again, from where it is"
    assert all(end % 16 == 0 for _, end in spans[:-1])
    assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    assert one.text == "loaded-l"
    assert len(seen(busy)[0].ids) == 9


def settings(level, mixed_steps=True, **options):
    caps = bench(level=level, mixed_steps=mixed_steps).it.engine.caps
    return SchedulerSettings.resolve(caps, level, chunk=2048, **options)


def test_levels_decide_what_nobody_says():
    """P10, P11, C2."""
    assert (settings("R2").chunk_busy, settings("R2").mixed, settings("R2").flat) == (512, True, True)
    assert (settings("R0").chunk_busy, settings("R0").mixed, settings("R0").flat) == (None, False, True)
    assert (settings("R1").chunk_busy, settings("R1").mixed, settings("R1").flat) == (None, False, False)
    assert settings("R2", chunk_busy=9999).chunk_busy == 2048
    assert (settings("R2", adaptive=False).chunk_busy, settings("R2", mixed=False).mixed) == (None, False)
    assert (settings("R0", adaptive=True).chunk_busy, settings("R0", mixed=True).mixed) == (512, True)


def test_what_a_level_cannot_do_is_refused():
    """P10, C2, E0e: an explicit option is obeyed or refused."""
    for options in ({"adaptive": True}, {"mixed": True}):
        with pytest.raises(UsageError, match="R1"):
            settings("R1", **options)
    with pytest.raises(UsageError, match="--mixed-step"):
        settings("R0", mixed_steps=False, mixed=True)
    settings("R1", adaptive=False, mixed=False)
