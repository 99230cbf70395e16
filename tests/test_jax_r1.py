"""The JAX backend at level R1, on the CPU: fixed widths, so that no chunk, no number of places, no hit of the prompt
cache and no preemption changes a bit (docs/spec/engine.md chapter 3, V15, P3, P7, C2, C18)."""

import numpy as np
import pytest
from cache_rows import VOCAB, caching
from keeping_jax import KeepingJax
from layered_family import layered_checkpoint
from real_engine import assert_same_bits
from real_scheduler import said, served

CONTEXT, STEPS = 2048, 4
WIDTH = 512
IDS = np.random.default_rng(3).integers(0, VOCAB, 1300)
MODEL = layered_checkpoint("full", "window 100", vocab_size=VOCAB, context=CONTEXT)


def at_r1(**options):
    backend = KeepingJax(device="cpu", level="R1")
    return caching(MODEL, backend=backend, **{"context": CONTEXT, "chunk": WIDTH, **options})


def shapes_of(made):
    return made.real.backend._running.launching.shapes


@pytest.fixture(scope="module")
def cold():
    return at_r1().run(IDS, STEPS, allowed=False)


@pytest.mark.parametrize(
    ("chunk", "slots"), [(WIDTH, 1), pytest.param(2 * WIDTH, 4, marks=pytest.mark.slow), (4 * WIDTH, 40)]
)
def test_neither_chunk_nor_parallel_chooses_an_executable(cold, chunk, slots):
    """P3, C2: each piece is a multiple of the one width, and runs as so many forwards; so do rows that decode, whatever
    places there are."""
    made = at_r1(chunk=chunk, slots=slots)
    assert made.level == "R1"
    assert {(shape.rows, shape.width) for shape in shapes_of(made)} == {(made.engine.caps.r1_rows, 1), (1, WIDTH)}
    assert {span.width % WIDTH for span in made.plan(IDS).pieces} == {0}
    ran = made.run(IDS, STEPS, allowed=False)
    assert_same_bits(cold.logits, ran.logits)
    assert ran.ids == cold.ids


def test_more_rows_than_the_one_width_are_several_forwards():
    """C2: 34 rows in launches of 32 say what each says alone, those in the second launch too."""
    crowd, lone = at_r1(slots=40, chunk=4 * WIDTH).real, at_r1(slots=1).real
    prompts = [IDS[place : place + 1 + place % 3] for place in range(34)]
    rows = [crowd.open(prompt) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        crowd.engine.prefill(row, crowd.plan(prompt, WIDTH))
    for _ in range(2):
        assert len(crowd.engine.step(rows)) == 34
    for place in (0, 31, 32, 33):
        logits, ids = lone.alone(prompts[place], 2, WIDTH)
        found, drew = crowd.close(rows[place])
        assert_same_bits(logits, found)
        assert drew == ids


def test_a_hit_runs_the_very_pieces_of_a_miss(cold):
    """P7, V15: whole chunks of what was prefilled."""
    made = at_r1()
    for cached in (0, 1024):
        ran = made.run(IDS, STEPS)
        assert ran.cached == cached
        assert ran.plan.reproduces(cold.plan)
        assert_same_bits(cold.logits, ran.logits)
        assert ran.ids == cold.ids


def test_rows_that_are_preempted_say_what_they_say_alone():
    """C18: in a pool that holds two of three prompts, and not what they grow by."""
    room = CONTEXT - CONTEXT % 16
    prompts = [IDS[: room // 2 - less] for less in (10, 15, 20)]

    def scheduler(**options):
        backend = KeepingJax(device="cpu", level="R1")
        sizes = {"chunk": WIDTH, "context": CONTEXT, "slots": 3, **options}
        return served(checkpoint=MODEL, backend=backend, cache=False, busy=None, **sizes)

    alone, crowd = (scheduler(pages=CONTEXT // 16) for _ in range(2))
    replies = [crowd.ask(prompt, f"r{index}", max_tokens=40) for index, prompt in enumerate(prompts)]
    crowd.run()
    assert crowd.scheduler.stats().preemptions_total.total() > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        assert said(reply)[0] == alone.answer(prompt, max_tokens=40)
