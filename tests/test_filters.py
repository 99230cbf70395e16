"""Filters and their threshold search against slow references with a sort, written from docs/spec/engine.md 4.6."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel.plugins.sampling.filters import min_p, top_k, top_p
from mlxcel.plugins.sampling.threshold import _halved, lowest_threshold, ordered_image, tree_sum

SIZES = [1, 2, 7, 317, 49152]

MARGIN = 1e-6
"""A mass or a bound nearer to its limit than this (relative) may fall on either side in float32."""

WORKED = np.log(np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.03, 0.01])).astype(np.float32)


def to_bf16(values):
    return np.asarray(jnp.asarray(values, jnp.bfloat16).astype(jnp.float32))


def rows_of(kind, size):
    """Four rows of float32 logits, each with at least one finite value."""
    rng = np.random.default_rng([size, len(kind)])
    z = (rng.standard_normal((4, size)) * 4).astype(np.float32)
    if kind == "ties":
        z = np.round(z)
    elif kind == "minus_inf":
        z[rng.random((4, size)) < 0.4] = -np.inf
        z[:, size // 2] = 1.5
    elif kind == "extreme":
        z = np.where(rng.random((4, size)) < 0.5, np.float32(1e4), np.float32(-1e4)) + np.round(z)
    elif kind == "bf16":
        z = to_bf16(z * 4)
    elif kind == "zeros":
        z = rng.choice(np.array([0.0, -0.0, 1e-30, -1e-30, 0.5], np.float32), (4, size))
    return z


KINDS = ["normal", "ties", "minus_inf", "extreme", "bf16", "zeros"]


def by_value(row):
    """Distinct finite values, best first, with the number of places of each."""
    values, counts = np.unique(row[np.isfinite(row)].astype(np.float64), return_counts=True)
    return values[::-1], counts[::-1]


def top_k_reference(row, k):
    best_first = sorted(row.tolist(), reverse=True)
    return (row >= best_first[min(k, len(row)) - 1]) & np.isfinite(row)


def masses_above(row):
    """Distinct values, best first, and the part of the whole strictly above each."""
    values, counts = by_value(row)
    mass = counts * np.exp(values - values[0])
    return values, (np.cumsum(mass) - mass) / math.fsum(mass)


def top_p_reference(row, p):
    values, above = masses_above(row)
    assert np.min(np.abs(above[1:] - p), initial=1) > MARGIN, "not a decisive case: choose another p"
    kept = values[(above < p) | (values == values[0])]
    return row >= kept[-1]


def min_p_reference(row, p):
    bound = float(row.max()) + math.log(p)
    assert np.min(np.abs(row[np.isfinite(row)].astype(np.float64) - bound)) > MARGIN * max(1, abs(bound)), "decide"
    return row >= bound


def decisive_top_p(row, target):
    """A p near `target` half-way between two masses; `target` itself where one value holds all."""
    above = np.append(masses_above(row)[1], 1.0)
    edges = np.where(np.diff(above) > 8 * MARGIN)[0]
    place = edges[np.argmin(np.abs(above[edges] - target))]
    return np.float32((above[place] + above[place + 1]) / 2)


def decisive_min_p(row, target):
    """A p near `target` whose bound lies half-way between two values."""
    values = by_value(row)[0]
    bounds = np.append((values[1:] + values[:-1]) / 2, values[-1] - 1) - values[0]
    gaps = np.append((values[:-1] - values[1:]) / 2, 1.0)
    usable = (gaps > 8 * MARGIN * np.abs(values).max(initial=1)) & (bounds > -80)
    if not usable.any():
        return np.float32(target)
    return np.float32(np.exp(bounds[usable][np.argmin(np.abs(bounds[usable] - math.log(target)))]))


def survivors(function, xp, z, values):
    """The rows' survivor sets; the values of survivors must be the same bits as before."""
    column = np.asarray(values)[:, None]
    run = function if xp is np else jax.jit(function, static_argnums=0)
    out = np.asarray(run(xp, xp.asarray(z), xp.asarray(column)))
    kept = np.isfinite(out)
    assert out.dtype == np.float32
    assert np.all(np.isneginf(out[~kept]))
    assert np.array_equal(out[kept].view(np.uint32), z[kept].view(np.uint32))
    return kept


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return {"numpy": np, "jax": jnp}[request.param]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_keeps_exactly_what_a_sort_keeps(xp, kind, size):
    """Spec 4.6, S4: ties of the k-th stay, the two zeros are one value, -inf is no survivor."""
    z = rows_of(kind, size)
    for ks in ([1, 2, 3, 5], [40, 100, 316, 10**6], [1, size, max(1, size - 1), max(1, size // 2)]):
        kept = survivors(top_k, xp, z, np.array(ks, np.int32))
        for r, k in enumerate(ks):
            assert np.array_equal(kept[r], top_k_reference(z[r], k)), (r, k)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_top_p_keeps_exactly_what_a_sort_keeps(xp, kind, size):
    """Spec 4.6, S4: the mass strictly above decides; a maximum always stays."""
    z = rows_of(kind, size)
    for target in (0.0, 1e-4, 0.3, 0.9, 0.995):
        ps = [np.float32(target) if target == 0 else decisive_top_p(row, target) for row in z]
        kept = survivors(top_p, xp, z, np.array(ps, np.float32))
        for r, p in enumerate(ps):
            assert np.array_equal(kept[r], top_p_reference(z[r], float(p))), (r, p)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_min_p_keeps_exactly_what_the_formula_keeps(xp, kind, size):
    """Spec 4.6: z_i >= m + ln q."""
    z = rows_of(kind, size)
    for target in (1e-6, 0.05, 0.5, 0.99):
        ps = [decisive_min_p(row, target) for row in z]
        kept = survivors(min_p, xp, z, np.array(ps, np.float32))
        for r, p in enumerate(ps):
            assert np.array_equal(kept[r], min_p_reference(z[r], float(p))), (r, p)
    kept = survivors(min_p, xp, z, np.ones(4, np.float32))
    assert np.array_equal(kept, z == z.max(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("function", "value", "ids"),
    [
        (top_k, np.int32(3), [0, 1, 2]),
        (top_p, np.float32(0.7), [0, 1, 2]),
        (top_p, np.float32(0.91), [0, 1, 2, 3, 4]),
        (min_p, np.float32(0.2), [0, 1, 2, 3]),
    ],
)
def test_the_worked_row(xp, function, value, ids):
    """The table of spec 4.6, as far as its stages are in this version."""
    assert np.flatnonzero(survivors(function, xp, WORKED[None], value[None])[0]).tolist() == ids


def test_each_filter_sees_the_survivors_of_the_one_before():
    """Spec S4: renormalised. Behind top_k 3 the row .40 .25 .15 weighs .5, .3125, .1875."""
    z = np.where(survivors(top_k, np, WORKED[None], np.array([3], np.int32)), WORKED, np.float32(-np.inf))
    assert np.flatnonzero(survivors(top_p, np, z, np.array([0.49], np.float32))[0]).tolist() == [0]
    assert np.flatnonzero(survivors(top_p, np, z, np.array([0.8], np.float32))[0]).tolist() == [0, 1]
    assert np.flatnonzero(survivors(top_p, np, WORKED[None], np.array([0.8], np.float32))[0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (top_k, np.array([1, 3, 40, 300, 2, 7, 10, 1, 50], np.int32)),
        (top_p, np.array([0.0, 0.1, 0.5, 0.9, 0.99, 0.3, 0.7, 1e-4, 0.95], np.float32)),
        (min_p, np.array([0.9, 0.1, 0.05, 1e-5, 1.0, 0.3, 0.7, 0.01, 0.2], np.float32)),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_a_filtered_row_does_not_know_its_company(function, values, size):
    """Bits of the row alone and at every place of a shuffled batch of nine."""
    rng = np.random.default_rng(size)
    z = (rng.standard_normal((9, size)) * 3).astype(np.float32)
    order = rng.permutation(9)
    crowd = function(np, np.ascontiguousarray(z[order]), values[order][:, None])
    for place, r in enumerate(order):
        alone = function(np, z[r : r + 1], values[r : r + 1][:, None])
        assert np.array_equal(alone[0].view(np.uint32), crowd[place].view(np.uint32))


# --- the search ------------------------------------------------------------------------------------------------------


def test_the_integer_image_orders_as_the_values_do(xp):
    """Spec S42. Equal values have equal images, the two zeros too."""
    values = np.array([-np.inf, -3.4e38, -1e4, -1.5, -1e-30, -0.0, 0.0, 1e-30, 1.5, 1e4, 3.4e38, np.inf], np.float32)
    image = np.asarray(ordered_image(xp, xp.asarray(values[None])))[0].astype(np.int64)
    assert np.array_equal(np.sign(np.diff(image)), np.sign(np.diff(values.astype(np.float64))))


@pytest.mark.parametrize("threshold", [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1])
def test_the_search_is_exact_for_every_threshold(xp, threshold):
    """Spec S42: what holds is found for any uint32; the largest stays where nothing holds."""
    image = np.array([[5, 2**32 - 1, 0], [2**31, 7, 2**31 - 1], [0, 0, 0]], np.uint32)
    found = np.asarray(lowest_threshold(xp, xp.asarray(image), lambda t: t >= np.uint32(threshold)))
    assert np.array_equal(image >= found, (image >= threshold) | (image == image.max(axis=-1, keepdims=True)))


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4096])
@pytest.mark.parametrize("distinct", [1, 2, 40, 2**32])
def test_values_tried_one_by_one_and_halvings_find_the_same_places(size, distinct):
    """Ranks below, at and above what NumPy tries; rows that end in another way side by side."""
    rng = np.random.default_rng([size, distinct])
    image = (rng.integers(0, 2**32, (8, size)) // (2**32 // distinct)).astype(np.uint32)
    descending = -np.sort(-image.astype(np.int64))
    for scale in (1, 30, 510, 512, 514, 4000):
        rank = rng.integers(1, 1 + scale, (8, 1))

        def few_above(t, rank=rank):
            return np.sum(image > t, axis=-1, keepdims=True) < rank

        top = image.max(axis=-1, keepdims=True)
        ours = image >= lowest_threshold(np, image, few_above)
        assert np.array_equal(ours, image >= _halved(np, np.zeros_like(top), top, few_above))
        assert np.array_equal(ours, image >= np.take_along_axis(descending, np.minimum(rank, size) - 1, axis=-1))


@pytest.mark.parametrize("size", [*SIZES, 8, 9, 64, 65, 151936])
def test_the_tree_adds_every_value_once(xp, size):
    """Integers whose sum float32 holds exactly: any tree that drops or repeats one is off."""
    x = np.random.default_rng(size).integers(0, 100, (3, size)).astype(np.float32)
    assert np.array_equal(np.asarray(tree_sum(xp, xp.asarray(x)))[:, 0], x.sum(axis=-1, dtype=np.float64))


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_is_the_same_on_numpy_and_jax_and_in_any_company(size):
    x = np.random.default_rng(size).random((9, size), np.float32)
    whole = tree_sum(np, x)
    assert np.array_equal(whole, np.asarray(jax.jit(lambda a: tree_sum(jnp, a))(x)))
    for r in range(9):
        assert tree_sum(np, x[r : r + 1])[0, 0] == whole[r, 0]
    exact = float(sum(map(Fraction, x[0].tolist())))
    assert abs(float(whole[0, 0]) - exact) <= 20 * 2.0**-24 * exact  # at most 20 additions deep


def test_the_tree_is_monotone():
    """Spec S42: masks that grow give sums that never shrink, so a threshold on a mass is exact."""
    rng = np.random.default_rng(0)
    weight = rng.random((1, 317), np.float32) ** 20
    order = rng.permutation(317)
    sums = []
    for count in range(318):
        mask = np.zeros(317, bool)
        mask[order[:count]] = True
        sums.append(tree_sum(np, np.where(mask, weight, np.float32(0)))[0, 0])
    assert np.all(np.diff(sums) >= 0)
