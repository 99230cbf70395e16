"""How the parts of a depth are added: in index order, whatever is kept in registers and what in shared memory. The
kernels' own functions, without a GPU: what a launch waits for is there at once."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mlxcel_jax_cuda.kernels import row_products_parts
from mlxcel_jax_cuda.kernels.row_products_parts import RUN, added_in_order, sums_of_parts, sums_with_room

STEPS = 8


class Accumulator:
    """Of one part: 0 where it begins."""

    def __init__(self, like):
        self.sum = np.zeros(like.shape, np.float32)

    def __getitem__(self, _):
        return jax.numpy.asarray(self.sum)


class Room:
    def __init__(self, runs):
        self.shape = runs, 64, RUN
        self.at = [{"value": np.full((64, RUN), np.nan, np.float32)} for _ in range(runs)]


@pytest.fixture
def by_hand(monkeypatch):
    """Loops turn in Python, so that shared memory is what was last written to it."""

    def turns(begin, end, body, carry):
        for i in range(begin, end):
            carry = body(i, carry)
        return carry

    monkeypatch.setattr(lax, "fori_loop", turns)
    monkeypatch.setattr(pl, "run_scoped", lambda scope, *like: scope(*map(Accumulator, like)))
    monkeypatch.setattr(mosaic_gpu, "wgmma_wait", lambda _: None)
    monkeypatch.setattr(mosaic_gpu, "wgmma_accumulator_load", lambda acc, wait_n: acc[...])
    monkeypatch.setattr(mosaic_gpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(row_products_parts, "load", lambda ref: ref["value"])
    monkeypatch.setattr(row_products_parts, "store", lambda ref, value: ref.update(value=value))


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize(("width", "count", "away"), [(256, 1, 3), (128, 2, 3), (64, 1, 0), (64, 2, 4)])
def test_parts_are_added_in_index_order_wherever_they_are_kept(split, width, count, away, by_hand):
    rng = np.random.default_rng(1)
    products = rng.normal(size=(STEPS, count, 64, width)).astype(np.float32) * 10.0 ** rng.integers(
        -3, 4, (STEPS, 1, 1, 1)
    )
    products = products.astype(np.float32)
    accumulators = [jax.ShapeDtypeStruct((64, width), np.float32)] * count
    wanted = None
    for part in np.split(products, split):
        total = np.zeros_like(part[0])
        for product in part:
            total += product
        wanted = total if wanted is None else wanted + total

    def asked():
        released = []

        def multiply(k, sums):
            for acc, product in zip(sums, products[k], strict=True):
                acc.sum += product

        return (split, STEPS, accumulators, multiply, released.append), released

    given, released = asked()
    sums_of = sums_with_room(*given, Room(away))
    assert released == list(range(STEPS))
    for i in range(width // RUN):
        for got, exact in zip(sums_of(i), wanted, strict=True):
            np.testing.assert_array_equal(got, exact[:, i * RUN : (i + 1) * RUN])
    given, released = asked()
    sums, ready = sums_of_parts(*given, lambda: "ready")
    assert released == list(range(STEPS))
    assert ready == "ready"
    np.testing.assert_array_equal(sums, wanted)


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_parts_that_are_there_are_added_in_index_order(split):
    rng = np.random.default_rng(2)
    parts = (rng.normal(size=(split, 2, 64, RUN)) * 10.0 ** rng.integers(-3, 4, (split, 1, 1, 1))).astype(np.float32)
    wanted = parts[0].copy()
    for part in parts[1:]:
        wanted += part
    np.testing.assert_array_equal(added_in_order(split, lambda i: list(parts[i])), wanted)
