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


@pytest.fixture(scope="module")
def cold():
    return at_r1().run(IDS, STEPS, allowed=False)


@pytest.mark.parametrize(("chunk", "slots"), [(WIDTH, 12), (2 * WIDTH, 4), (4 * WIDTH, 4)])
def test_neither_chunk_nor_parallel_chooses_an_executable(cold, chunk, slots):
    """P3: each piece is a multiple of the one width, and runs as so many forwards."""
    made = at_r1(chunk=chunk, slots=slots)
    assert made.level == "R1"
    assert {span.width % WIDTH for span in made.plan(IDS).pieces} == {0}
    ran = made.run(IDS, STEPS, allowed=False)
    assert_same_bits(cold.logits, ran.logits)
    assert ran.ids == cold.ids


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

    alone, crowd = scheduler(), scheduler(pages=CONTEXT // 16)
    replies = [crowd.ask(prompt, f"r{index}", max_tokens=40) for index, prompt in enumerate(prompts)]
    crowd.run()
    assert crowd.scheduler.stats().preemptions_total.total() > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        assert said(reply)[0] == alone.answer(prompt, max_tokens=40)
