"""The sampler packs what stands of its rows once: never to be told from packing each step anew (spec S44, C51)."""

import random

import numpy as np
import pytest
from sampling_rows import params, spec

from mlxcel.plugins.sampling.chain import ChainSampler

VOCAB = 50

KINDS = (
    {"temperature": 0},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
    {"logprobs": 3},
    {"logprobs": 0, "logprobs_mode": "processed", "temperature": 0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"mirostat": 2, "mirostat_tau": 3},
    {"mirostat": 1, "mirostat_eta": 0.4},
    {"adaptive_target": 0.3, "adaptive_decay": 0.8},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "temperature": 0},
    {"logit_bias": {3: 2.0}},
    {"min_tokens": 4, "temperature": 0},
)


def new_row(sampler, rng):
    given = rng.choice(KINDS)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
    return sampler.open(spec(params(**{"seed": rng.randrange(2**63), **given}), prompt=prompt, eos_ids=[7, 9]))


def changed(states, sampler, rng):
    """Mostly the same rows; else one came, one left, or they stand in another order."""
    what = rng.choice(("same", "same", "same", "came", "left", "order"))
    if what == "came" or not states:
        return [*states, new_row(sampler, rng)]
    if what == "left" and len(states) > 1:
        return states[1:]
    return rng.sample(states, len(states)) if what == "order" else list(states)


def numbers(state, pending):
    """What moves, of one row by itself: (mu, sum, weight) as float32. With a draw in flight w is 1 + d w already."""
    total, weight = (np.float32(value) for value in state.adaptive)
    if pending:
        weight = np.float32(1) + np.float32(state.spec.params.adaptive_decay) * weight
    return np.float32(state.mu), total, weight


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_steps_packs_what_a_new_sampler_packs(seed):
    """Same names, shapes, dtypes and bits, whatever was packed before; and nothing that was handed out changes."""
    rng = random.Random(seed)
    sampler = ChainSampler(vocab=VOCAB)
    states, handed_out = [], []
    for _ in range(60):
        states = changed(states, sampler, rng)
        positions = [state.history.length for state in states]
        pending = [rng.random() < 0.5 for _ in states]
        found = sampler.pack(states, positions, pending)
        anew = ChainSampler(vocab=VOCAB).pack(states, positions, pending)
        assert (found.stages, found.top_logprobs) == (anew.stages, anew.top_logprobs)
        assert found.params.keys() == anew.params.keys()
        for name, array in found.params.items():
            expected = anew.params[name]
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
            assert array.tobytes() == expected.tobytes(), name
        assert found.params["position"].tolist() == positions
        assert found.params["pending"].tolist() == pending
        for place, (state, ahead) in enumerate(zip(states, pending, strict=True)):
            p, (mu, total, weight) = state.spec.params, numbers(state, ahead)
            assert found.params["seed_low"][place] == p.seed & 0xFFFFFFFF
            assert found.params["greedy"][place] == p.greedy
            if p.mirostat:
                assert found.params["mu"][place] == mu
            if p.adaptive_target > 0:
                assert found.params["adaptive_total"][place] == total
                assert found.params["adaptive_weight"][place] == weight
        handed_out += [(name, array, array.copy()) for name, array in found.params.items()]
        for state in states:
            sampler.commit(state, rng.randrange(VOCAB), rng.choice([None, 1.5, 0.25]))
    for name, array, copy in handed_out:
        assert array.tobytes() == copy.tobytes(), name


def test_what_stands_cannot_be_written_to():
    """A backend may still read what it was given for an older step."""
    sampler = ChainSampler(vocab=VOCAB)
    state = sampler.open(spec(params(temperature=0.5)))
    array = sampler.pack([state], [1], [False]).params["temperature"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2


def test_equal_rows_are_not_the_same_row():
    """Two rows of one request differ in their seeds at most: identity decides."""
    sampler = ChainSampler(vocab=VOCAB)
    first, second = (sampler.open(spec(params(seed=seed, temperature=0.5))) for seed in (1, 2))
    for rows in ([first], [second], [second, first], [first, second], [first]):
        packed = sampler.pack(rows, [1] * len(rows), [False] * len(rows))
        assert packed.params["seed_low"].tolist() == [row.spec.params.seed for row in rows]
