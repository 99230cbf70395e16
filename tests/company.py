"""Batches drawn by hypothesis: who takes part in each step, in which place of it, and what each row must come to."""

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from real_engine import assert_same_bits

PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

LENGTHS = (1, 2, 5, 16, 17, 40)
CHUNKS = (1, 3, 7, 64)


def company(vocab, *, rows=9, lengths=LENGTHS, chunks=CHUNKS, turns=200):
    """Prompts, steps, chunks, and turns: who takes part in each step, in which place of it. The last turns are of all
    rows, so that each of them ends."""

    @st.composite
    def draw(pick):
        count = pick(st.integers(1, rows))
        seed = pick(st.integers(0, 2**32 - 1))
        rng = np.random.default_rng(seed)
        sizes = pick(st.lists(st.sampled_from(lengths), min_size=count, max_size=count))
        prompts = [rng.integers(0, vocab, size) for size in sizes]
        steps = pick(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        cut = pick(st.lists(st.sampled_from(chunks), min_size=count, max_size=count))
        order = []
        for _ in range(turns):
            joined = [index for index in range(count) if rng.random() < 0.7]
            order.append(list(rng.permutation(joined)))
        return prompts, steps, cut, [*order, *[list(range(count))] * (max(sizes) + 5)]

    return draw()


def check_company(real, case, alone=None):
    """Each row against itself alone, in one piece, by the engine `alone`, or `real` itself."""
    prompts, steps, chunks, turns = case
    crowd = real.together(prompts, steps, chunks, turns)
    assert len(crowd) == len(prompts), "every row ended"
    for index, prompt in enumerate(prompts):
        logits, output = (alone or real).alone(prompt, steps[index])
        assert_same_bits(logits, crowd[index][0], f"row {index} of {len(prompts)}")
        assert output == crowd[index][1]
