"""The noise of docs/spec/engine.md 4.9: check values, independence, and agreement of array libraries."""

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel.plugins.sampling.noise import (
    CHOICE,
    DRAW,
    SPAN,
    XTC_GATE,
    choice_seed,
    gumbel,
    gumbel_argmax,
    row_keys,
    threefry2x32,
    uniform,
    words,
    words_at,
)

U32 = np.uint32

GUMBEL_ULPS = 2
"""Spec 4.9: in ulps at max(1, |n|), since the logarithm cancels near 0."""


def column(*values):
    return np.array(values, U32)


def keys(seed, position, purpose, xp=np):
    """K of spec 4.9 for arrays of seeds (Python integers) and positions."""
    low, high = column(*(s % 2**32 for s in seed)), column(*(s // 2**32 for s in seed))
    return row_keys(xp, xp.asarray(low), xp.asarray(high), xp.asarray(column(*position)), purpose)


def in_hex(*arrays):
    return [f"{int(word):08x}" for array in arrays for word in np.ravel(array)]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), "6b200159 99ba4efe"),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), "1cb996fc bb002be7"),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), "c4923a9c 483df7a0"),
    ],
)
@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_threefry_gives_the_published_words(xp, key, counter, expected):
    """Check values of spec 4.9."""
    pairs = [tuple(xp.asarray(column(word)) for word in pair) for pair in (key, counter)]
    assert in_hex(*threefry2x32(xp, *pairs)) == expected.split()


def test_threefry_agrees_with_another_implementation():
    """JAX's own generator hashes the first half of its counts against the second half."""
    counts = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=U32)
    theirs = jax.extend.random.threefry_2x32(jnp.asarray(column(0xDEADBEEF, 42)), jnp.asarray(counts))
    ours = threefry2x32(np, (column(0xDEADBEEF), column(42)), (counts[:1000], counts[1000:]))
    assert np.array_equal(np.concatenate(ours), np.asarray(theirs))


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_words_and_gumbel_of_seed_42(xp):
    """Check values of spec 4.9: K, the words of ids 0 … 3, their Gumbel values."""
    key = keys([42], [5], DRAW, xp)
    assert in_hex(*key) == ["436dbd8a", "294e53cc"]
    word = words(xp, key, 4)
    assert in_hex(word) == ["6166e3ef", "f42dbdcc", "32a6e481", "3a75b121"]
    assert np.allclose(gumbel(xp, word), [[0.73646, -1.12339, 1.51199, 1.35002]], rtol=0, atol=5e-6)  # printed digits


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_the_uniform_of_the_gate(xp):
    """Check values of spec 4.9: word 0 of purpose 1 and its uniform; all 24 bits count, 1 is never reached."""
    word = words(xp, keys([42], [5], XTC_GATE, xp), 1)
    assert in_hex(word) == ["0ffcb7fb"]
    assert round(float(uniform(xp, word)[0, 0]), 7) == 0.0624499
    ends = uniform(xp, xp.asarray(column(0, 255, 256, 0xFFFFFFFF)))
    assert np.asarray(ends).tolist() == [0, 0, 2.0**-24, 1 - 2.0**-24]


def test_the_seed_of_a_further_choice():
    """Check value of spec 4.9; choice 0 keeps the seed; each can be sent back as a seed, and is one of its own."""
    assert choice_seed(42, 1) == 0x6AF9300FDEC9B9E0
    for seed in (0, 42, 2**32, 2**63 - 1):
        assert choice_seed(seed, 0) == seed
        found = {choice_seed(seed, choice) for choice in range(50)}
        assert len(found) == 50
        assert all(0 <= made < 2**63 for made in found)
    low, high = keys([42], [7], CHOICE)
    assert choice_seed(42, 7) == (int(high[0]) << 32 | int(low[0])) & (2**63 - 1)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_single_words_are_those_of_the_whole_row(xp):
    rows = keys([3, 2**40 + 1, 2**63 - 1], [0, 7, 2**20], DRAW, xp)
    whole = np.asarray(words(xp, rows, 317))
    ids = np.random.default_rng(0).integers(0, 317, (3, 50))
    pairs = tuple(xp.broadcast_to(key[:, None], ids.shape) for key in rows)
    assert np.array_equal(np.asarray(words_at(xp, pairs, xp.asarray(ids))), np.take_along_axis(whole, ids, axis=-1))


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_no_id_that_no_noise_was_made_for_could_have_won(spread):
    """NumPy leaves ids far below the top alone; the id is that of the noise over the whole row, ties included."""
    rng = np.random.default_rng(int(spread))
    y = np.round(rng.random((50, 1000)).astype(np.float32) * np.float32(spread), 2)
    y[rng.random(y.shape) < 0.3] = -np.inf
    y[:, 17] = np.max(y, axis=-1)
    key = keys(rng.integers(0, 2**63, 50).tolist(), range(50), DRAW)
    expected = np.argmax(y + gumbel(np, words(np, key, 1000)), axis=-1)
    assert np.array_equal(gumbel_argmax(np, y, key), expected)
    traced = np.asarray(jax.jit(lambda y, low, high: gumbel_argmax(jnp, y, (low, high)))(y, *key))
    assert np.array_equal(traced, expected)


def test_noise_spans_less_than_its_bound():
    """The least and the greatest word give the least and the greatest noise."""
    low, high = gumbel(np, column(0, 2**32 - 1))
    assert abs(float(high) - float(low)) < SPAN - 0.3


def test_a_word_depends_on_its_id_alone():
    """Spec S35: neither the size of the vocabulary, odd or even, nor the other rows can move it."""
    rows = keys([3, 2**40 + 1, 2**63 - 1], [0, 7, 2**20], DRAW)
    whole = words(np, rows, 1000)
    for count in (1, 2, 7, 317, 999):
        assert np.array_equal(words(np, rows, count), whole[:, :count])
    for r in range(3):
        alone = words(np, (rows[0][r : r + 1], rows[1][r : r + 1]), 1000)
        assert np.array_equal(alone[0], whole[r])


def test_seed_position_and_purpose_all_count():
    """Both halves of the seed, the position, the purpose: changing one changes the whole row."""
    base = words(np, keys([42], [5], 0), 100)
    for other in (keys([43], [5], 0), keys([42 + 2**32], [5], 0), keys([42], [6], 0), keys([42], [5], 1)):
        assert not np.any(words(np, other, 100) == base)


@pytest.mark.parametrize("purpose", [0, 1, 2, 3, 64, 2**32 - 1])
def test_words_are_bit_equal_across_array_libraries(purpose):
    """Spec 4.9, over more than 10^6 of (seed, q, purpose, id) in all."""
    rng = np.random.default_rng(purpose)
    seeds = [int(s) for s in rng.integers(0, 2**63, 250)]
    positions = rng.integers(0, 2**31, 250).tolist()
    ours = words(np, keys(seeds, positions, purpose), 1001)
    theirs = jax.jit(lambda low, high: words(jnp, (low, high), 1001))(*keys(seeds, positions, purpose, jnp))
    assert ours.dtype == theirs.dtype == U32
    assert np.array_equal(ours, np.asarray(theirs))


def test_gumbel_agrees_with_float64_and_across_array_libraries():
    """Spec 4.9: 2 ulp at max(1, |n|), at both ends of the range, where the logarithm cancels, and between."""
    cancels = int(2**32 * (1 - 1 / np.e))
    ends = np.arange(1000, dtype=U32)
    word = np.concatenate([ends, ~ends, U32(cancels - 500) + ends, words(np, keys([1], [0], DRAW), 200_000)[0]])
    v = np.minimum((word.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    exact = -np.log(-np.log1p(-v.astype(np.float64)))
    ulp = np.spacing(np.maximum(1, np.abs(exact)).astype(np.float32)).astype(np.float64)
    ours = gumbel(np, word).astype(np.float64)
    theirs = np.asarray(jax.jit(lambda w: gumbel(jnp, w))(word)).astype(np.float64)
    for left, right in ((ours, exact), (theirs, exact), (ours, theirs)):
        assert np.max(np.abs(left - right) / ulp) <= GUMBEL_ULPS
    assert (round(ours.min(), 2), round(ours.max(), 2)) == (-2.81, 22.87)


def test_gumbel_of_a_row_does_not_know_its_company():
    """The bits of a row are the same alone and at any place of a batch: no vector tail rounds in its own way."""
    for count in (1, 2, 7, 317, 4099):
        key = keys(range(9), range(9), DRAW)
        whole = gumbel(np, words(np, key, count))
        for r in range(9):
            alone = gumbel(np, words(np, (key[0][r : r + 1], key[1][r : r + 1]), count))
            assert np.array_equal(alone[0].view(U32), whole[r].view(U32))
