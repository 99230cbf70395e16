"""The KV of layers in one array: every operation on pages gives what it gives with an array for each layer (V1, V2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel.core.kv import FullKV, KVLayout, KVSpec
from mlxcel_jax_cuda import storage
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.storage import KVArrays

LAYERS, PAGES, PAGE_SIZE = 3, 7, 16
SPEC = KVSpec((FullKV(kv_heads=2, k_dim=8, v_dim=8),) * LAYERS)
LAYOUT = KVLayout(spec=SPEC, pages=PAGES, page_size=PAGE_SIZE, paged=True, slots=2, context=64, chunk=64)
APART, STACKED = KVArrays(LAYOUT, stacked=False), KVArrays(LAYOUT, stacked=True)
NUMERICS = Numerics("cpu", "float32", "R0", formulas=True)


def joined(leaves):
    """Keys and values of each layer in turn -> those of all layers."""
    return tuple(jnp.concatenate(leaves[i::2]) for i in (0, 1))


@pytest.fixture
def leaves():
    """Random pages of each layer."""
    rng = np.random.default_rng(5)
    zeros = storage.make_storage(APART, NUMERICS)
    assert [leaf.shape for leaf in storage.make_storage(STACKED, NUMERICS)] == [x.shape for x in joined(zeros)]
    return tuple(jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype) for leaf in zeros)


def same_bits(stacked, apart):
    for one, other in zip(stacked, joined(apart), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def copied(leaves):
    return tuple(leaf.copy() for leaf in leaves)


def test_copies_of_pages(leaves):
    """All of one, some positions of another, and padding that copies nothing, in a layer behind the last as well."""
    copies = storage.as_copies(np.array([[0, 3, 16], [6, 2, 5]], np.int32), PAGES, 8)
    found = storage.copy_pages(STACKED, joined(leaves), copies)
    wanted = storage.copy_pages(APART, copied(leaves), copies)
    same_bits(found, wanted)
    for keys in np.split(np.asarray(found[0]), LAYERS):
        np.testing.assert_array_equal(keys[3], keys[0])
        np.testing.assert_array_equal(keys[2][:, :5], keys[6][:, :5])
    changed = np.flatnonzero((np.asarray(found[0]) != np.asarray(joined(leaves)[0])).any((1, 2, 3)))
    assert changed.tolist() == [layer * PAGES + page for layer in range(LAYERS) for page in (2, 3)]


@pytest.mark.parametrize("arrays", [APART, STACKED], ids=["a layer each", "stacked"])
def test_a_copy_of_a_page_takes_no_copy_of_the_pool(arrays):
    """As XLA fuses on a GPU reading and writing were one, for which every page was copied: a barrier is between."""
    shapes = jax.eval_shape(lambda: storage.make_storage(arrays, NUMERICS))
    copies = jax.ShapeDtypeStruct((8, 3), jnp.int32)
    text = storage.copy_pages.lower(arrays, shapes, copies).as_text()
    assert text.count("stablehlo.optimization_barrier") == len(shapes)


def test_what_is_not_finite_is_cleared_on_the_pages_of_a_row(leaves):
    spoilt = tuple(leaf.at[jnp.array([1, 4, 5]), 1, 3].set(jnp.nan) for leaf in leaves)
    pages = np.array([5, 1, -1, -1], np.int32)
    found = storage.clear_spoilt(STACKED, joined(spoilt), pages, np.int32(2))
    same_bits(found, storage.clear_spoilt(APART, copied(spoilt), pages, np.int32(2)))
    for keys in np.split(np.asarray(found[0]), LAYERS):
        assert np.flatnonzero(np.isnan(keys).any((1, 2, 3))).tolist() == [4]


@pytest.mark.parametrize("moved", [1, 5000, storage.MOVED])
def test_pages_leave_as_arrays_of_each_layer_and_come_back(leaves, monkeypatch, moved):
    """V16: a file does not know which arrays they came from, and may be read by either. In how many parts they go does
    not matter: a page here has 1024 bytes, so one at a time, four, or all."""
    monkeypatch.setattr(storage, "MOVED", moved)
    pages = np.array([6, 0, 3], np.int32)
    out = storage.pages_to_host(STACKED, joined(leaves), pages)
    for array, leaf in zip(out, leaves, strict=True):
        np.testing.assert_array_equal(array, np.asarray(leaf)[pages])
    for array, other in zip(out, storage.pages_to_host(APART, leaves, pages), strict=True):
        np.testing.assert_array_equal(array, other)
    onto = np.array([2, 5, 4], np.int32)
    found = put(STACKED, joined(leaves), onto, out)
    same_bits(found, put(APART, copied(leaves), onto, out))
    back = storage.pages_to_host(STACKED, found, onto)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(back, out, strict=True))
    untouched = [page for page in range(PAGES) if page not in onto]
    for leaf, before in zip(put(APART, copied(leaves), onto, out), leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf)[untouched], np.asarray(before)[untouched])


def put(arrays, leaves, pages, values):
    *_, newest = storage.pages_from_host(arrays, leaves, pages, values)
    return newest


def test_no_part_of_pages_that_move_is_above_its_bytes(leaves):
    """However many they are: what is on the device beside the KV does not grow with the prefix that is moved."""
    pages = np.zeros(100_000, np.int32)
    page = leaves[0].nbytes // PAGES
    parts = list(storage._parts(STACKED, joined(leaves)[0], pages))
    assert {len(at) * page for _, _, at in parts} == {storage.MOVED}
    assert sum(own for _, own, _ in parts) == LAYERS * len(pages)
