"""Real engines with a prompt cache, and rows run through it, for tests that compare a hit with a miss."""

import attrs
import numpy as np
import pytest
from layered_family import Layered, layered_checkpoint
from real_engine import Real, real_engine
from tested_backends import KeepingNumpy

from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Decode
from mlxcel.core.prefix import Reject
from mlxcel.core.request import SequenceSpec
from mlxcel.errors import AdoptError
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.kv.kept_pages import CacheLimits
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.kv.prefix_cache import PrefixCache
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.clock import ManualClock

STORES = {"dense": DenseKV, "paged": PagedKV}
VOCAB = 61


@attrs.frozen
class Ran:
    """What came of one row."""

    ids: tuple
    logits: np.ndarray  # [drawn, V]
    cached: int
    match: object
    plan: object


@attrs.frozen
class Caching:
    """An engine, its store and its prompt cache."""

    real: Real
    cache: PrefixCache
    clock: ManualClock
    kv: object
    level: str = "R2"
    chunk: int = 2048

    @property
    def engine(self):
        return self.real.engine

    def spec(self, ids, *, salt=None, isolation=None, name="row", **params):
        chosen = SamplingParams(**{"temperature": 0, "seed": 0, **params})
        return SequenceSpec(name, np.asarray(ids, np.int32), chosen, cache_salt=salt, isolation=isolation)

    def plan(self, ids, match=None, **options):
        planner = ChunkedPlanner(chunk=self.chunk, level=self.level, caps=self.engine.caps)
        if match is not None:
            options |= {"adopted": match.length, "adopted_prefilled": match.prefilled}
        return planner.build(np.asarray(ids, np.int32), **options)

    def run(self, ids, steps=5, *, allowed=True, keep=True, **options):
        """One row, alone, from lookup to donation."""
        spec = self.spec(ids, **{"max_tokens": steps, **options})
        row, match = self.cache.open(self.engine, spec, allowed=allowed)
        plan = self.plan(ids, match)
        outcome = self.engine.prefill(row, plan)
        while outcome.cause is None:
            assert outcome.error is None, outcome.error
            outcome = self.engine.step([row])[0]
        if keep:
            self.cache.donate(self.engine, row, allowed=allowed)
        self.kv.check() if isinstance(self.kv, PagedKV) else None
        logits, output = self.real.close(row)
        return Ran(output, logits, match.length, match, plan)


def caching(
    checkpoint=None,
    family=None,
    *,
    store="paged",
    limits=None,
    slots=4,
    context=512,
    page_size=16,
    pages=None,
    chunk=2048,
    backend=None,
    index=None,
    page_bytes=None,
    identity=None,
    tokenizer=None,
):
    made = []

    def keeping(**options):
        made.append(STORES[store](**options))
        return made[0]

    checkpoint = checkpoint or layered_checkpoint("full", "full", vocab_size=VOCAB)
    family = family or Layered()
    real = real_engine(
        checkpoint,
        family,
        slots=slots,
        context=context,
        chunk=chunk,
        kv_store=keeping,
        page_size=page_size,
        pages=pages,
        backend=backend,
        identity=identity,
        tokenizer=tokenizer,
    )
    spec = family.kv_spec(family.parse_config(checkpoint))
    clock = ManualClock()
    level = real.engine.level
    cache = PrefixCache(
        kv=made[0],
        kv_spec=spec,
        key=real.engine.kv_key,
        level=level,
        chunk=chunk,
        page_bytes=made[0].page_size * spec.bytes_per_position(4) if page_bytes is None else page_bytes,
        limits=limits or CacheLimits(),
        clock=clock,
        index=index,
    )
    return Caching(real, cache, clock, made[0], level, chunk)


def ids_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def step_all(engine, rows):
    """One decode step over rows."""
    parts = [Decode(row) for row in rows]
    engine.reserve(parts)
    return engine.collect(engine.submit(parts))


IDS = ids_of(150)
STEPS = 5
"""The row that tests hand over, and how many tokens it draws."""


def finished(made, ids=IDS, steps=STEPS, **options):
    """A row that ended, open still."""
    row = made.engine.open(made.spec(ids, max_tokens=steps, **options))
    outcome = made.engine.prefill(row, made.plan(ids))
    while outcome.cause is None:
        outcome = made.engine.step([row])[0]
    return row


def detached(made, length=None, ids=IDS, **options):
    row = finished(made, ids, **options)
    prefix = made.engine.detach(row, length)
    made.engine.close(row)
    return prefix


def go_on(made, row, plan):
    outcome = made.engine.prefill(row, plan)
    while outcome.cause is None:
        assert outcome.error is None, outcome.error
        outcome = made.engine.step([row])[0]
    return made.real.close(row)


def refusal(call):
    """Why a prefix was not adopted."""
    with pytest.raises(AdoptError) as caught:
        call()
    assert caught.value.code == caught.value.reason
    return Reject(caught.value.reason)


class AtR1(KeepingNumpy):
    """Says that it is at R1, with pieces of 16."""

    @property
    def caps(self):
        return attrs.evolve(super().caps, level="R1", mixed_steps=False, r1_tokens=16)
