"""The search among the largest values of a row, which GPUs run where rows keep few, against NumPy, bit for bit. S42."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_digit_search import rows_of, same_bits

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.filters import top_k, top_p
from mlxcel.plugins.sampling.leading import LISTED, leading, listed_by_count, listed_by_mass
from mlxcel.plugins.sampling.masses import masses
from mlxcel.plugins.sampling.stage_sets import USUAL
from mlxcel.plugins.sampling.threshold import among_best, ordered_image, tree_sum, within_mass

KINDS = ["normal", "ties", "minus_inf", "tiny", "one_value", "one_hot", "one_block"]
SIZES = [1, 7, 64, 65, 317, 1024, 1025]
CASES = [*((kind, size) for kind in KINDS for size in SIZES), ("ties", 49152), ("one_block", 49152)]
LARGE = [pytest.param(*case, marks=pytest.mark.slow) for case in (("normal", 128256), ("minus_inf", 151936))]

listing = jax.jit(leading)
by_count = jax.jit(listed_by_count)
by_mass = jax.jit(listed_by_mass)


def logits(kind, size):
    """Four rows of float32, each with a finite value and none with NaN."""
    if kind == "one_hot":
        z = np.full((4, size), -np.inf, np.float32)
        z[np.arange(4), [0, size // 2, size // 3, size - 1]] = 2.5
        return z
    z = rows_of("normal" if kind == "one_block" else kind, size)
    if kind == "one_block":  # nearly all of the largest side by side, so that blocks of them go on together
        z[:, size // 4 : size // 4 + 80] += 50
        z[:, -1] += 200
    return z


@pytest.mark.parametrize(("kind", "size"), [*CASES, *LARGE])
def test_the_largest_values_in_their_order(kind, size):
    image = ordered_image(np, logits(kind, size))
    expected = -np.sort(-image.astype(np.int64), axis=-1)[:, :LISTED]
    found = np.asarray(listing(image))
    assert found.shape == (4, LISTED)
    assert np.array_equal(found[:, : min(size, LISTED)], expected)
    assert not found[:, size:].any()


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_the_same_places_are_kept(kind, size):
    """Spec S42: by rank, and by mass among what rank left, where p is from 0 to 1 and where a sum meets its bound."""
    z = logits(kind, size)
    listed = listing(ordered_image(np, z))
    for ranks in ([1, 2, 40, 64], [64, 63, 3, 17]):
        count = np.minimum(np.array(ranks, np.int32), size)[:, None]
        image = ordered_image(np, z)
        assert np.array_equal(image >= np.asarray(by_count(listed, count)), among_best(np, image, count))
        left = top_k(np, z, count)
        image, row = ordered_image(np, left), masses(np, left)
        # Exactly the mass above some value that is left: one ulp in a sum would show.
        met = np.take_along_axis(np.asarray(listed), np.maximum(count - 1 - np.array([[0], [1], [9], [2]]), 0), axis=-1)
        edge = tree_sum(np, row.weight * (image > met))
        shares = np.array([[0], [0.3], [0.95], [1]], np.float32)
        for bound in (shares * row.whole, np.flip(shares) * row.whole, edge, np.nextafter(edge, np.float32(9))):
            stays = image >= np.asarray(by_mass(image, listed, row.weight, bound))
            kept = left > -np.inf  # what rank removed has no weight, and stays removed
            assert np.array_equal(stays & kept, within_mass(np, image, row.weight, bound) & kept)


def test_a_row_does_not_know_its_company():
    z = logits("normal", 1025)
    crowd = np.asarray(listing(ordered_image(np, z)))
    for r in range(4):
        assert same_bits(listing(ordered_image(np, z[r : r + 1])), crowd[r : r + 1])


def test_the_chain_draws_what_it_draws_by_halves(monkeypatch):
    """Rows of a step as a GPU runs it, greedy ones and ones without filters too."""
    size = 1025
    sampler = ChainSampler(vocab=size)
    rows = [
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
        {"top_k": 64, "top_p": 0.5},
        {"temperature": 0},
        {"top_k": 3, "temperature": 1.5},
    ]
    states = [
        sampler.open(SequenceSpec("row", np.zeros(1, np.int32), SamplingParams(seed=seed, **row)))
        for seed, row in enumerate(rows)
    ]
    sampling = sampler.pack(states, [9] * 4, [False] * 4, closed=True)
    assert sampling.stages == USUAL

    def drawing():
        carry = Carry(np.zeros(4, np.int32), np.zeros(4, np.float32))
        return jax.jit(lambda z: sampler.draw(jnp, z, sampling, carry)[:2])

    by_halves, largest = drawing(), drawing()
    for kind in ("normal", "ties", "one_value", "one_block"):
        z = jnp.asarray(logits(kind, size))
        expected, _ = by_halves(z)
        with monkeypatch.context() as patch:
            patch.setattr("jax.lax.platform_dependent", lambda *args, default, cuda: cuda(*args))
            tokens, status = largest(z)
        assert same_bits(tokens, expected), kind
        assert not np.asarray(status).any()


def test_a_gpu_looks_among_them_and_has_no_loop():
    """Nor has a CPU anything but its own search: there, nobody lists."""
    z = jnp.asarray(logits("normal", 1025))

    def both(z, far):
        listed = None if far else leading(ordered_image(jnp, z))
        left = top_k(jnp, z, jnp.full((4, 1), 40), listed)
        return top_p(jnp, left, jnp.full((4, 1), jnp.float32(0.9)), listed=listed)

    found = {}
    for far in (False, True):
        traced = jax.jit(functools.partial(both, far=far)).trace(z)
        texts = {each: traced.lower(lowering_platforms=(each,)).as_text() for each in ("cuda", "cpu")}
        assert "stablehlo.while" in texts["cpu"]
        assert "stablehlo.while" not in texts["cuda"]
        found[far] = texts["cuda"]
    # Sixteen candidates at once are looked at by the search over all values alone.
    assert "x16xf32>" not in found[False]
    assert "x16xf32>" in found[True]
