"""The promise of docs/design.md 1 in bits: a row's logits do not know their company, place, pieces or pages."""

import numpy as np
import pytest
from company import PATIENT, check_company, company
from hypothesis import given, settings
from hypothesis import strategies as st
from real_engine import assert_same_bits, real_engine
from tested_backends import loaded_family
from tiny_checkpoint import write_tiny_llama

from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.self_test import seeded_checkpoint
from mlxcel.testing.family_run import Feed, Place
from mlxcel_reference_numpy.attention import attend_token
from mlxcel_reference_numpy.context import ACTIVATIONS
from mlxcel_reference_numpy.products import row_products

SHAPES = {
    "tiny": {},
    # Nothing here is a multiple of a SIMD width or of a weight block.
    "odd": {"hidden": 60, "heads": 3, "kv_heads": 1, "head_dim": 22, "ffn": 101, "vocab": 317},
}

REAL_LAYER = {
    "hidden_size": 576,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module", params=SHAPES)
def small_checkpoint(request, tmp_path_factory):
    return SafetensorsCheckpoint(write_tiny_llama(tmp_path_factory.mktemp("tiny"), **SHAPES[request.param]))


@pytest.fixture(scope="module")
def small(backend, small_checkpoint):
    return real_engine(small_checkpoint)


@pytest.fixture(scope="module", params=[6144, pytest.param(49152, marks=pytest.mark.slow)])
def real_layer(backend, request):
    """One layer of the default model's own shapes, and an eighth of its head or all of it: 49152 x 576."""
    return real_engine(seeded_checkpoint(Llama(), "llama", {**REAL_LAYER, "vocab_size": request.param}))


@pytest.mark.on_jax(most=1)
@settings(max_examples=15, **PATIENT)
@given(data=st.data())
def test_logits_do_not_know_their_company(small, data):
    """Batch sizes 1 to 9, shuffled places, chunks, joining and leaving at any step."""
    check_company(small, data.draw(company(small.vocab)))


@settings(max_examples=4, **PATIENT)
@given(data=st.data())
def test_real_weight_shapes_do_not_know_their_company(real_layer, data):
    check_company(real_layer, data.draw(company(real_layer.vocab)))


@pytest.mark.slow
@settings(max_examples=300, **PATIENT)
@given(data=st.data())
def test_logits_do_not_know_their_company_at_length(small, data):
    check_company(small, data.draw(company(small.vocab)))


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("length", [300, 129, 128, 127, 2, 1])
def test_pieces_are_the_whole_are_token_by_token(small, length):
    """Spec ch. 3: the same bits for chunks of 1, 7, 64 and 2048."""
    ids = np.random.default_rng(length).integers(0, small.vocab, length)
    whole, _ = small.alone(ids, 3)
    for chunk in (1, 7, 64):
        assert_same_bits(whole, small.alone(ids, 3, chunk)[0], f"chunk {chunk}")


def test_real_shapes_in_pieces(real_layer):
    ids = np.random.default_rng(1).integers(0, real_layer.vocab, 131)
    whole, _ = real_layer.alone(ids, 2)
    for chunk in (1, 7, 64):
        assert_same_bits(whole, real_layer.alone(ids, 2, chunk)[0], f"chunk {chunk}")


def logits_over_pages(loaded, ids, page_size, order, fill):
    """Logits [T, V] of a whole prompt over pages of `page_size`, numbered by `order`, that held `fill` before."""
    steps, place = [[Feed(0, 0, len(ids))]], Place(0, tuple(order))
    return loaded.run([ids], steps, places=[place], page_size=page_size, context=384, chunk=384, held=fill)[0]


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("length", [300, 1, 15, 16, 17, 127, 128, 129])
@pytest.mark.parametrize("page_size", [16, 64, 128, 384])
def test_dense_is_paged_whatever_the_pages_held(backend, small_checkpoint, page_size, length):
    """Spec V4, V6, V8: any numbering of the pages, NaN behind the row and in free ones."""
    loaded = loaded_family(Llama(), small_checkpoint)
    rng = np.random.default_rng(length)
    ids = rng.integers(0, loaded.config.vocab_size, length)
    dense = logits_over_pages(loaded, ids, 384, [0], 0.0)
    assert np.all(np.isfinite(dense))
    order = rng.permutation(384 // page_size + 3)
    assert_same_bits(dense, logits_over_pages(loaded, ids, page_size, order, np.nan))


@pytest.mark.parametrize("shape", [(576, 1536), (1536, 576), (49152, 576), (2049, 60), (5, 3)])
def test_a_product_does_not_know_its_place(shape):
    """Row products at real weight shapes, rows shuffled, T = 1 … 9."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape, np.float32)
    x = rng.standard_normal((9, shape[1]), np.float32)
    alone = np.concatenate([row_products(weight, row[None]) for row in x])
    np.testing.assert_allclose(alone, x @ weight.T, rtol=0, atol=1e-4 * shape[1] ** 0.5)
    for count in range(1, 10):
        order = rng.permutation(9)[:count]
        assert_same_bits(alone[order], row_products(weight, np.ascontiguousarray(x[order])))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_does_not_know_its_place(name):
    """Vector units treat the tail of an array apart: the values must not show it."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((9, 101)) * 4).astype(np.float32)
    whole = ACTIVATIONS[name](x)
    for row in range(9):
        for start in (0, 1, 7):
            assert_same_bits(whole[row : row + 1, start:], ACTIVATIONS[name](x[row, start:].copy())[None])


def test_attention_is_the_formula():
    """Against float64 softmax over the row's own positions, at every block edge."""
    rng = np.random.default_rng(0)
    kv_heads, group, dim, value_dim = 2, 3, 24, 16
    keys = rng.standard_normal((1, kv_heads, 384, dim), np.float32)
    values = rng.standard_normal((1, kv_heads, 384, value_dim), np.float32)
    q = rng.standard_normal((kv_heads, group, dim), np.float32)
    for position in (0, 1, 126, 127, 128, 129, 255, 256, 300):
        scores = np.einsum("kgd,kpd->kgp", q.astype(np.float64), keys[0, :, : position + 1]) * 0.2
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("kgp,kpd->kgd", weights, values[0, :, : position + 1])
        ours = attend_token(q, keys, values, np.array([0]), position, 0.2)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-6)  # float32 sums of up to 300 values near 1
