"""Prefixes that are used again, through the scheduler over a real model: a hit changes time alone (hand cases J)."""

import itertools

import pytest
from cache_rows import caching
from layered_family import layered_checkpoint
from llm_rows import BACKEND, GREEDY, HELLO, ids
from real_engine import assert_same_bits
from real_scheduler import random_ids, said, served
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM
from mlxcel.plugins.kv.kept_pages import CacheLimits
from mlxcel.plugins.kv.prefix_index import PrefixIndex

pytestmark = pytest.mark.on_jax(most=0)

STORES = ("dense", "paged")
SEEDED = {"temperature": 1.0, "seed": 3}
MIXED = {**SEEDED, "repetition_penalty": 1.3, "mirostat": 2}
LENGTHS = (17, 31, 32, 33, 64, 80)


def cold(prompt, **params):
    """A request on a scheduler that has no cache."""
    return served(cache=False, store="dense").answer(prompt, **params)


@pytest.fixture(params=STORES)
def store(backend, request):
    return request.param


@pytest.mark.parametrize("length", LENGTHS)
def test_h_j1_the_same_request_three_times(store, length):
    """At least one token is computed each time, and the answer is the same."""
    prompt, it = random_ids(length, seed=length), served(store=store)
    found = [it.answer(prompt, max_tokens=9, logprobs=2) for _ in range(3)]
    assert found == [cold(prompt, max_tokens=9, logprobs=2)] * 3
    assert [one.cached for one in found] == [0, length - 1, length - 1]
    assert it.all_free()


@pytest.mark.parametrize("length", LENGTHS)
def test_h_j2_a_whole_prompt_hit_has_the_logits_of_a_miss(store, length):
    """The cache's length is cut with the cursor: every bit of every logit that was drawn from."""
    prompt, made = random_ids(length, seed=length), caching(store=store)
    first, again = made.run(prompt), made.run(prompt)
    assert (first.cached, again.cached) == (0, length - 1)
    assert_same_bits(first.logits, again.logits)


@pytest.mark.parametrize("params", [{}, SEEDED, MIXED], ids=["greedy", "seeded", "mixed"])
def test_h_j4_five_equal_requests_after_the_start(store, params):
    """One behind the other, and all at once."""
    prompt = random_ids(50, seed=1)
    expected = cold(prompt, max_tokens=12, logprobs=2, **params)
    it = served(store=store)
    assert [it.answer(prompt, max_tokens=12, logprobs=2, **params) for _ in range(5)] == [expected] * 5
    it = served(store=store)
    replies = [it.ask(prompt, max_tokens=12, logprobs=2, **params) for _ in range(5)]
    it.run()
    assert [said(reply)[0] for reply in replies] == [expected] * 5


@pytest.mark.parametrize("limit", [4, 9, 30])
def test_h_j6_counted_bytes_are_measured_and_the_limit_holds(backend, limit):
    page = 16 * sum(2 * 2 * 8 * 4 for _ in range(2))  # positions x layers x (K and V) x heads x width x float32
    it = served(store="paged", limits=CacheLimits(bytes=limit * page))
    per_page = sum(array.nbytes for array in it.it.real.backend.kv_arrays()) // it.it.kv.num_pages
    assert per_page == page
    for seed in range(8):
        it.answer(random_ids(40 + seed, seed=seed), max_tokens=4)
        stats = it.it.cache.stats()
        assert stats.bytes == it.it.kv.stats().cached * per_page <= limit * page
    assert stats.evictions["capacity"] > 0 or stats.rejects["oversized"] or limit == 30


@pytest.mark.parametrize("layers", [("full", "full"), ("full", "window 16")], ids=["full", "window"])
@pytest.mark.parametrize("length", [19, 33, 47])
def test_h_j8_a_saved_prefix_goes_on_as_uninterrupted(backend, store, layers, length, tmp_path):
    """Odd lengths: only valid positions count behind the reload."""
    model = layered_checkpoint(*layers, vocab_size=61)
    prompt = random_ids(length, seed=length)
    whole = cold_of(model, prompt, 10)
    writer = served(checkpoint=model, store=store)
    begun = writer.answer(prompt, max_tokens=4)
    assert begun.ids == whole.ids[:4]
    writer.it.cache.save(writer.it.engine, tmp_path / "kept")
    reader = served(checkpoint=model, store=store)
    assert reader.it.cache.load(reader.it.engine, tmp_path / "kept") == length + 3
    rest = reader.answer([*prompt, *begun.ids], max_tokens=6)
    assert rest.ids == whole.ids[4:]
    assert rest.cached == length + 3


def cold_of(model, prompt, steps):
    return served(checkpoint=model, cache=False, store="dense").answer(prompt, max_tokens=steps)


def test_h_j10_equal_template_variables_hit(tmp_path):
    """The key is the ids, however they were made: the same conversation with the same variables, without, as text."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }} and so on to the end of it, or further"
    model = write_tiny_llama(tmp_path / "tiny")
    with LLM(model, backend=BACKEND) as llm:
        outputs = [
            llm.chat(HELLO, GREEDY, chat_template=template, chat_template_kwargs={"mood": "kind"})[0] for _ in range(2)
        ]
        outputs.append(llm.generate(list(outputs[0].prompt_token_ids), GREEDY)[0])
        length = len(outputs[0].prompt_token_ids)
        assert [output.num_cached_tokens for output in outputs] == [0, length - 1, length - 1]
        assert len({ids(output) for output in outputs}) == 1


def test_h_j12_an_answer_does_not_know_what_ran_before(store):
    """C behind A and B in every order, where they share nothing, a part, or all of C with it."""
    c = random_ids(60, seed=0)
    others = [random_ids(60, seed=9), [*c[:30], *random_ids(20, seed=8)], c[:45], [*c, 1, 2, 3]]
    expected = cold(c, max_tokens=10, logprobs=2, **MIXED)
    for first, second in itertools.permutations(others, 2):
        it = served(store=store)
        it.answer(first, max_tokens=5)
        it.answer(second, max_tokens=5, **SEEDED)
        assert it.answer(c, max_tokens=10, logprobs=2, **MIXED) == expected


@pytest.mark.parametrize("digest", [lambda data: b"", lambda data: data[:1]], ids=["constant", "one byte"])
def test_h_j13_a_hash_that_always_collides_serves_nobody_elses_kv(digest):
    it = served(store="paged", index=PrefixIndex(16, digest))
    stem = random_ids(48, seed=2)
    prompts = [random_ids(48, seed=3), stem, [*stem[:16], *random_ids(32, seed=4)], [*random_ids(16, seed=5), *stem]]
    for prompt in prompts * 2:
        assert it.answer(prompt, max_tokens=6, logprobs=2) == cold(prompt, max_tokens=6, logprobs=2)


def test_h_j15_salts_and_identities_never_share(store):
    """The same name as a salt and as an identity, together and apart; each shares with itself."""
    prompt, it = random_ids(40, seed=6), served(store=store, slots=8)
    spaces = ({}, {"salt": "a"}, {"salt": "b"}, {"isolation": b"a"}, {"isolation": b"a", "salt": "a"})
    for cached in (0, 39):
        for space in spaces:
            assert it.answer(prompt, max_tokens=2, **space).cached == cached


def test_h_j16_a_second_turn_takes_up_the_first(store):
    """Cached tokens, and not only the right text: all of the first turn, prompt and reply."""
    it, first = served(store=store), random_ids(37, seed=7)
    reply = it.answer(first, max_tokens=10)
    turn = [*first, *reply.ids, *random_ids(9, seed=11)]
    second = it.answer(turn, max_tokens=10)
    assert second.cached == len(first) + len(reply.ids) - 1
    assert second == cold(turn, max_tokens=10)
    assert it.scheduler.stats().prompt_tokens_cached_total == second.cached


def test_h_j16_requests_in_flight_share_the_prompt_of_the_first(backend):
    """A system prompt of many clients at once: computed once and a little."""
    system, it = random_ids(64, seed=12), served(store="paged", slots=8)
    leader = it.ask([*system, 1], max_tokens=30)
    while it.scheduler.stats().generation_tokens_total < 2:
        it.tick()
    replies = [it.ask([*system, *random_ids(3, seed=n)], max_tokens=4) for n in range(6)]
    it.run()
    assert all(said(reply)[0].cached >= 64 for reply in replies)
    assert said(leader)[0] == cold([*system, 1], max_tokens=30)
    assert it.all_free()
