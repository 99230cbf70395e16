"""Steps that a backend is told of before they run: they are those that come, and telling it changes nothing else."""

import attrs
import numpy as np
import pytest
from engine_rows import CAPS, scripted, spec
from scheduler_rows import STORES

from mlxcel.core.source import NoProgress
from mlxcel.direct import generate
from mlxcel.errors import BackendFault
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing import scripted as scripted_module
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import FaultPlan
from mlxcel.testing.scripted import ScriptedBackend

SCRIPT = [*b"hello, world, and hello again", EOS]
UNKNOWN = ("token_ids", "page_tables", "page_copies")
"""Arrays of a plan whose values nobody knows yet."""

LOOKS_BACK = {"dry_multiplier", "repetition_penalty"}
"""A draw with them goes by the tokens before it."""


@pytest.fixture
def preparing(monkeypatch):
    """An engine whose backend is told what comes: it, and a list of the calls that it was told of."""

    def make(prepare=lambda calls, progress: None, **options):
        told = []

        class Preparing(ScriptedBackend):
            def prepare_steps(self, calls, progress):
                told.extend(calls)
                prepare(calls, progress)

        monkeypatch.setattr(scripted_module, "ScriptedBackend", Preparing)
        monkeypatch.setattr(FaultPlan, "backend", lambda plan, backend: backend)  # none of its own between them
        return scripted({"a": SCRIPT}, **options), told

    return make


def run(it, request, chunk=4, **options):
    planner = ChunkedPlanner(chunk=chunk, level="R2", caps=CAPS)
    return generate(it.engine, request, planner=planner, clock=it.clock, **options)


def arrays_of(plan):
    """Everything that a program may be chosen by."""
    own = {field.name: getattr(plan, field.name) for field in attrs.fields(type(plan))}
    sampling, scores = own.pop("sampling"), own.pop("scores")
    own |= {f"sampling {name}": array for name, array in sampling.params.items()}
    shapes = {name: (array.dtype, array.shape) for name, array in own.items()}
    values = {name: array.tolist() for name, array in own.items() if name not in UNKNOWN}
    return (sampling.stages, sampling.top_logprobs, sampling.unread, scores), shapes, values


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("prompt", [b"abc", b"abcdefghij"], ids=["one piece", "three pieces"])
@pytest.mark.parametrize(
    ("params", "runs"),
    [
        ({}, True),
        ({"temperature": 0.8, "min_p": 0.1, "seed": 1}, True),
        ({"logprobs": 2}, False),
        ({"dry_multiplier": 0.8}, False),
        ({"repetition_penalty": 1.2, "logit_bias": {5: 1.0}}, False),
        ({"max_tokens": 5}, False),
        ({"max_tokens": 2}, False),
        ({"max_tokens": 1}, False),
    ],
    ids=str,
)
def test_what_is_told_is_what_is_submitted(preparing, monkeypatch, store, together, prompt, params, runs):
    """Of the first decode and the first run the position and what hangs on it, too."""
    options = {"kv_store": {"dense": DenseKV, "paged": PagedKV}[store], "decode_run": together}
    it, told = preparing(**options)
    calls, submit, submit_run = [], it.backend.submit, it.backend.submit_run
    monkeypatch.setattr(it.backend, "submit", lambda plan: calls.append([plan]) or submit(plan))
    monkeypatch.setattr(it.backend, "submit_run", lambda plans: calls.append(plans) or submit_run(plans))
    result = run(it, spec("a", prompt, **params))
    assert result.error is None
    pieces = -(-len(prompt) // 4)
    came = calls[:pieces]
    if params.get("max_tokens") != 1:
        came.append(calls[pieces])
        together = together if runs else 1
        came += [plans for plans in calls if len(plans) > 1][:1]
        assert len(came) - pieces == 1 + (together > 1)
    assert [len(plans) for plans in told] == [len(plans) for plans in came]
    for plans, expected in zip(told, came, strict=True):
        for plan, other in zip(plans, expected, strict=True):
            (static, shapes, values), (other_static, other_shapes, other_values) = map(arrays_of, (plan, other))
            assert (static, shapes) == (other_static, other_shapes)
            if LOOKS_BACK.isdisjoint(params):
                values.pop("sampling pending"), other_values.pop("sampling pending")  # whether it has been read yet
                assert values == other_values


@pytest.mark.parametrize("store", STORES)
def test_telling_reserves_and_changes_nothing(preparing, store):
    owned = []
    options = {"kv_store": {"dense": DenseKV, "paged": PagedKV}[store]}
    it, told = preparing(lambda calls, progress: owned.append((it.kv.stats(), it.backend.steps)), **options)
    before = scripted({"a": SCRIPT}, **options)
    before.engine.open(spec("a", b"abcdefghij"))
    result = run(it, spec("a", b"abcdefghij"))
    assert owned == [(before.kv.stats(), 0)]
    assert bytes(result.token_ids) == bytes(SCRIPT[:-1])
    assert len(told) == 4
    assert it.kv.stats().owned == 0


def test_a_row_that_runs_nothing_is_not_told_of(preparing):
    it, told = preparing()
    assert run(it, spec("a", max_tokens=0)).cause == "max_tokens"
    assert told == []


def test_steps_one_by_one_need_no_run(preparing):
    it, told = preparing(decode_run=4)
    run(it, spec("a"), run_ahead=False)
    assert [len(plans) for plans in told] == [1, 1]


def test_the_times_of_a_request_begin_behind_it(preparing):
    """docs/spec/clients.md 1.2: time to the first token is the model's, not the compiler's."""
    it, _ = preparing(lambda calls, progress: it.clock.advance(60.0), delay=0.5)
    times = run(it, spec("a")).timings
    assert (times.ttft, times.prompt) == (0.5, 0.5)
    assert times.ended - times.accepted == 0.5 * (1 + len(SCRIPT) - 1)


class Told(NoProgress):
    def __init__(self):
        self.phases = []

    def start(self, phase, total, unit):
        self.phases.append(phase)

    def finish(self):
        self.phases.append(None)


@pytest.mark.parametrize("error", [BackendFault("program 'decode' cannot be compiled"), ZeroDivisionError()])
def test_what_fails_there_is_told_by_the_step_that_needs_it(preparing, error):
    """And costs nothing where no step does."""

    def fail(calls, progress):
        progress.start("compile", 3, "programs")
        raise error

    it, _ = preparing(fail)
    told = Told()
    result = run(it, spec("a"), progress=told)
    assert (result.error, bytes(result.token_ids)) == (None, bytes(SCRIPT[:-1]))
    assert told.phases == ["compile", None, "prefill", None]


def test_an_interrupt_there_ends_the_row(preparing):
    """docs/spec/clients.md 1.4."""

    def interrupted(calls, progress):
        raise KeyboardInterrupt

    it, _ = preparing(interrupted)
    result = run(it, spec("a"))
    assert (result.cause, result.token_ids, it.backend.steps) == ("cancelled", (), 0)
    assert it.engine.open_sequences == ()
    assert it.kv.stats().owned == 0


def test_a_backend_that_is_told_of_nothing_is_unchanged():
    it = scripted({"a": SCRIPT})
    row = it.engine.open(spec("a"))
    plan = ChunkedPlanner(chunk=4, level="R2", caps=CAPS).build(np.array([1, 2, 3], np.int32))
    told = Told()
    it.engine.prepare(row, plan, told)
    assert told.phases == []
