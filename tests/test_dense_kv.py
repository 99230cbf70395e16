"""The dense half of chapter 2 of docs/spec/engine.md."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.core.kv import FullKV, KVSpec
from mlxcel.errors import CapacityError, UnknownSequence
from mlxcel.plugins.kv.dense import DenseKV

SPEC = KVSpec((FullKV(2, 8, 8), FullKV(2, 8, 4)))


def store(slots=3, context=300):
    return DenseKV(kv_spec=SPEC, slots=slots, context=context, page_size=16)


def test_bytes_per_position_are_the_sum_over_layers():
    assert SPEC.bytes_per_position(4) == 4 * (2 * 16 + 2 * 12)


def test_a_page_is_the_context_in_whole_blocks():
    """Spec V7: one big page a slot, rounded up to 128."""
    assert (store().page_size, store(context=128).page_size, store().num_pages) == (384, 128, 3)


def test_a_reservation_is_all_or_nothing():
    """Spec V17."""
    kv = store()
    kv.open(1, 300)
    kv.open(2, 10)
    with pytest.raises(CapacityError, match="sequence 2 has 0 of 128 positions, 129 more do not fit"):
        kv.reserve([(1, 5), (2, 129)])
    with pytest.raises(CapacityError, match="0 are reserved"):
        kv.advance(1, 1)


def test_a_new_reservation_replaces_one_that_was_not_taken():
    kv = store()
    kv.open(1, 300)
    kv.reserve([(1, 5)])
    kv.reserve([])
    with pytest.raises(CapacityError):
        kv.advance(1, 5)


def test_the_refusals_name_what_is_wrong():
    kv = store(slots=1)
    kv.open(1, 300)
    with pytest.raises(CapacityError, match="all 1 rows"):
        kv.open(2, 1)
    with pytest.raises(UnknownSequence, match="sequence 9"):
        kv.page_table(9)
    kv.free(1)
    with pytest.raises(UnknownSequence):
        kv.free(1)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60))
def test_random_traffic_keeps_the_counts(moves):
    """free + owned = total at all times, no two rows on one page, and a trim keeps what was written."""
    kv = store()
    written: dict[int, int] = {}
    for kind, amount in moves:
        row = amount % 4
        if kind == 0 and row not in written and len(written) < 3:
            kv.open(row, 300)
            written[row] = 0
        elif kind == 1 and row in written:
            kv.free(row)
            del written[row]
        elif kind in (2, 3) and row in written and written[row] + amount <= 384:
            kv.reserve([(row, amount)])
            kv.advance(row, amount)
            written[row] += amount
        elif kind == 4 and row in written:
            assert kv.trim(row, amount) == min(amount, written[row])
            written[row] = min(amount, written[row])
        stats = kv.stats()
        assert stats.free + stats.owned == stats.total == 3
        assert stats.owned == len(written)
        pages = [int(kv.page_table(each)[0]) for each in written]
        assert len(set(pages)) == len(pages)
