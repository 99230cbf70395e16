"""The prompt cache (docs/spec/engine.md 8): a hit is the very bits of a miss, and what is kept is what may be."""

import family_vectors
import numpy as np
import pytest
from cache_rows import STORES, AtR1, caching, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_family import layered_checkpoint
from real_engine import assert_same_bits

from mlxcel.core.plan import Decode
from mlxcel.core.prefix import KVKey, ModelIdentity, Reject
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import CapacityError
from mlxcel.plugins.builtin import mlxcel_families
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.kv.prefix_index import PrefixIndex, blake2b

pytestmark = pytest.mark.on_jax(most=0)

PROMPT = ids_of(70)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "dry_multiplier": 0.8, "dry_sequence_breakers": ()}
SEEDED = {"temperature": 0.9, "seed": 7, "top_p": 0.95}


@pytest.fixture(params=STORES)
def store(backend, request):
    return request.param


# --- a hit changes time and nothing else -----------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, SEEDED, PENALTIES, {**SEEDED, **PENALTIES, "mirostat": 2}], ids=str)
def test_h_j1_h_j4_the_same_request_five_times(store, params):
    """Spec X6, X8: at least one token is always computed, and first and later answers are the same bits."""
    made = caching(store=store)
    cold = caching(store=store).run(PROMPT, **params)
    runs = [made.run(PROMPT, **params) for _ in range(5)]
    for ran in runs:
        assert_same_bits(cold.logits, ran.logits)
        assert ran.ids == cold.ids
        assert ran.plan.reproduces(cold.plan)
    assert [ran.cached for ran in runs] == [0, *[len(PROMPT) - 1] * 4]


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 127, 128, 129])
def test_h_j2_a_whole_prompt_hit_has_the_first_logits_of_a_miss(store, length):
    """Spec X6: the KV length is cut together with the cursor, at each border of pages and blocks."""
    ids = ids_of(length)
    made = caching(store=store)
    cold, hit = made.run(ids, 1), made.run(ids, 1)
    assert (cold.cached, hit.cached) == (0, 0 if length == 16 else length - 1)
    assert_same_bits(cold.logits, hit.logits)


def test_h_j12_an_answer_does_not_depend_on_what_ran_before(store):
    prompts = [np.concatenate([PROMPT[:n], ids_of(30, seed=n)]) for n in (20, 33, 50)]
    made = caching(store=store)
    for ids in prompts[:2]:
        made.run(ids)
    last, alone = made.run(prompts[2]), caching(store=store).run(prompts[2])
    assert last.cached > 0
    assert_same_bits(alone.logits, last.logits)
    assert last.ids == alone.ids


def test_h_j16_a_second_turn_takes_up_the_first(store):
    """At least the first prompt minus a page; here all that was stored."""
    made = caching(store=store)
    first = made.run(PROMPT)
    second = np.concatenate([PROMPT, first.ids, ids_of(9, seed=1)])
    ran = made.run(second)
    assert ran.cached == len(PROMPT) + len(first.ids) - 1
    assert_same_bits(caching(store=store).run(second).logits, ran.logits)


def family_checkpoint(case, folder):
    checkpoint = SafetensorsCheckpoint(family_vectors.write_checkpoint(case, folder))
    (spec,) = [spec for spec in mlxcel_families() if spec.claims(checkpoint.naming, checkpoint.architecture)]
    return checkpoint, spec.load()()


@pytest.mark.parametrize("case", ["llama-untied", "gemma3-seven-layers", "gemma2", "qwen3", "lfm2", "mixtral-window"])
def test_every_family_hits_with_the_bits_of_a_miss_or_declines(tmp_path, store, case):
    """Spec X8, X14, X15; greedy and seeded, with penalties whose history includes adopted ids."""
    checkpoint, family = family_checkpoint(case, tmp_path)
    vocab = family.parse_config(checkpoint).vocab_size
    context = min(256, family.parse_config(checkpoint).context)
    ids = np.random.default_rng(3).integers(0, vocab, 40)

    def fresh():
        return caching(checkpoint, family, store=store, context=context)

    made = fresh()
    made.run(ids)
    for params in ({}, {**SEEDED, **PENALTIES}):
        turn = np.concatenate([ids, ids[:7]])
        for prompt in (ids, turn):
            ran, cold = made.run(prompt, **params), fresh().run(prompt, **params)
            assert_same_bits(cold.logits, ran.logits, f"{case} {params}")
            assert ran.ids == cold.ids
            if case == "lfm2":
                assert (ran.cached, ran.match.reject) == (0, Reject.MODEL_OWNED_STATE)
            else:
                assert ran.cached >= 39
    if case == "lfm2":
        assert made.cache.stats().rejects["model_owned_state"] == 10, "five lookups, five donations"
        assert made.cache.stats().pages == 0


@pytest.mark.on_jax(most=0)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_prompts_of_a_tree_are_the_bits_of_cold_ones_whatever_was_kept_and_evicted(backend, data):
    """Shared beginnings of any length, in any order, in a pool that is too small for all of them."""
    layers = data.draw(st.sampled_from([("full",), ("window 16", "full")]))
    checkpoint = layered_checkpoint(*layers)
    made = caching(checkpoint, store=data.draw(st.sampled_from(sorted(STORES))), slots=2, context=256, pages=18)
    for _ in range(data.draw(st.integers(2, 7))):
        parts = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=3))
        ids = np.concatenate([ids_of(length, seed=seed) for length, seed in parts])
        while made.kv.shares and made.engine.kv_stats.free < 10 and made.cache.reclaim(1):
            pass
        ran = made.run(ids, 3)
        assert_same_bits(caching(checkpoint, store="dense").run(ids, 3).logits, ran.logits)
    made.cache.reset()
    assert made.engine.kv_stats.free == made.engine.kv_stats.total


def test_a_pinned_page_survives_eviction_and_reset(store):
    """Spec X7, X18: running rows keep their pages."""
    made = caching(store=store)
    cold = made.run(PROMPT)
    row, match = made.cache.open(made.engine, made.spec(PROMPT, max_tokens=5))
    made.cache.reclaim(1000)
    freed = made.cache.reset()
    assert freed.pages == 0 or not made.kv.shares
    assert made.cache.stats().pages == 0
    outcome = made.engine.prefill(row, made.plan(PROMPT, match))
    while outcome.cause is None:
        outcome = made.engine.step([row])[0]
    logits, output = made.real.close(row)
    assert_same_bits(cold.logits, logits)
    assert output == cold.ids
    assert made.engine.kv_stats.free == made.engine.kv_stats.total


def test_a_preempted_row_comes_back_from_what_the_cache_holds(store):
    """Spec C19."""
    made = caching(store=store)
    cold = made.run(PROMPT, 8)
    row, match = made.cache.open(made.engine, made.spec(PROMPT, max_tokens=8))
    made.engine.prefill(row, made.plan(PROMPT, match))
    for _ in range(3):
        made.engine.step([row])
    made.engine.preempt(row)
    match = made.cache.resume(made.engine, row)
    known = made.engine.tokens(row)[:-1]
    assert match.length == (len(known) - 1 if made.kv.shares else 0), "a page that moved went with its row"
    made.engine.prefill(row, made.plan(known, match, draw=False))
    while made.engine.step([row])[0].cause is None:
        pass
    logits, output = made.real.close(row)
    assert_same_bits(cold.logits, logits)
    assert output == cold.ids


def test_equal_prompts_in_flight_share_a_finished_prefill():
    """Spec X10: full pages, while the first row still runs and without a copy of its pages."""
    made = caching()
    first = made.engine.open(made.spec(PROMPT, max_tokens=5))
    made.engine.prefill(first, made.plan(PROMPT))
    assert made.cache.share(made.engine, first) == made.cache.share(made.engine, first) == 64
    ran = made.run(PROMPT)
    assert (ran.cached, made.kv.copies) == (64, 0)
    while made.engine.step([first])[0].cause is None:
        pass
    logits, output = made.real.close(first)
    assert_same_bits(logits, ran.logits)
    assert output == ran.ids


def test_dense_rows_and_windows_share_nothing_while_they_run(store):
    made = caching(layered_checkpoint("window 16", "full"), store=store)
    row = made.engine.open(made.spec(PROMPT))
    made.engine.prefill(row, made.plan(PROMPT))
    assert made.cache.share(made.engine, row) == 0
    assert made.cache.stats().inserts == 0


# --- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "digest", [blake2b, lambda data: b"", lambda data: data[:1]], ids=["blake2b", "constant", "one"]
)
def test_h_j13_no_hash_can_serve_another_prompts_kv(digest):
    """Spec X4: the hash finds candidates, ids are compared."""
    made = caching(index=PrefixIndex(16, digest))
    prompts = [np.concatenate([PROMPT[:n], ids_of(40, seed=n)]) for n in (0, 16, 32, 33)] + [PROMPT]
    colds = [caching().run(ids) for ids in prompts]
    for _ in range(2):
        for ids, cold in zip(prompts, colds, strict=True):
            ran = made.run(ids, salt=None)
            assert_same_bits(cold.logits, ran.logits)
            assert ran.ids == cold.ids
    assert ran.cached == len(PROMPT) - 1


def test_digests_are_the_chain_of_the_specification():
    """Spec X3: h_0 of the root, then over the ids of each page as little-endian uint32."""
    seen = []

    def digest(data):
        seen.append(data)
        return blake2b(data)

    index = PrefixIndex(4, digest)
    key = KVKey(ModelIdentity("f"), "float32", "R2", "float32", "paged", 4)
    ids = np.array([1, 2, 3, 0x01020304, 5, 6, 7, 8, 9], np.int32)
    index.insert(key, ids, (0, 1, 2), prefilled=9, payload=None, now=0.0)
    first = blake2b(blake2b(key.root()) + bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 3, 2, 1]))
    second = blake2b(first + np.array([5, 6, 7, 8], "<u4").tobytes())
    assert {blake2b(data) for data in seen} == {blake2b(key.root()), first, second}, "a partial page has no digest"
    node = index.walk(key, ids).nodes[1]
    assert node.digest == second


def test_h_j15_salts_adapters_and_identities_are_apart(store):
    """Spec X2, X5: same salt shares, others never; a name of one kind is none of another."""
    made = caching(store=store, slots=8)
    spaces = [{}, {"salt": "a"}, {"salt": "b"}, {"isolation": b"a"}, {"isolation": b"a", "salt": "a"}]
    for space in spaces:
        assert made.run(PROMPT, **space).cached == 0
    for space in spaces:
        assert made.run(PROMPT, **space).cached == len(PROMPT) - 1
    other = caching(store=store, identity=ModelIdentity(adapter="a"))
    assert other.engine.kv_key(made.spec(PROMPT)) != made.engine.kv_key(made.spec(PROMPT, salt="a"))


def test_another_key_space_shows_in_no_reason(store):
    """Spec X16: what is said with and without another salt's entries is the same."""
    full, empty = caching(store=store), caching(store=store)
    full.run(PROMPT, salt="theirs")
    for ids in (PROMPT, PROMPT[:20], ids_of(50, seed=9)):
        assert full.cache.match(full.spec(ids)).reject is empty.cache.match(empty.spec(ids)).reject is Reject.EMPTY_SET
    full.run(PROMPT)
    empty.run(PROMPT)
    for ids in (PROMPT, PROMPT[:20], PROMPT[:3], ids_of(50, seed=9)):
        ours, alone = full.cache.match(full.spec(ids)), empty.cache.match(empty.spec(ids))
        assert (ours.reject, ours.length) == (alone.reject, alone.length)


def test_a_lookup_counts_when_the_row_has_its_place_and_a_match_counts_nothing():
    made = caching(slots=1)
    made.cache.match(made.spec(PROMPT))
    held = made.engine.open(made.spec(PROMPT))
    with pytest.raises(CapacityError):
        made.cache.open(made.engine, made.spec(PROMPT))
    assert made.cache.stats().lookups == 0
    made.engine.close(held)
    made.run(PROMPT)
    made.run(PROMPT)
    stats = made.cache.stats()
    assert (stats.lookups, stats.hits, stats.hit_rate, stats.tokens_reused) == (2, 1, 0.5, len(PROMPT) - 1)


def test_lookup_compares_each_page_once():
    """Spec X9: linear in P, by the digests that are taken."""
    counts = []
    index = PrefixIndex(16, lambda data: counts.append(len(data)) or blake2b(data))
    made = caching(index=index)
    made.run(ids_of(400), 1)
    for length in (100, 200, 400):
        counts.clear()
        made.cache.match(made.spec(ids_of(400)[:length]))
        assert len(counts) == length // 16


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_cancelled_rows_are_kept_without_overrun_and_failed_ones_never(store):
    """Spec X10, X11, E14."""
    made = caching(store=store)
    row = made.engine.open(made.spec(PROMPT))
    made.engine.prefill(row, made.plan(PROMPT))
    parts = [Decode(row)]
    made.engine.reserve(parts)
    ticket = made.engine.submit(parts)
    made.engine.cancel(row)
    made.engine.collect(ticket)
    assert made.cache.donate(made.engine, row) == len(PROMPT)
    made.real.close(row)
    assert made.cache.match(made.spec(np.append(PROMPT, [1, 2]))).length == len(PROMPT)


def test_a_row_that_runs_or_failed_is_not_taken(store):
    made = caching(store=store)
    row = made.engine.open(made.spec(PROMPT))
    made.engine.prefill(row, made.plan(PROMPT))
    assert made.cache.donate(made.engine, row) == 0
    assert made.engine.view(row).state is SequenceState.DECODING
    made.engine._rows.get(row).state = SequenceState.FAILED
    assert made.cache.donate(made.engine, row) == 0
    assert made.cache.stats().inserts == 0
    made.engine.close(row)


def test_duplicates_are_given_back_and_shorter_leaves_are_covered():
    """Spec X11: nodes that exist stay, duplicate pages are released."""
    made = caching()
    made.run(PROMPT, 1)  # 70 positions: 5 pages
    pages = made.cache.stats().pages
    made.run(PROMPT, 1, salt=None, seed=4)
    assert made.cache.stats().pages == pages == 5
    made.run(PROMPT, 6)  # 75 positions: the last page is another, and covers the first
    assert (made.cache.stats().pages, made.cache.stats().entries) == (5, 1)
    made.run(PROMPT[:20], 1)
    assert (made.cache.stats().pages, made.cache.stats().entries) == (5, 1), "all of it was there"


def test_at_r1_only_prefilled_multiples_of_the_chunk():
    """Spec X10, V15, P7: and every hit reproduces its cold plan."""
    made = caching(backend=AtR1(), chunk=32)
    ran = made.run(PROMPT, 40)  # 109 stored, 70 prefilled
    assert made.cache.stats().pages == 4
    again = made.run(np.concatenate([PROMPT, ran.ids]), 1)
    assert again.cached == 64
    assert again.plan.reproduces(made.plan(np.concatenate([PROMPT, ran.ids])))
    assert_same_bits(caching(backend=AtR1(), chunk=32).run(np.concatenate([PROMPT, ran.ids]), 1).logits, again.logits)


def test_at_r1_what_was_decoded_is_refused_by_its_name():
    made = caching(backend=AtR1(), chunk=32)
    made.run(PROMPT[:20], 40)
    assert made.cache.stats().last_reject is Reject.DECODED_POSITIONS
    made.run(PROMPT[:20], 3)
    assert made.cache.stats().last_reject is Reject.GRANULE_FLOOR


def test_a_hit_after_decoded_positions_says_that_they_were_not_prefilled():
    """Spec V15, P7: at R2 they count as well, and the plan knows."""
    made = caching()
    first = made.run(PROMPT)
    match = made.cache.match(made.spec(np.concatenate([PROMPT, first.ids, PROMPT])))
    assert (match.length, match.prefilled, match.prefix.prefilled) == (len(PROMPT) + 4, False, len(PROMPT))
    assert made.cache.match(made.spec(PROMPT)).prefilled
