"""Programs made before the steps that need them: a step finds what was made, and draws the tokens it drew without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from real_engine import real_engine
from test_standard_block import SMALL

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.source import NoProgress
from mlxcel.direct import generate
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_jax_cuda.compilations import compilations
from mlxcel_jax_cuda.compile_ahead import Program
from mlxcel_jax_cuda.executables import Executables

IDS = np.random.default_rng(5).integers(0, SMALL["vocab_size"], 100).astype(np.int32)
SAMPLED = {"temperature": 0.8, "top_k": 5, "seed": 1}


class Told(NoProgress):
    """What was announced, how far it came, and phases that are over."""

    def __init__(self):
        self.phases, self.done, self.over = [], [], 0

    def start(self, phase, total, unit):
        if phase == "compile":
            self.phases.append((total, unit))

    def advance(self, done):
        self.done.append(done)

    def finish(self):
        self.over += 1


# --- a backend --------------------------------------------------------------------------------------------------------


class Prepares(JaxBackend):
    """Notes how many programs the process had compiled when a row was prepared."""

    def prepare_steps(self, calls, progress):
        super().prepare_steps(calls, progress)
        self.prepared = compilations().count


class Idle(JaxBackend):
    """Makes each program when a step needs it."""

    def prepare_steps(self, calls, progress):
        pass


def made_on(backend, vocab, *, fused):
    shape = {**SMALL, "num_hidden_layers": 1, "vocab_size": vocab, "model_type": "llama"}
    sizes = {"kv_store": PagedKV, "page_size": 64, "pages": 6} if fused else {}
    return real_engine(random_checkpoint(Llama(), shape), backend=backend, slots=2, context=128, chunk=64, **sizes)


def reply(made, ids, told, **params):
    planner = ChunkedPlanner(chunk=64, level=made.engine.level, caps=made.backend.caps)
    chosen = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": 12, **params})
    result = generate(made.engine, SequenceSpec("row", ids, chosen), planner=planner, progress=told)
    assert result.error is None
    return result.token_ids


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_behind_it_no_step_of_a_row_compiles(fused):
    """Spec C63. By fused steps in runs over pages, and op by op over dense rows: prompts of one piece and of two, whose
    first draws nothing; greedy, and drawn. What is there is not made again."""
    options = {"device": "cpu", "level": "R0", "formulas": fused, "decode_run": 2 if fused else 1}
    vocab = 896 if fused else 736  # no other test has these: nothing is compiled yet
    backend, found, totals = Prepares(**options), [], []
    made = made_on(backend, vocab, fused=fused)
    for ids, params in ((IDS[:20], {}), (IDS, {}), (IDS, SAMPLED), (IDS, SAMPLED)):
        told, before = Told(), compilations().count
        found.append(reply(made, ids, told, **params))
        assert compilations().count == backend.prepared, "a step compiled"
        assert backend.prepared - before == sum(total for total, _ in told.phases)
        totals.append([total for total, _ in told.phases])
    # A piece, its draw, a decode and a run with theirs; or a piece, a decode, and one draw of both. Then other draws.
    assert totals == ([[4], [], [3], []] if fused else [[3], [], [1], []])
    other = made_on(Idle(**options), vocab, fused=fused)
    assert [reply(other, *each) for each in ((IDS[:20], Told()), (IDS, Told()))] == found[:2]
    assert reply(other, IDS, Told(), **SAMPLED) == found[2] == found[3]


# --- its programs -----------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def added(number, x):
    return x + number


class Store:
    """Programs by name, of this process."""

    def __init__(self):
        self.kept, self.loaded, self.removed = {}, [], []

    def name(self, function, statics, arrays):
        return f"{function.__qualname__} {statics}"

    def load(self, name):
        self.loaded.append(name)
        return self.kept.get(name)

    def keep(self, name, compiled):
        self.kept[name] = compiled

    def remove(self, name):
        self.removed.append(name)
        del self.kept[name]


def program(number):
    return Program(f"add {number}", added, (number, jnp.ones(3)))


def value(executables, number):
    return float(executables.call(added, (number, jnp.ones(3)))[0])


def test_only_what_no_store_has_is_told_of():
    """One that is asked for twice is made once, and a call looks for none of them."""
    store, told = Store(), Told()
    Executables(store).make_missing([program(11), program(12), program(11)], told)
    assert (told.phases, told.done[-1], told.over) == ([(2, "programs")], 2, 1)
    executables, told = Executables(store), Told()
    executables.make_missing([program(11), program(13)], told)
    assert (told.phases, told.done[-1], told.over) == ([(1, "programs")], 1, 1)
    executables.make_missing([program(13), program(11)], told)
    assert (told.over, len(store.kept)) == (1, 3)
    store.loaded.clear()
    assert [value(executables, number) for number in (11, 13, 11)] == [12, 14, 12]
    assert store.loaded == []
    assert value(executables, 12) == 13
    assert store.loaded == ["added (12,)"]


def test_what_was_loaded_for_a_step_and_does_not_run_is_made_anew():
    """ADR 0023: the step that met it is lost."""
    store = Store()

    def fails(*arrays):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such function")

    store.kept["added (21,)"] = fails
    executables = Executables(store)
    executables.make_missing([program(21)], Told())
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such function"):
        value(executables, 21)
    assert store.removed == ["added (21,)"]
    assert value(executables, 21) == 22
    assert store.kept["added (21,)"] is not fails


def test_without_a_store_they_are_compiled_all_the_same():
    executables, told = Executables(), Told()
    executables.make_missing([program(31)], told)
    before = compilations().count
    assert value(executables, 31) == 32
    assert (told.phases, compilations().count) == ([(1, "programs")], before)
