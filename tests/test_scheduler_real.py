"""Real arithmetic through the scheduler: every row is, bit for bit, what it is alone (spec R2, C18, C52, X8)."""

import numpy as np
import pytest
from cache_rows import caching, ids_of
from layered_family import layered_checkpoint
from real_engine import assert_same_bits

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.plugins.prefill.chunked import ChunkedPlanner

LAYERS = {"full": ("full", "full"), "window": ("window 16", "full"), "state": ("state", "full")}
CHUNK, BUSY = 32, 8

ARMS = {
    "dense": {"store": "dense", "cache": False},
    "dense, cache": {"store": "dense", "cache": True},
    "paged": {"store": "paged", "cache": False},
    "paged, short": {"store": "paged", "cache": False, "pages": 8},
    "paged, cache": {"store": "paged", "cache": True},
    "paged, cache, short": {"store": "paged", "cache": True, "pages": 8},
    "paged, short, read before the next": {"store": "paged", "cache": True, "pages": 8, "force_sync": True},
    "paged, short, not mixed": {"store": "paged", "cache": False, "pages": 8, "mixed": False},
}

KINDS = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 7, "mirostat": 2},
    {"dry_multiplier": 0.8, "dry_sequence_breakers": ()},
)


def asked(seed):
    """(name, ids, params) of twelve requests over a tree of prompts."""
    rng = np.random.default_rng(seed)
    stems = [ids_of(30, seed=stem) for stem in (1, 2)]
    for index in range(12):
        stem = stems[int(rng.integers(2))][: int(rng.integers(1, 31))]
        own = ids_of(int(rng.integers(1, 30)), seed=100 + index)
        params = {**KINDS[index % len(KINDS)], "max_tokens": int(rng.integers(1, 25))}
        yield f"r{index}", np.concatenate([stem, own]), params


def scheduler_of(made, *, cache, force_sync=False, mixed=None):
    engine = made.engine
    settings = SchedulerSettings.resolve(
        engine.caps, engine.level, chunk=CHUNK, chunk_busy=BUSY, force_sync=force_sync, mixed=mixed
    )
    idle, busy = (ChunkedPlanner(chunk=size, level=engine.level, caps=engine.caps) for size in (CHUNK, BUSY))
    return Scheduler(
        engine,
        planner=idle,
        busy_planner=busy,
        settings=settings,
        cache=made.cache if cache else None,
        clock=made.clock,
    )


def opened(engine):
    """By request id, the sequence ids of rows that are opened from now on."""
    found = {}

    def note(call):
        def noted(spec, *rest):
            found[spec.request_id] = call(spec, *rest)
            return found[spec.request_id]

        return noted

    engine.open, engine.adopt = note(engine.open), note(engine.adopt)
    return found


@pytest.fixture(scope="module")
def alone(backend):
    """(ids, logits) by layers and seed: each request on an engine that nobody shares."""
    known = {}

    def runs(layers, seed):
        if (layers, seed) not in known:
            made = caching(layered_checkpoint(*LAYERS[layers], vocab_size=61), store="dense", slots=1, chunk=CHUNK)
            known[layers, seed] = {
                name: made.run(ids, allowed=False, keep=False, **{"steps": 0, **params})
                for name, ids, params in asked(seed)
            }
        return known[layers, seed]

    return runs


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("arm", ARMS)
def test_company_storage_cache_preemption_and_order_change_no_bit(layers, arm, alone):
    """Twelve rows that join at any time, on four places, in a pool that is large or always short."""
    options = dict(ARMS[arm])
    store, pages = options.pop("store"), options.pop("pages", None)
    preempted = 0
    for seed in (1, 2) if layers == "full" else (1,):
        made = caching(
            layered_checkpoint(*LAYERS[layers], vocab_size=61), store=store, slots=4, context=128, pages=pages,
            chunk=CHUNK,
        )  # fmt: skip
        scheduler, numbers = scheduler_of(made, **options), opened(made.engine)
        rng, replies = np.random.default_rng(seed), {}
        for name, ids, params in asked(seed):
            chosen = SamplingParams(**{"temperature": 0, "seed": 0, **params})
            replies[name] = scheduler.submit(Request((SequenceSpec(name, ids.astype(np.int32), chosen),)))
            for _ in range(int(rng.integers(0, 6))):
                scheduler.tick()
        while scheduler.tick():
            pass
        for name, reply in replies.items():
            (result,) = reply.results()
            expected = alone(layers, seed)[name]
            assert result.token_ids == tuple(expected.ids), f"{name} of seed {seed}"
            first = len(result.prompt_ids)
            kept = [made.real.backend.kept[numbers[name], first + n] for n in range(len(expected.ids))]
            assert_same_bits(np.stack(kept), expected.logits, name)
        preempted += scheduler.stats().preemptions_total.total()
        assert made.kv.stats().owned == 0
    assert (preempted > 0) is (pages is not None)


@pytest.mark.on_jax(most=0)
def test_h_f1_h_f3_h_f4_seeded_rows_among_unseeded_ones(backend):
    """H-F1, H-F3, H-F4: seeds 1, 1, 2, 2 and two of their own, shuffled: each by its own, token 1 included."""
    prompt = ids_of(9).astype(np.int32)
    for order in ((0, 1, 2, 3, 4, 5), (5, 2, 0, 4, 3, 1)):
        made = caching(store="paged", slots=6)
        scheduler = scheduler_of(made, cache=True)
        seeds, replies = (1, 1, 2, 2, 77, 78), {}
        for index in order:
            params = SamplingParams(temperature=1.5, seed=seeds[index], max_tokens=8)
            replies[index] = scheduler.submit(Request((SequenceSpec(f"r{index}", prompt, params),)))
        while scheduler.tick():
            pass
        ids = [replies[index].results()[0].token_ids for index in range(6)]
        assert ids[0] == ids[1] != ids[2] == ids[3]
        for index, seed in enumerate(seeds):
            lone = caching(store="dense").run(prompt, temperature=1.5, seed=seed, max_tokens=8)
            assert ids[index] == tuple(lone.ids)
