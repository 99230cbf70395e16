"""Seeded draws: invariant in any company, pinned, and distributed as they should be (docs/spec/engine.md 4.7, 4.9)."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from sampling_rows import LIBRARIES, WORKED, draw, flat_logits, ids, params, spec

from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.noise import DRAW, gumbel, row_keys, words

CLEAR_GAP = 1e-4
"""A draw is decided across array libraries when its two best scores lie this far apart: noise differs by 2 ulp."""

P_OF_CHANCE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 6: 22.46}
"""Chi-square bounds at p = 0.001 by degrees of freedom. The seeds are fixed, so a test passes always or never."""

GOLDEN = [[307, 61, 66, 165, 209, 7], [220, 68, 52, 308, 60, 128], [273, 242, 41, 311, 190, 148]]
"""Ids of the rows of the test of pinned draws, at positions 1, 2 and 1000."""


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return LIBRARIES[request.param]


def stream(xp, rows, *, steps=12, order=None):
    """`steps` draws of each row from one flat distribution, in the given order of rows; streams by row."""
    order = list(range(len(rows))) if order is None else order
    logits = np.tile(flat_logits(1, 317), (len(rows), 1))
    found = [[] for _ in rows]
    for position in range(10, 10 + steps):
        for r, token in zip(order, ids(xp, logits, [rows[r] for r in order], [position] * len(rows)), strict=True):
            found[r].append(token)
    return found


def test_h_f1_a_seeded_row_stays_itself_beside_unseeded_ones():
    """Four runs of [42, a fresh seed]: the first row repeats, the second does not."""
    runs = [stream(np, [params(seed=42), params(seed=fresh)]) for fresh in (901, 902, 903, 904)]
    assert all(run[0] == runs[0][0] for run in runs)
    assert len({tuple(run[1]) for run in runs}) == 4


def test_h_f3_the_first_token_does_not_know_its_neighbours(xp):
    logits = flat_logits(4, 317)
    rows = [params(seed=s, top_p=0.9) for s in (42, 7, 8, 9)]
    alone = ids(xp, logits[:1], rows[:1], [3])
    for order in itertools.permutations(range(4)):
        together = draw(np, logits[list(order)], [rows[r] for r in order], [3] * 4).tokens
        assert together[order.index(0)] == alone[0]


def test_h_f4_same_and_different_seeds_shuffled_in_one_batch():
    """Seeds 1, 1, 2, 2 and two fresh ones: equal seeds give equal streams at every place, others do not."""
    rows = [params(seed=s) for s in (1, 1, 2, 2, 901, 902)]
    straight = stream(np, rows)
    assert straight[0] == straight[1]
    assert straight[2] == straight[3]
    assert len({tuple(row) for row in straight}) == 4
    for seed in range(5):
        assert stream(np, rows, order=np.random.default_rng(seed).permutation(6).tolist()) == straight


def test_h_f5_seeded_draws_are_pinned(xp):
    """Golden ids: a change of the noise or of the order of stages is a release note, never silent (spec S36)."""
    logits = flat_logits(6, 317, 4)
    rows = [
        params(seed=42),
        params(seed=42, temperature=0.7, top_k=20),
        params(seed=2**31, top_p=0.9),
        params(seed=2**63 - 1, min_p=0.3),
        params(seed=0, temperature=1.5, top_k=50, top_p=0.95, min_p=0.05),
        params(seed=2**32 + 42),
    ]
    assert [ids(xp, logits, rows, [q] * 6) for q in (1, 2, 1000)] == GOLDEN


def test_h_f5_every_seed_of_the_range_is_a_stream_of_its_own():
    """Spec 4.2: 0 … 2^63 - 1, both halves of the word count; 2^63 is refused where parameters are built."""
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1]
    assert len({tuple(row) for row in stream(np, [params(seed=s) for s in seeds])}) == len(seeds)
    with pytest.raises(RequestError, match="seed must be an integer from 0 to 2"):
        params(seed=2**63)


def test_h_f5_a_sampled_row_whose_seed_nobody_drew_is_refused_alone():
    """-1 means a fresh seed, drawn and reported before a row opens. A greedy row needs none."""
    sampler = ChainSampler(vocab=7)
    with pytest.raises(RequestError, match="seed is -1") as caught:
        sampler.open(spec(params(seed=-1)))
    assert caught.value.field == "seed"
    assert ids(np, WORKED[None], [params(seed=-1, temperature=0)], [0]) == [0]


def test_a_reply_continues_from_any_of_its_tokens():
    """Spec S34: a draw at position q depends on q, not on how many draws came before in this run."""
    rows = [params(seed=42, top_k=50)]
    whole = stream(np, rows, steps=12)[0]
    logits = flat_logits(1, 317)
    assert [ids(np, logits, rows, [q])[0] for q in range(16, 22)] == whole[6:]
    assert len(set(whole)) > 3


@pytest.mark.parametrize(
    ("row", "share"),
    [
        ({}, [0.40, 0.25, 0.15, 0.10, 0.06, 0.03, 0.01]),
        ({"top_k": 3}, [0.5, 0.3125, 0.1875, 0, 0, 0, 0]),
        ({"top_p": 0.7}, [0.5, 0.3125, 0.1875, 0, 0, 0, 0]),
        ({"temperature": 0.5, "top_k": 3}, [0.16 / 0.245, 0.0625 / 0.245, 0.0225 / 0.245, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(row, share, vary):
    """Chi-square over 5 000 draws: one per seed at one position, and one per position of one seed."""
    count = 5_000
    seeds, positions = (range(count), [9] * count) if vary == "seed" else ([9] * count, range(count))
    drawn = ids(np, np.tile(WORKED, (count, 1)), [params(seed=s, **row) for s in seeds], positions)
    seen, expected = np.bincount(drawn, minlength=7), np.array(share) * count
    assert not seen[expected == 0].any()
    seen, expected = seen[expected > 0], expected[expected > 0]
    assert np.sum((seen - expected) ** 2 / expected) < P_OF_CHANCE[len(seen) - 1]


CHAINS = {
    "temperature": ({"temperature": 1.7}, [p ** (1 / 1.7) for p in (0.40, 0.25, 0.15, 0.10, 0.06, 0.03, 0.01)]),
    "top_p": ({"top_p": 0.91}, [0.40, 0.25, 0.15, 0.10, 0.06, 0, 0]),
    "min_p": ({"min_p": 0.2}, [0.40, 0.25, 0.15, 0.10, 0, 0, 0]),
    # The gate is open for a part of the draws, and shut for the others.
    "xtc": (
        {"xtc_probability": 0.4, "xtc_threshold": 0.09},
        [0.24, 0.15, 0.09, 0.06 + 0.2, 0.036 + 0.12, 0.018 + 0.06, 0.006 + 0.02],
    ),
    "mirostat": ({"mirostat": 2, "mirostat_tau": 1}, [0.40, 0.25, 0, 0, 0, 0, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_two_hundred_thousand_draws_follow_the_distribution(name):
    """Chi-square: one draw per seed at one position, in batches of 10 000."""
    fields, weight = CHAINS[name]
    share = np.array(weight) / sum(weight)
    seen, batch = np.zeros(7), 10_000
    for start in range(0, 200_000, batch):
        rows = [params(seed=seed, **fields) for seed in range(start, start + batch)]
        seen += np.bincount(ids(np, np.tile(WORKED, (batch, 1)), rows, [9] * batch), minlength=7)
    expected = share * 200_000
    assert not seen[expected == 0].any()
    seen, expected = seen[expected > 0], expected[expected > 0]
    assert np.sum((seen - expected) ** 2 / expected) < P_OF_CHANCE[len(seen) - 1]


def test_numpy_and_jax_draw_the_same_ids_where_the_draw_is_clear():
    """Spec 4.9: words are bit-equal, Gumbel values within 2 ulp, so only near-ties may differ."""
    logits = flat_logits(400, 317, 6)
    rows = [params(seed=s, temperature=0.5 + s / 200) for s in range(400)]
    zeros = np.zeros(400, np.uint32)
    key = row_keys(np, np.arange(400, dtype=np.uint32), zeros, zeros, DRAW)
    temperature = np.array([row.temperature for row in rows])[:, None]
    score = np.sort((logits - logits.max(axis=-1, keepdims=True)) / temperature + gumbel(np, words(np, key, 317)))
    clear = score[:, -1] - score[:, -2] > CLEAR_GAP
    assert clear.sum() > 390
    eager, traced = (np.array(ids(library, logits, rows, [0] * 400)) for library in (np, jnp))
    assert np.array_equal(eager[clear], traced[clear])
