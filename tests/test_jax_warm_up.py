"""Programs compiled side by side before an engine is ready: each once, under a name, and no more after an interrupt."""

import threading

import numpy as np
import pytest
from other_threads import PATIENCE
from real_engine import real_engine
from test_standard_block import MODELS, SMALL

from mlxcel.core.lone_row import LoneRow
from mlxcel.core.plan import Decode
from mlxcel.core.source import NoProgress
from mlxcel.errors import BackendFault
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import compile_ahead
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_jax_cuda.compilations import compilations
from mlxcel_jax_cuda.compile_ahead import Program, compile_together
from mlxcel_jax_cuda.executables import Executables

IDS = np.random.default_rng(5).integers(0, SMALL["vocab_size"], 100)


class Told(NoProgress):
    """What was announced, and how far it came."""

    def __init__(self):
        self.total, self.done = None, [0]

    def start(self, phase, total, unit):
        assert (phase, unit) == ("compile", "programs")
        self.total = total

    def advance(self, done):
        self.done.append(done)


@pytest.mark.parametrize("formulas", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_program_is_compiled_once_and_none_afterwards(monkeypatch, formulas):
    """Spec S44. By fused steps over pages, and without over dense rows: greedy and usual rows, pieces, and scores with
    and without lists. Of the light sets, to keep it short."""
    examples = ChainSampler.stage_sets
    monkeypatch.setattr(ChainSampler, "stage_sets", lambda sampler, rows: examples(sampler, rows)[:2])
    family, overrides = MODELS["llama"]
    vocab, slots = (512, 2) if formulas else (640, 3)  # no other test has these: nothing is compiled yet
    shape = {**SMALL, "num_hidden_layers": 1, "vocab_size": vocab, **overrides}
    backend, told = JaxBackend(device="cpu", level="R0", formulas=formulas, decode_run=2 if formulas else 1), Told()
    sizes = {"slots": slots, "context": 128, "chunk": 64, "max_logprobs": -1}
    sizes |= {"kv_store": PagedKV, "page_size": 64, "pages": 6} if formulas else {}
    made = real_engine(random_checkpoint(family(), shape), family(), backend=backend, **sizes)
    names, make = [], Executables.make

    def seen(self, programs, done):
        listed = list(programs)
        names.extend(each.name for each in listed)
        make(self, listed, done)

    monkeypatch.setattr(Executables, "make", seen)
    before = compilations().count
    backend.warm_up(told)
    assert compilations().count - before == told.total == len(names)
    draws = [name.startswith("draw, ") for name in names]
    assert draws == sorted(draws, reverse=True)  # they compile for longest
    assert any(draws)
    assert not all(draws)
    # Two draws with a decode in them, and two runs of both; and three programs for pieces; or three for decode, and
    # pieces have its draws.
    # For scores a forward and three draws. The clearing of pages; and copies of them, where a page is no whole row.
    assert told.total == (2 + 2 + 3 if formulas else 3 + 1) + 4 + (2 if formulas else 1)
    assert told.done == sorted(told.done)
    assert told.done[-1] == told.total
    for params in ({}, {"temperature": 0.8, "top_k": 5, "seed": 1}):
        row = made.open(IDS, **params)
        for outcome in (made.engine.prefill(row, made.plan(IDS, 64)), *made.engine.step([row])):
            assert outcome.error is None
        lone = LoneRow(made.engine, row)
        assert made.engine.run_length([Decode(row)]) == (2 if formulas else 1)
        assert all(lone.step().appended for _ in range(4))
        made.engine.close(row)
        lone.drop()
    for start, top in ((0, 0), (98, 5), (3, vocab)):
        assert made.engine.score(IDS, start, top).top_ids.shape == (99 - start, top)
    assert backend.compilations_after_ready == 0


class Pretended:
    """A jitted function, as far as it is compiled."""

    def __init__(self, compile_it=lambda: None, lower=lambda: None):
        self._lower, self.compile = lower, compile_it

    def lower(self, *arguments):
        self._lower()
        return self


def fail():
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize("broken", [Pretended(compile_it=fail), Pretended(lower=fail)])
def test_a_program_that_cannot_be_compiled_is_named(broken):
    programs = [Program("good", Pretended(), ()), Program("bad one", broken, ()), Program("other", Pretended(), ())]
    with pytest.raises(BackendFault, match="'bad one' cannot be compiled: ZeroDivisionError: by zero"):
        compile_together(programs, lambda done: None)


def test_programs_are_compiled_side_by_side(monkeypatch):
    """Each waits for the other: one after the other they would wait for ever."""
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 2)
    met, done = threading.Barrier(2, timeout=PATIENCE), []
    compile_together([Program(name, Pretended(met.wait), ()) for name in "ab"], done.append)
    assert done[-1] == 2


def test_an_interrupt_begins_no_other_program_and_waits_for_none(monkeypatch):
    """The one under way would end only behind it: XLA cannot be interrupted."""
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 1)
    began, under_way, released, ended = [], threading.Event(), threading.Event(), threading.Event()

    def slowly():
        began.append(1)
        under_way.set()
        assert released.wait(PATIENCE)
        ended.set()

    def interrupted():
        assert under_way.wait(PATIENCE)
        raise KeyboardInterrupt

    def programs():
        for _ in range(5):
            yield Program("slow", Pretended(slowly), ())
        yield Program("interrupted", Pretended(lower=interrupted), ())

    with pytest.raises(KeyboardInterrupt):
        compile_together(programs(), lambda done: None)
    assert not ended.is_set()
    released.set()
    assert ended.wait(PATIENCE)
    assert len(began) == 1
