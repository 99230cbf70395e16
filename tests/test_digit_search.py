"""The search by digits, which GPUs run, against the one by halves and NumPy's, bit for bit. Spec S42."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel.plugins.sampling.digits import least_by_count, least_by_mass, tree_of_pairs
from mlxcel.plugins.sampling.masses import masses
from mlxcel.plugins.sampling.threshold import _halved, among_best, ordered_image, tree_sum, within_mass

SIZES = [1, 2, 7, 317]
ROWS = 4
KINDS = ["normal", "ties", "minus_inf", "tiny", "one_value"]
CASES = [
    *((kind, size) for kind in KINDS for size in SIZES),
    ("minus_inf", 49152),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("normal", 49152), ("ties", 128256))),
]


def rows_of(kind, size):
    """Four rows of float32 logits, each with a finite value and none with NaN."""
    rng = np.random.default_rng([size, len(kind)])
    z = (rng.standard_normal((ROWS, size)) * 4).astype(np.float32)
    if kind == "ties":
        return np.round(z)
    if kind == "minus_inf":
        z[rng.random((ROWS, size)) < 0.4] = -np.inf
        z[:, size // 2] = 1.5
    elif kind == "tiny":
        z = rng.choice(np.array([0.0, -0.0, 1e-30, -1e-30, 1e-38, -3e-38, 0.5, 40], np.float32), (ROWS, size))
    elif kind == "one_value":
        z[:] = -1.25
    return z


def same_bits(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def top_of(image):
    return image.max(axis=-1, keepdims=True)


counted, weighed, added = jax.jit(least_by_count), jax.jit(least_by_mass), jax.jit(tree_of_pairs)


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_counts_by_digits_and_by_halves_are_one_threshold(kind, size):
    """Spec S42: the same t, and the same places as NumPy finds, for ranks from 1 to beyond V."""
    image = ordered_image(np, rows_of(kind, size))
    for ranks in ([1, 2, 40, 10**6], [size, max(1, size - 1), max(1, size // 2), 317]):
        count = np.array(ranks, np.int32)[:, None]

        def fewer_above(t, count=count):
            return np.sum(image > t, axis=-1, keepdims=True) < count

        found = np.asarray(counted(image, count))
        assert same_bits(found, _halved(np, np.zeros_like(top_of(image)), top_of(image), fewer_above))
        assert np.array_equal(image >= found, among_best(np, image, count))


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_masses_by_digits_and_by_halves_are_one_threshold(kind, size):
    """Spec S42: the same t, and the same places as NumPy finds, for p from 0 to 1 and where a sum meets its bound."""
    z = rows_of(kind, size)
    image, row = ordered_image(np, z), masses(np, z)
    # Exactly the mass above some value of each row: one ulp in a sum would show.
    met = np.take_along_axis(image, np.array([[0], [size // 2], [size - 1], [size // 3]]), axis=-1)
    edge = tree_sum(np, row.weight * (image > met))
    for bound in (np.array([[0], [0.3], [0.95], [1]], np.float32) * row.whole, edge, np.nextafter(edge, np.float32(9))):

        def little_above(t, bound=bound):
            return tree_sum(np, row.weight * (image > t)) < bound

        found = np.asarray(weighed(image, top_of(image), row.weight, bound))
        assert same_bits(found, _halved(np, np.zeros_like(top_of(image)), top_of(image), little_above))
        assert np.array_equal(image >= found, within_mass(np, image, row.weight, bound))


@pytest.mark.parametrize(
    "size",
    [
        *SIZES,
        3,
        8,
        9,
        65,
        513,
        49152,
        *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 63, 64, 128256, 151936)),
    ],
)
def test_the_tree_of_pairs_has_the_bits_of_the_tree_of_slices(size):
    """Addition in another order rounds otherwise for nearly every row of this size."""
    x = np.random.default_rng(size).random((3, size), np.float32) ** 8
    assert same_bits(added(x), tree_sum(np, x)[:, 0])


@pytest.mark.parametrize("image", [[[0, 0, 0]], [[2**32 - 1, 0, 5]], [[2**31, 2**31 - 1, 7]], [[15, 16, 17]]])
def test_every_uint32_can_be_the_threshold(image):
    image, ones = np.array(image, np.uint32), np.ones((1, 3), np.float32)
    for rank in (1, 2, 3):
        expected = np.sort(image[0])[::-1][rank - 1]
        assert counted(image, np.array([[rank]], np.int32))[0, 0] == expected
        assert weighed(image, top_of(image), ones, np.array([[rank]], np.float32))[0, 0] == expected


def test_a_row_does_not_know_its_company():
    z = rows_of("normal", 317)
    image, row = ordered_image(np, z), masses(np, z)
    bound = np.array([[0.1], [0.5], [0.9], [0.99]], np.float32) * row.whole
    crowd = np.asarray(weighed(image, top_of(image), row.weight, bound))
    for r in range(ROWS):
        own = slice(r, r + 1)
        alone = weighed(image[own], top_of(image)[own], row.weight[own], bound[own])
        assert same_bits(alone, crowd[own])


def test_a_gpu_gets_digits_and_a_cpu_halves():
    """No loop in what a GPU is given (its launches would be one after another, each by the host)."""
    z = jnp.asarray(rows_of("normal", 317))
    weight, bound, count = jnp.exp(z), jnp.ones((ROWS, 1)), jnp.full((ROWS, 1), 40)
    for search in (
        functools.partial(among_best, jnp, count=count),
        functools.partial(within_mass, jnp, weight=weight, bound=bound),
    ):
        traced = jax.jit(lambda z, search=search: search(ordered_image(jnp, z))).trace(z)
        texts = {each: traced.lower(lowering_platforms=(each,)).as_text() for each in ("cuda", "cpu")}
        assert "stablehlo.while" in texts["cpu"]
        assert "stablehlo.while" not in texts["cuda"]
