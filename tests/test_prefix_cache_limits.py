"""What the prompt cache keeps, for how long, and why it declines (spec 8.4 to 8.7)."""

import itertools

import attrs
import numpy as np
import pytest
from cache_rows import STORES, AtR1, caching, ids_of
from layered_family import layered_checkpoint

from mlxcel.core.prefix import ModelIdentity, Reject
from mlxcel.errors import CapacityError
from mlxcel.plugins.kv.kept_pages import AUTO_BYTES, CacheLimits

PROMPT = ids_of(70)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "dry_multiplier": 0.8, "dry_sequence_breakers": ()}
SEEDED = {"temperature": 0.9, "seed": 7, "top_p": 0.95}


@pytest.fixture(params=STORES)
def store(request):
    return request.param


# --- limits ----------------------------------------------------------------------------------------------------------

PAGE_BYTES = 16 * 2 * 2 * (2 * 8) * 4
"""Of 16 positions, two layers, K and V of two heads of 8, float32."""


def test_h_j6_counted_bytes_are_the_bytes_of_the_arrays_and_the_limit_holds(backend):
    """Spec X12, X13: insert until full."""
    made = caching(limits=CacheLimits(bytes=12 * PAGE_BYTES))
    assert sum(array.nbytes for array in made.real.backend.kv_arrays()) == made.kv.num_pages * PAGE_BYTES
    most = 0
    for seed in range(6):
        made.run(ids_of(60, seed=seed), 1)
        stats = made.cache.stats()
        assert stats.bytes == stats.pages * PAGE_BYTES <= 12 * PAGE_BYTES
        assert stats.pages == made.engine.kv_stats.cached
        most = max(most, stats.pages)
    assert most == 12
    assert made.cache.stats().evictions["capacity"] == 6 * 4 - 12
    assert made.cache.match(made.spec(ids_of(60, seed=5))).length == 59, "the newest stays"
    assert made.cache.match(made.spec(ids_of(60, seed=0))).reject is Reject.NO_MATCH


def test_copies_of_rings_count_by_their_arrays(backend):
    """Spec X13: model-owned payload included."""
    made = caching(layered_checkpoint("window 16", "full"))
    made.run(PROMPT, 1)
    (node,) = [node for node in made.cache._index.by_age if node.payload is not None]
    measured = sum(array.nbytes for array in node.payload.arrays)
    assert measured == node.payload.nbytes > 0
    assert made.cache.stats().bytes == 5 * PAGE_BYTES // 2 + measured


def test_an_entry_above_the_capacity_is_oversized(store):
    made = caching(store=store, limits=CacheLimits(bytes=PAGE_BYTES))
    made.run(PROMPT)
    assert (made.cache.stats().pages, made.cache.stats().last_reject) == (0, Reject.OVERSIZED)
    assert made.engine.kv_stats.free == made.engine.kv_stats.total
    nothing = caching(store=store, limits=CacheLimits(bytes=0))
    nothing.run(PROMPT)
    assert nothing.cache.stats().inserts == 0, "0: nothing is inserted"


def test_auto_bounds_what_is_not_given_back_on_demand():
    made = caching(store="dense", page_bytes=AUTO_BYTES // 2)
    for seed in range(3):
        made.run(ids_of(40, seed=seed))
    assert made.cache.stats().entries == 2


def test_the_most_entries():
    """Spec X12: entries are donated leaves."""
    made = caching(limits=CacheLimits(entries=2))
    for seed in range(4):
        made.run(np.concatenate([PROMPT[:32], ids_of(30, seed=seed)]), 1)
    stats = made.cache.stats()
    assert (stats.entries, stats.pages) == (2, 2 + 2 * 2), "the common pages stay"


def test_victims_are_the_least_recently_used_and_parents_come_after_their_children():
    """Spec X12."""
    made = caching(limits=CacheLimits(ttl=0))
    old, new = (np.concatenate([PROMPT[:32], ids_of(32, seed=seed)]) for seed in (1, 2))
    made.run(old, 1)
    made.run(new, 1)
    made.run(old, 1)
    assert made.cache.reclaim(2) == 2
    assert made.cache.match(made.spec(new)).length == 32
    assert made.cache.match(made.spec(old)).length == 63
    assert made.cache.reclaim(1) == 1
    assert made.cache.match(made.spec(old)).length == 48
    assert made.cache.reclaim(100) == 3
    assert made.cache.stats().evictions["lru"] == 6


def test_reclaim_takes_no_page_that_a_row_uses():
    """Spec X7."""
    made = caching()
    made.run(PROMPT)
    row, _ = made.cache.open(made.engine, made.spec(PROMPT[:40]))
    assert made.cache.reclaim(100) == 2, "5 pages, 3 of them under the row"
    assert made.cache.stats().pages == 0
    made.engine.close(row)
    assert made.cache.stats().pages == 3


def test_lifetime_runs_from_the_last_use(store):
    """Spec X12: at lookup and in a sweep at most once a second, on the injected clock."""
    made = caching(store=store, limits=CacheLimits(ttl=100))
    made.run(PROMPT, 1)
    made.clock.advance(90)
    assert made.run(PROMPT, 1).cached
    made.clock.advance(99)
    assert made.cache.match(made.spec(PROMPT)).length
    made.clock.advance(2)
    assert made.cache.match(made.spec(PROMPT)).reject is Reject.EMPTY_SET
    assert made.cache.stats().evictions["ttl"] > 0
    made.run(PROMPT, 1)
    made.cache.sweep()
    made.clock.advance(100.5)
    made.cache.sweep()
    assert made.cache.stats().pages == 0


def test_a_sweep_looks_at_most_once_a_second():
    made = caching(limits=CacheLimits(ttl=0.1))
    made.run(PROMPT, 1)
    made.clock.advance(0.9)
    made.cache.sweep()
    assert made.cache.stats().pages == 5
    made.clock.advance(0.2)
    made.cache.sweep()
    assert made.cache.stats().pages == 0


def test_reset_says_what_it_freed_and_keeps_the_counters():
    """Spec X18, X17."""
    made = caching()
    made.run(PROMPT)
    made.run(PROMPT)
    before = made.cache.stats()
    freed = made.cache.reset()
    assert (freed.entries, freed.pages, freed.bytes) == (1, 5, 5 * PAGE_BYTES)
    after = made.cache.stats()
    assert (after.pages, after.entries, after.bytes) == (0, 0, 0)
    assert (after.lookups, after.hits, after.inserts) == (before.lookups, before.hits, before.inserts)
    assert after.evictions["reset"] == 5


def test_lost_kv_empties_the_cache_by_its_name():
    """Spec E18."""
    made = caching()
    made.run(PROMPT)
    made.cache.lost()
    assert made.cache.stats().evictions["fault"] == 5
    assert made.engine.kv_stats.free == made.engine.kv_stats.total
    made.engine._rows.lose_kv()
    assert made.run(PROMPT).cached == 0
    assert made.run(PROMPT).cached == len(PROMPT) - 1, "what came afterwards is good"


def test_kept_pages_of_dense_storage_make_room_for_rows():
    """A row needs a big page before its first step: the oldest kept one goes."""
    made = caching(store="dense", slots=2)
    for seed in range(4):
        made.run(ids_of(40, seed=seed))
    assert made.cache.stats().entries == 2
    rows = [made.cache.open(made.engine, made.spec(ids_of(40, seed=9)))[0] for _ in range(2)]
    assert made.cache.stats().entries == 0
    for row in rows:
        made.engine.close(row)


# --- reasons ---------------------------------------------------------------------------------------------------------


def reasons():
    """(reason, what reaches it)"""

    def disabled():
        made = caching()
        made.run(PROMPT, allowed=False)
        assert made.cache.stats().pages == 0
        return made

    def off():
        made = caching(limits=CacheLimits(enabled=False))
        made.run(PROMPT)
        assert not made.cache.stats().enabled
        return made

    def twice(second, limits=None, first=PROMPT, **options):
        def run():
            made = caching(limits=limits or CacheLimits(), **options.pop("engine", {}))
            made.run(first, 1)
            made.run(second, 1, keep=False, **options)
            return made

        return run

    def short_entry():
        made = caching()
        made.run(PROMPT[:5], 1)
        return made

    def adopted(**changes):
        def run():
            made = caching()
            made.run(PROMPT)
            find = made.cache._find

            def other(*args):
                match, node = find(*args)
                return attrs.evolve(match, prefix=attrs.evolve(match.prefix, **changes(match.prefix))), node

            changes = run.changes
            made.cache._find = other
            ran = made.run(PROMPT, keep=False)
            assert ran.cached == 0
            assert ran.ids == caching().run(PROMPT).ids, "the row begins cold"
            return made

        run.changes = changes["how"]
        return run

    def key(**fields):
        return adopted(how=lambda prefix: {"key": attrs.evolve(prefix.key, **fields)})

    def model(**fields):
        return adopted(how=lambda prefix: {"key": attrs.evolve(prefix.key, model=ModelIdentity(**fields))})

    def recurrent():
        made = caching(layered_checkpoint("state", "full"))
        made.run(PROMPT)
        return made

    def decoded():
        made = caching(backend=AtR1(), chunk=32)
        made.run(PROMPT[:20], 40)
        return made

    def rings():
        made = caching(layered_checkpoint("window 16", "full"), chunk=1)
        made.run(ids_of(300), 1)
        made.run(ids_of(300)[:60], 1, keep=False)
        return made

    return {
        Reject.DISABLED: [disabled, off],
        Reject.NO_MATCH: [twice(ids_of(40, seed=1))],
        Reject.PREFIX_TOO_SHORT: [twice(np.concatenate([PROMPT[:9], ids_of(9, seed=1)])), short_entry],
        Reject.GRANULE_FLOOR: [twice(PROMPT[:1], CacheLimits(min_prefix=1))],
        Reject.OVERSIZED: [twice(PROMPT, CacheLimits(bytes=10))],
        Reject.EMPTY_SET: [twice(PROMPT, salt="none")],
        Reject.MODE_MISMATCH: [key(store="dense")],
        Reject.KV_MODE_MISMATCH: [key(kv_mode="int8")],
        Reject.ROPE_REGIME_MISMATCH: [model(rope="yarn")],
        Reject.ADAPTER_MISMATCH: [model(adapter="a")],
        Reject.MODEL_OWNED_STATE: [recurrent],
        Reject.LAYOUT_CONSTRAINTS: [key(page_size=64), rings],
        Reject.NEEDS_PROMPT_LOGITS: [twice(PROMPT, prompt_logprobs=1)],
        Reject.DECODED_POSITIONS: [decoded],
        Reject.FAULT: [adopted(how=lambda prefix: {"epoch": 9})],
    }


REASONS = [(reason, reach) for reason, all_ways in reasons().items() for reach in all_ways]


@pytest.mark.parametrize(
    ("reason", "way"), REASONS, ids=[f"{reason.value}-{n}" for n, (reason, _) in enumerate(REASONS)]
)
def test_each_reason_is_reached_and_counted(reason, way):
    """Spec 8.6."""
    stats = way().cache.stats()
    assert stats.rejects[reason.value] > 0
    assert list(stats.rejects) == [each.value for each in Reject]


def test_every_reason_but_the_reserved_one_has_a_case():
    assert {reason for reason, _ in REASONS} == set(Reject) - {Reject.SNAPSHOT_DIVERGED}


def test_stats_hold_no_ids():
    """Spec X19."""
    made = caching()
    ran = made.run(PROMPT)
    numbers = itertools.chain(attrs.asdict(made.cache.stats()).values(), ran.ids[:0])
    assert all(isinstance(each, int | float | dict | Reject | None) for each in numbers)


def test_a_row_that_began_with_decoded_positions_shares_all_of_its_prompt():
    """Spec X10, at R2: what was adopted and not prefilled counts as well."""
    made = caching()
    first = made.run(PROMPT, 30)
    prompt = np.concatenate([PROMPT, first.ids, ids_of(12, seed=2)])
    row, match = made.cache.open(made.engine, made.spec(prompt))
    assert match.length == 99
    made.engine.prefill(row, made.plan(prompt, match))
    assert made.cache.share(made.engine, row) == 112
    made.engine.close(row)


def test_a_row_takes_the_page_of_what_is_kept_and_no_more():
    """Dense storage: one kept page goes for a row that has a slot, and the refusal without one is the engine's."""
    made = caching(store="dense", slots=2)
    made.run(PROMPT)
    first = made.engine.open(made.spec(ids_of(9)))
    second, _ = made.cache.open(made.engine, made.spec(ids_of(40, seed=3)))
    assert made.cache.stats().evictions["lru"] == 1
    with pytest.raises(CapacityError, match="all 2 rows are taken"):
        made.cache.open(made.engine, made.spec(PROMPT))
    for row in (first, second):
        made.engine.close(row)
