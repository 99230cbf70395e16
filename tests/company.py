"""Batches drawn by hypothesis: who takes part in each step, in which place of it, and what each row must come to."""

import attrs
import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from real_engine import assert_same_bits

PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}

LENGTHS = (1, 2, 5, 16, 17, 40)
CHUNKS = (1, 3, 7, 64)


@attrs.frozen
class Company:
    """Rows by their lengths, with the steps behind the first token of each, the chunk of its pieces, and a seed that
    the prompts and turns follow from: a failing case is a line, not a page."""

    vocab: int
    seed: int
    lengths: list[int]
    steps: list[int]
    chunks: list[int]

    @property
    def prompts(self):
        rng = np.random.default_rng([self.seed, 0])
        return [rng.integers(0, self.vocab, length) for length in self.lengths]

    @property
    def turns(self):
        """For each step the rows that take part, in their places. All rows come in the last ones, so that each ends."""
        rng = np.random.default_rng([self.seed, 1])
        count, longest = len(self.lengths), max(self.lengths) + max(self.steps) + 1
        for _ in range(2 * longest):
            joined = np.flatnonzero(rng.random(count) < 0.7)
            yield rng.permutation(joined).tolist()
        yield from [list(range(count))] * longest


def company(vocab, *, rows=9, lengths=LENGTHS, chunks=CHUNKS):
    """One to `rows` rows: batch sizes, shuffled places, pieces, joining and leaving at any step."""

    @st.composite
    def draw(pick):
        count = pick(st.integers(1, rows))

        def each(values):
            return pick(st.lists(values, min_size=count, max_size=count))

        seed = pick(st.integers(0, 2**32 - 1))
        return Company(
            vocab, seed, each(st.sampled_from(lengths)), each(st.integers(0, 4)), each(st.sampled_from(chunks))
        )

    return draw()


def check_company(real, case, alone=None):
    """Each row against itself alone, in one piece, by the engine `alone`, or `real` itself."""
    prompts = case.prompts
    crowd = real.together(prompts, case.steps, case.chunks, case.turns)
    assert len(crowd) == len(prompts), "every row ended"
    for index, prompt in enumerate(prompts):
        logits, output = (alone or real).alone(prompt, case.steps[index])
        assert_same_bits(logits, crowd[index][0], f"row {index} of {len(prompts)}")
        assert output == crowd[index][1]
