"""Engines whose programs were kept: a second start traces nothing, and what does not run is made anew."""

import contextlib
import json
import logging
import os
import re
import subprocess
import sys

import jax
import pytest
from real_engine import real_engine
from test_standard_block import SMALL

from mlxcel.core.source import NoProgress
from mlxcel.errors import BackendFault, BatchShapeError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import programs as closed_set
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_jax_cuda.program_store import ProgramStore

SHAPE = {**SMALL, "num_hidden_layers": 1, "vocab_size": 288, "hidden_size": 128, "model_type": "llama"}
IDS = tuple(range(7, 27))


def few_programs(patch):
    """In a warm-up, to keep it short."""
    sets = ChainSampler.stage_sets
    patch.setattr(ChainSampler, "stage_sets", lambda sampler, rows: sets(sampler, rows)[:2])
    patch.setattr(closed_set, "_LISTS", (0,))


def tokens_of(backend, *, warm):
    """Of a greedy row and one that draws, on an engine of its own."""
    made = real_engine(random_checkpoint(Llama(), SHAPE), backend=backend, slots=2, context=128, chunk=64)
    if warm:
        backend.warm_up(NoProgress())
    found = []
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        row = made.open(IDS, max_tokens=20, **params)
        made.engine.prefill(row, made.plan(IDS, 64))
        for _ in range(6):
            made.engine.step([row])
        found.append(made.engine.view(row).output)
        made.engine.close(row)
    made.engine.shutdown()
    return found


STARTS = """
import json, logging, sys
from pathlib import Path
from mlxcel.core.backend import BackendSettings
from mlxcel_jax_cuda.runtime import prepare
prepare(BackendSettings("cpu", None, Path(sys.argv[1])))
from jax import monitoring
import pytest
from test_program_starts import few_programs, tokens_of
from mlxcel_jax_cuda import program_facts
from mlxcel_jax_cuda.backend import JaxBackend
logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
few_programs(pytest.MonkeyPatch())
program_facts.own_digest = lambda: "those of a release"  # these may be worked on meanwhile
heard = []
monitoring.register_event_duration_secs_listener(lambda event, seconds, **more: heard.append(event))

class Heard(JaxBackend):
    def start(self, layout, sampler):
        super().start(layout, sampler)
        heard.clear()

found = []
for warm in map(json.loads, sys.argv[2:]):
    backend = Heard(device="cpu")
    tokens = tokens_of(backend, warm=warm)
    lowered = [event for event in heard if event.endswith("jaxpr_to_mlir_module_duration")]
    found.append([tokens, len(lowered), backend.compilations_after_ready])
print(json.dumps(found))
"""


def starts(folder, *warm):
    """[tokens, lowered since it was started, compiled behind the warm-up] for each engine of a new process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPIL", "JAX_PERSIST"))}
    own["PYTHONPATH"] = os.path.dirname(__file__)
    command = [sys.executable, "-c", STARTS, str(folder), *map(json.dumps, warm)]
    done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [[[tuple(row) for row in tokens], *counts] for tokens, *counts in json.loads(done.stdout.splitlines()[-1])]
    return found, done.stderr


def test_a_second_start_traces_nothing_and_draws_the_same_tokens(tmp_path):
    """Spec S44. Its first engine with a warm-up, its second without: programs are looked for when they are needed."""
    ((tokens, lowered, after),), told = starts(tmp_path, True)
    assert lowered > 5
    assert after == 0
    assert f"programs: 0 loaded, {lowered} compiled" in told
    found, told = starts(tmp_path, True, False)
    assert found == [[tokens, 0, 0], [tokens, 0, 0]], told
    assert f"programs: {lowered} loaded, 0 compiled" in told
    on_demand = re.findall("program forward (.*): loaded on demand", told)
    assert any(words.startswith("(piece, tokens=") for words in on_demand), on_demand
    assert len(set(on_demand)) == len(on_demand) > 1, "each says which it is"


class Broken:
    """A store whose programs do not run."""

    def __init__(self):
        self.removed = set()

    def name(self, function, statics, arrays):
        return f"{function.__qualname__} {hash(statics)}"

    def load(self, name):
        return None if name in self.removed else self._fails

    def _fails(self, *arrays):
        jax.tree.map(lambda leaf: leaf.delete(), arrays[1])
        raise jax.errors.JaxRuntimeError("INTERNAL: no such function")

    def remove(self, name):
        self.removed.add(name)

    def keep(self, name, compiled):
        assert name in self.removed


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
def test_programs_that_do_not_run_are_made_anew(monkeypatch, caplog, warm):
    """At the warm-up with a warning and without a fault; on demand the step that met one is lost."""
    few_programs(monkeypatch)
    broken = Broken()
    expected = tokens_of(JaxBackend(device="cpu"), warm=False)
    monkeypatch.setattr(ProgramStore, "of", lambda device: broken)
    if warm:
        with caplog.at_level(logging.WARNING, "mlxcel"):
            assert tokens_of(JaxBackend(device="cpu"), warm=True) == expected
        assert "do not run, and are made anew: INTERNAL: no such function" in caplog.text
    else:
        for _ in range(6):
            with contextlib.suppress(BackendFault, BatchShapeError):
                assert tokens_of(JaxBackend(device="cpu"), warm=False) == expected
                break
        else:
            pytest.fail("every start failed")
    assert len(broken.removed) > 1
