"""Seeds, through the scheduler over a real model: a reply is its own seed's in any company (hand cases F)."""

import numpy as np
import pytest
from real_scheduler import random_ids, said, served

pytestmark = pytest.mark.on_jax(most=1)

STORES = ("dense", "paged")
SAMPLED = {"temperature": 1.2, "max_tokens": 12}
PROMPT = random_ids(30, seed=4)

GOLDEN = {
    0: (14, 14, 38, 14, 46, 44),
    42: (7, 57, 35, 48, 10, 3),
    2**31: (45, 49, 60, 37, 15, 40),
    2**63 - 1: (25, 43, 5, 10, 4, 8),
}
"""Of PROMPT by seed, on reference-numpy. A change of them is a release note (spec S36)."""


def alone(ids=PROMPT, **params):
    return served(cache=False, store="dense").answer(ids, **{**SAMPLED, **params})


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("store", STORES)
def test_h_f1_a_seeded_request_is_itself_beside_unseeded_ones(backend, store):
    """Four runs beside a neighbour whose seed is a fresh one each time."""
    expected, strangers = alone(seed=42), set()
    for fresh in (901, 902, 903, 904):
        it = served(store=store)
        mine, other = it.ask(PROMPT, seed=42, **SAMPLED), it.ask(PROMPT, seed=fresh, **SAMPLED)
        it.run()
        assert said(mine)[0] == expected
        strangers.add(said(other)[0].ids)
    assert len(strangers) == 4


@pytest.mark.parametrize("others", [1, 3, 6])
def test_h_f3_the_first_token_of_a_shared_prefill_is_its_own(backend, others):
    """Prompts of many lengths that are prefilled in one flat step."""
    prompts = [random_ids(7 + 9 * n, seed=n) for n in range(others + 1)]
    it = served(store="paged", slots=8)
    replies = [it.ask(ids, seed=5, temperature=1.2, max_tokens=1) for ids in prompts]
    it.run()
    assert it.scheduler.stats().steps_total["prefill"] < len(prompts), "they shared steps"
    assert [said(reply)[0] for reply in replies] == [alone(ids, seed=5, max_tokens=1) for ids in prompts]


@pytest.mark.parametrize("shuffle", range(3))
def test_h_f4_same_and_different_seeds_shuffled(backend, shuffle):
    seeds = [1, 1, 2, 2, 901, 902]
    expected = {seed: alone(seed=seed) for seed in seeds}
    order = np.random.default_rng(shuffle).permutation(6)
    it = served(store="paged", slots=4)  # two of them wait
    replies = [(seeds[place], it.ask(PROMPT, seed=seeds[place], **SAMPLED)) for place in order]
    it.run()
    for seed, reply in replies:
        assert said(reply)[0] == expected[seed]
    assert len({one.ids for one in expected.values()}) == 4


@pytest.mark.parametrize("store", STORES)
def test_h_f5_seeded_replies_are_pinned(backend, store):
    it = served(store=store)
    assert {seed: it.answer(PROMPT, **{**SAMPLED, "seed": seed, "max_tokens": 6}).ids for seed in GOLDEN} == GOLDEN


def test_h_f5_choices_have_streams_of_their_own(backend):
    """C13: n choices differ, and each is the request that sends its seed alone."""
    it = served(store="paged")
    reply = it.ask(PROMPT, seed=9, n=4, **SAMPLED)
    it.run()
    found = said(reply)
    assert len({one.ids for one in found.values()}) == 4
    for result in it.ended:
        assert alone(seed=result.params.seed).ids == result.token_ids
