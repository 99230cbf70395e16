"""KV of a row that failed on the JAX backend: what is not finite in it does not outlive it."""

import jax.numpy as jnp
import numpy as np
import pytest
from cache_rows import caching, detached, ids_of
from keeping_jax import KeepingJax
from layered_family import Layered, layered_checkpoint
from real_engine import assert_same_bits, real_engine
from spoilt_checkpoint import SpoiltCheckpoint

from mlxcel.core.prefix import DetachedKV
from mlxcel.errors import NumericFault
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.kv.paged import PagedKV

BAD = 7
"""The token whose embedding is spoilt."""


def checkpoint():
    return SpoiltCheckpoint(layered_checkpoint("full", "window 16", "state", "full"), {"embed": (BAD, 1)})


def finite(made):
    return [bool(np.isfinite(np.asarray(array)).all()) for array in made.backend.kv_arrays()]


@pytest.mark.parametrize("store", [pytest.param(DenseKV, marks=pytest.mark.slow), PagedKV])
@pytest.mark.parametrize("drawn", [0, 3], ids=["in its prompt", "as it decodes"])
def test_pages_rings_and_state_of_a_row_with_nan_are_finite_behind_it(store, drawn):
    """And whoever comes next in its place has the bits of a lone run."""
    ids = np.setdiff1d(np.arange(1, 41), [BAD])
    options = {"slots": 1, "context": 128, "kv_store": store, "pages": 8 if store is PagedKV else None}
    expected, _ = real_engine(checkpoint(), Layered(), backend=KeepingJax(device="cpu"), **options).alone(ids, 4)
    made = real_engine(checkpoint(), Layered(), backend=KeepingJax(device="cpu"), **options)
    assert all(finite(made))
    prompt = ids if drawn else np.append(ids, [BAD, 3])
    row = made.open(prompt, max_tokens=9, logit_bias={BAD: 100.0} if drawn else {})
    outcome = made.engine.prefill(row, made.plan(prompt))
    if drawn:
        assert outcome.token == BAD
        outcome = made.engine.step([row])[0]
    assert isinstance(outcome.error, NumericFault)
    made.engine.close(row)
    assert all(finite(made))
    logits, _ = made.alone(ids, 4)
    assert_same_bits(logits, expected)


def test_pages_that_others_hold_too_stay_as_they_are():
    """0 for NaN in a prefix would be a wrong answer to whoever takes it up next, where NaN is an error."""
    made = caching(layered_checkpoint("full", "full"), backend=KeepingJax(device="cpu"))
    ids = ids_of(64)
    prefix = detached(made, 48, ids)
    assert isinstance(prefix, DetachedKV)
    backend, (first, *_) = made.real.backend, prefix.pages
    running = backend._running
    running.kv = tuple(leaf.at[first, 0, 3].set(jnp.nan) for leaf in running.kv)
    for _ in range(2):
        row = made.engine.adopt(made.spec(ids), prefix, 48)
        plan = made.plan(ids, adopted=48)
        assert isinstance(made.engine.prefill(row, plan).error, NumericFault)
        made.engine.close(row)
        for leaf in running.kv:
            spoilt = np.argwhere(~np.isfinite(np.asarray(leaf)).all(axis=-1))
            assert spoilt.tolist() == [[first, 0, 3]]
