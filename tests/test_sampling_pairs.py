"""For every pair of feature sets, a row beside the other is the row alone, in bits (docs/spec/engine.md S3, S47)."""

import itertools

import numpy as np
import pytest
from sampling_rows import FEATURE_SETS, Words, draw_states, flat_logits, params, spec, told

from mlxcel.plugins.sampling.chain import ChainSampler

STEPS = 10

VOCAB, NAMED = 317, 300

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

ALL_LOGITS = flat_logits(STEPS * len(FEATURE_SETS), VOCAB, 6)
LOGITS = {name: ALL_LOGITS[place :: len(FEATURE_SETS)] for place, name in enumerate(FEATURE_SETS)}
"""Of each set its own, one row a step."""


@pytest.fixture(scope="module")
def sampler():
    return ChainSampler(vocab=VOCAB, tokenizer=Words(NAMED))


def run(sampler, names):
    """Ten steps of rows side by side: for each row, what each step drew, said of it and left behind."""
    rows = [params(**FEATURE_SETS[name]) for name in names]
    states = [sampler.open(spec(row, PROMPT, (0, 7))) for row in rows]
    found = [[] for _ in names]
    for step in range(STEPS):
        logits = np.stack([LOGITS[name][step] for name in names])
        drawn = draw_states(np, logits, states, [len(PROMPT) + step] * len(names), sampler=sampler)
        for place, (row, state) in enumerate(zip(rows, states, strict=True)):
            token = int(drawn.tokens[place])
            sampler.commit(state, token, None if drawn.observed is None else float(drawn.observed[place]))
            lists = None if row.logprobs is None else told(drawn, place, row)
            found[place].append((token, int(drawn.status[place]), state.mu, state.adaptive, lists))
    return found


@pytest.fixture(scope="module")
def alone(sampler):
    return {name: run(sampler, [name])[0] for name in FEATURE_SETS}


@pytest.mark.parametrize("first", FEATURE_SETS)
def test_beside_any_other_is_alone(sampler, alone, first):
    """In both orders, and beside another row of its own kind."""
    for second in FEATURE_SETS:
        one, other = run(sampler, [first, second])
        assert one == alone[first], second
        assert other == alone[second], second


def test_all_together_are_each_alone(sampler, alone):
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(list(FEATURE_SETS)).tolist()
        for name, found in zip(order, run(sampler, order), strict=True):
            assert found == alone[name], name


def test_each_set_acts(sampler):
    """On the same logits no two sets draw from the same, so that the pairs above compare unlike rows."""
    seen = {}
    for name, fields in FEATURE_SETS.items():
        row = params(**fields | {"seed": 5, "logprobs": -1, "logprobs_mode": "processed", "post_sampling_probs": False})
        states = [sampler.open(spec(row, PROMPT, (0, 7)))]
        seen[name] = told(draw_states(np, LOGITS["server"][:1], states, [11], sampler=sampler), 0, row).top
    alike = [pair for pair in itertools.combinations(seen, 2) if seen[pair[0]] == seen[pair[1]]]
    assert alike == [("greedy", "probabilities")]  # they differ in how they tell it
