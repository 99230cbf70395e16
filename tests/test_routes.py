"""Which attention each layer ran, as a step's report says it (docs/spec/engine.md 2.7)."""

import attrs
import pytest
from layered_family import Layered, layered_checkpoint
from real_engine import real_engine
from tested_backends import REFERENCE

from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import Decode
from mlxcel_reference_numpy.storage import routes

LAYERS = ("full", "window 16", "state", "full+experts", "state")
CALLS = {"dense_gather": 2, "ring_gather": 1, "state_scan": 2}


class Reports:
    def __init__(self):
        self.routes = []

    def step_finished(self, report):
        self.routes.append(dict(report.routes))

    def request_finished(self, result):
        """Only steps are looked at."""


@pytest.mark.parametrize("count", [1, 3])
def test_every_layer_is_counted(backend, count):
    """Spec V24, V25: from what ran, in prompts and behind them. On the oracle that is once for each row, on JAX once
    for each executable that was launched, which is one for all rows that decode."""
    prefix, rows_a_call = ("ref_", 1) if backend == REFERENCE else ("", count)
    one_call = {f"{prefix}{name}": calls for name, calls in CALLS.items()}
    reports = Reports()
    real = real_engine(layered_checkpoint(*LAYERS), Layered(), observers=[reports])
    rows = [real.open([1, 2, 3]) for _ in range(count)]
    for row in rows:
        real.engine.prefill(row, real.plan([1, 2, 3], 2))
    parts = [Decode(row) for row in rows]
    real.engine.reserve(parts)
    real.engine.collect(real.engine.submit(parts))
    assert reports.routes[:-1] == [one_call] * 2 * count
    assert reports.routes[-1] == {name: calls * (count // rows_a_call) for name, calls in one_call.items()}


def test_storage_in_many_pages_has_a_route_of_its_own():
    """So that a run which asked for paged storage and got one big page is seen to be no evidence about it."""
    spec = Layered().kv_spec(Layered().parse_config(layered_checkpoint(*LAYERS)))
    dense = KVLayout(spec, pages=1, page_size=512, paged=False, slots=1, context=512, chunk=64)
    paged = attrs.evolve(dense, pages=32, page_size=16, paged=True)
    expected = ("ref_dense_gather", "ref_ring_gather", "ref_state_scan", "ref_dense_gather", "ref_state_scan")
    assert routes(dense) == expected
    assert routes(paged) == tuple(name.replace("dense", "paged") for name in expected)
