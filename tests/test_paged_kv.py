"""Paged storage (docs/spec/engine.md 2.2, 2.3, 2.6): accounts of pages, copies before writes, and traffic at random.

Where bits matter, see test_adopt.py and test_prefix_cache.py.
"""

import numpy as np
import pytest
from cache_rows import caching, ids_of, step_all
from engine_rows import TOKENIZER, opened, run_to_end
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from real_engine import assert_same_bits

from mlxcel.core.kv import FullKV, KVSpec
from mlxcel.errors import CapacityError, UnknownSequence, UsageError
from mlxcel.plugins.kv.page_pool import PagePool
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import scripted_engine

SPEC = KVSpec((FullKV(2, 8, 8),))
PAGE = 16


def store(slots=4, context=256, pages=None, page_size=PAGE):
    return PagedKV(kv_spec=SPEC, slots=slots, context=context, page_size=page_size, pages=pages)


def grow(kv, row, count):
    kv.reserve([(row, count)])
    kv.advance(row, count)


@pytest.mark.parametrize("size", [0, 3, 48, 256])
def test_a_page_divides_the_attention_block(size):
    """Spec V1."""
    with pytest.raises(UsageError, match=f"a page of {size} positions"):
        store(page_size=size)


def test_a_row_takes_pages_as_it_grows_and_gives_all_back():
    """Spec V7: page by page."""
    kv = store()
    kv.open(1, 100)
    assert kv.stats().owned == 0
    for length, pages in ((1, 1), (15, 1), (16, 2), (1, 3)):
        grow(kv, 1, length)
        assert len(kv.page_table(1)) == kv.stats().owned == pages
    assert kv.trim(1, 16) == 16
    assert kv.stats().owned == 1
    kv.free(1)
    assert (kv.stats().free, kv.stats().owned, kv.stats().cached) == (kv.num_pages, 0, 0)
    kv.check()


def test_a_reservation_is_all_or_nothing_in_pages():
    """Spec V17: the second row does not fit, so the first gets nothing, and the pages say so."""
    kv = store(pages=4)
    kv.open(1, 64)
    kv.open(2, 64)
    grow(kv, 1, 16)
    with pytest.raises(CapacityError, match="needs 4 pages of 16 positions, 3 of 4"):
        kv.reserve([(1, 16), (2, 48)])
    assert kv.stats().free == 3
    with pytest.raises(CapacityError, match="0 are reserved"):
        kv.advance(1, 1)


def test_a_row_above_its_capacity_is_refused_with_the_numbers():
    kv = store(pages=4)
    kv.open(1, 20)
    with pytest.raises(CapacityError, match="sequence 1 has 0 of 20 positions, 21 more"):
        kv.reserve([(1, 21)])
    with pytest.raises(CapacityError, match="a row of 65 positions was asked for, all 4 pages hold 64"):
        kv.open(2, 65)


def test_the_last_of_a_shared_page_writes_in_place():
    """Spec V5: two rows share a partial page and both append in one step: one copy, since the other is then alone."""
    kv = store()
    kv.open(1, 100)
    grow(kv, 1, 20)
    pages = kv.page_table(1).tolist()
    kv.adopt(2, 100, pages, 20)
    assert kv.stats().pinned == 2
    kv.reserve([(1, 1), (2, 1)])
    copies = [kv.page_copy(1), kv.page_copy(2)]
    assert copies == [(pages[1], kv.page_table(1)[1], 4), None]
    kv.check()
    kv.advance(1, 1)
    kv.advance(2, 1)
    assert kv.page_table(2).tolist() == pages
    assert (kv.copies, kv.stats().pinned) == (1, 1), "the full page stays shared"
    kv.check()


def test_a_full_page_that_is_shared_is_never_copied():
    """Spec V5: full pages are never written again."""
    kv = store()
    kv.open(1, 100)
    grow(kv, 1, 32)
    kv.adopt(2, 100, kv.page_table(1).tolist(), 32)
    kv.reserve([(1, 3), (2, 3)])
    assert (kv.page_copy(1), kv.page_copy(2)) == (None, None)


@pytest.mark.parametrize("how", ["replaced", "trimmed", "freed"])
def test_a_copy_that_was_planned_and_not_made_is_undone(how):
    kv = store()
    kv.open(1, 100)
    grow(kv, 1, 20)
    pages = kv.page_table(1).tolist()
    kv.adopt(2, 100, pages, 20)
    before = kv.stats()
    kv.reserve([(2, 1), (1, 1)])
    if how == "replaced":
        kv.reserve([])
    elif how == "trimmed":
        assert kv.trim(2, 20) == 20
        with pytest.raises(CapacityError):
            kv.advance(1, 1)
    else:
        kv.free(2)
        kv.adopt(2, 100, pages, 20)
    assert (kv.stats(), kv.page_table(2).tolist(), kv.copies) == (before, pages, 0)
    kv.check()


def test_a_copy_needs_a_page_too():
    """Spec V17: copy-on-write is part of what is reserved."""
    kv = store(pages=2)
    kv.open(1, 32)
    grow(kv, 1, 20)
    kv.adopt(2, 32, kv.page_table(1).tolist(), 20)
    with pytest.raises(CapacityError, match="needs 1 pages of 16 positions, 0 of 2"):
        kv.reserve([(2, 1)])


def test_pages_that_are_held_outside_count_as_cached_and_are_not_written():
    """Spec V3: a detached prefix holds its pages; an adopter copies the partial one."""
    kv = store()
    kv.open(1, 100)
    grow(kv, 1, 20)
    pages = kv.detach(1, 18)
    assert (kv.stats().cached, kv.stats().owned) == (2, 0)
    with pytest.raises(UnknownSequence):
        kv.page_table(1)
    kv.adopt(2, 100, pages, 17)
    kv.reserve([(2, 1)])
    assert kv.page_copy(2) == (pages[1], kv.page_table(2)[1], 1)
    kv.advance(2, 1)
    kv.release(pages)
    assert (kv.stats().cached, kv.stats().owned) == (0, 2)
    kv.free(2)
    assert kv.stats().free == kv.num_pages


def test_a_hold_that_was_never_taken_is_a_fatal_error():
    """Spec V3: in production too."""
    pool = PagePool(2)
    page = pool.take()
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([page], row=False)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.retain([1 - page], row=False)
    pool.take()
    with pytest.raises(RuntimeError, match="all 2 are held"):
        pool.take()


def test_a_pool_that_does_not_add_up_is_found():
    """What `check` is for must be able to fail."""
    kv = store()
    kv.open(1, 100)
    grow(kv, 1, 20)
    kv._pool.owned += 1
    with pytest.raises(RuntimeError, match="owned, cached and pinned"):
        kv.check()


def test_an_injected_shortage_runs_no_forward_and_takes_no_page():
    """Spec 1.5, V17."""
    engine = scripted_engine(
        {"a": [65] * 8},
        tokenizer=TOKENIZER,
        kv_store=PagedKV,
        faults=FaultPlan([Fault("reserve", 3)]),
    )
    row, plan = opened(engine.engine, "a", b"x" * 16, max_tokens=8)
    engine.engine.prefill(row, plan)
    engine.engine.step([row])
    steps, before = engine.backend.steps, engine.engine.kv_stats
    with pytest.raises(CapacityError, match="injected"):
        engine.engine.step([row])
    assert (engine.backend.steps, engine.engine.kv_stats) == (steps, before)
    assert len(run_rest(engine.engine, row)) == 8


def run_rest(engine, row):
    while engine.step([row])[0].cause is None:
        pass
    return engine.view(row).output


def test_a_scripted_row_runs_on_pages():
    engine = scripted_engine({"a": [65, 66, 67]}, tokenizer=TOKENIZER, kv_store=PagedKV, page_size=32)
    row, plan = opened(engine.engine, "a", max_tokens=3)
    assert run_to_end(engine.engine, row, plan)[0] == (65, 66, 67)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 300])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_dense_and_paged_are_the_same_bits(backend, size, length):
    """Spec V8, V4: at every border of pages and blocks, on pages that hold NaN and in any order."""
    ids = ids_of(length)
    dense = caching(store="dense").run(ids, keep=False)
    paged = caching(store="paged", page_size=size)
    paged.real.backend.fill_kv(np.nan)
    shuffle_free(paged.kv)
    ran = paged.run(ids, keep=False)
    assert_same_bits(dense.logits, ran.logits)
    assert ran.ids == dense.ids


def shuffle_free(kv):
    order = np.random.default_rng(0).permutation(kv.num_pages).tolist()
    kv._pool._returned, kv._pool._fresh = order, kv.num_pages


def test_two_rows_share_a_partial_page_and_each_equals_its_lone_run(backend):
    """Spec 2.7's list: both append, exactly one copy is counted."""
    made = caching()
    ids = ids_of(20)
    alone = caching().run(ids, 6)
    first = made.engine.open(made.spec(ids, max_tokens=6))
    made.engine.prefill(first, made.plan(ids))
    prefix = made.engine.share(first, 19)
    second = made.engine.adopt(made.spec(ids, max_tokens=6), prefix, 19)
    made.engine.release(prefix)
    made.engine.prefill(second, made.plan(ids, adopted=19))
    for _ in range(5):
        step_all(made.engine, [first, second])
        made.kv.check()
    for row in (first, second):
        logits, output = made.real.close(row)
        assert_same_bits(alone.logits, logits)
        assert output == alone.ids
    assert made.kv.copies == 1
    assert made.kv.stats().free == made.kv.num_pages


# --- traffic at random ------------------------------------------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """Rows that open, grow, fork, are handed over, adopted and trimmed, against a plain account of what each position
    holds. A page is a list of values; a step first makes the copies, then writes: what a row reads must be its own."""

    ROWS, PAGES, CONTEXT = 5, 14, 96

    def __init__(self):
        super().__init__()
        self.kv = store(slots=self.ROWS, context=self.CONTEXT, pages=self.PAGES)
        self.memory = {page: [None] * PAGE for page in range(self.PAGES)}
        self.rows = {}  # values of each row's positions
        self.kept = []  # (pages, values) that are held outside
        self.next = 1

    def pick(self, data, things):
        return data.draw(st.sampled_from(sorted(things)))

    def read(self, pages, length):
        return [self.memory[int(pages[at // PAGE])][at % PAGE] for at in range(length)]

    @precondition(lambda self: len(self.rows) < self.ROWS)
    @rule()
    def open(self):
        self.kv.open(self.next, self.CONTEXT)
        self.rows[self.next] = []
        self.next += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), submit=st.booleans())
    def step(self, data, submit):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, unique=True))
        wants = [(row, data.draw(st.integers(1, 20))) for row in chosen]
        wants = [(row, min(count, self.CONTEXT - len(self.rows[row]))) for row, count in wants]
        wants = [(row, count) for row, count in wants if count]
        before = self.kv.stats()
        try:
            self.kv.reserve(wants)
        except CapacityError:
            self.kv.reserve([])
            assert self.kv.stats().free >= before.free
            return
        self.kv.check()
        if not submit:
            self.kv.reserve([])
            return
        for row, _ in wants:
            if (copy := self.kv.page_copy(row)) is not None:
                source, target, count = copy
                self.memory[target] = self.memory[source][:count] + [None] * (PAGE - count)
        for row, count in wants:
            self.kv.advance(row, count)
            table = self.kv.page_table(row)
            for _ in range(count):
                at, value = len(self.rows[row]), object()
                self.memory[int(table[at // PAGE])][at % PAGE] = value
                self.rows[row].append(value)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def trim(self, data):
        row = self.pick(data, self.rows)
        length = data.draw(st.integers(0, len(self.rows[row])))
        assert self.kv.trim(row, length) == length
        del self.rows[row][length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data):
        row = self.pick(data, self.rows)
        self.kv.free(row)
        del self.rows[row]

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data(), keep=st.booleans())
    def hand_over(self, data, keep):
        """detach, or share as a running row does."""
        row = self.pick(data, [row for row, values in self.rows.items() if values])
        length = data.draw(st.integers(1, len(self.rows[row])))
        values = self.rows[row][:length]
        if keep:
            pages = tuple(self.kv.page_table(row)[: -(-length // PAGE)].tolist())
            self.kv.retain(pages)
        else:
            pages = self.kv.detach(row, length)
            del self.rows[row]
        self.kept.append((pages, values))

    @precondition(lambda self: self.kept and len(self.rows) < self.ROWS)
    @rule(data=st.data())
    def adopt(self, data):
        pages, values = self.kept[data.draw(st.integers(0, len(self.kept) - 1))]
        length = data.draw(st.integers(1, len(values)))
        self.kv.adopt(self.next, self.CONTEXT, pages, length)
        self.rows[self.next] = values[:length]
        self.next += 1

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def evict(self, data):
        pages, _ = self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))
        self.kv.release(pages)

    @invariant()
    def all_accounts_agree(self):
        self.kv.check()
        stats = self.kv.stats()
        assert stats.free + stats.owned + stats.cached == stats.total == self.PAGES
        for row, values in self.rows.items():
            assert self.read(self.kv.page_table(row), len(values)) == values
        for pages, values in self.kept:
            assert self.read(pages, len(values)) == values

    def teardown(self):
        for row in list(self.rows):
            self.kv.free(row)
        for pages, _ in self.kept:
            self.kv.release(pages)
        self.kv.check()
        assert self.kv.stats().free == self.PAGES


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
