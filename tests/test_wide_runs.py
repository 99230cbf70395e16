"""Runs of more rows than one kernel takes: the kernels' formulas on XLA:CPU in float32, runs against single steps; and
which launches run together."""

from collections import deque
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from real_engine import real_engine
from test_fused_backend import USUAL, FusedJax
from test_standard_block import MODELS, SMALL

from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Decode
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import backend as jax_backend
from mlxcel_jax_cuda import runs_together
from mlxcel_jax_cuda.drawing import DrawShape
from mlxcel_jax_cuda.programs import programs
from mlxcel_jax_cuda.runs_together import runs_of, steps_of

TOGETHER, SLOTS, PAGE = 2, 130, 16
"""Steps of a run; rows of an engine that has every width of a decode; positions of a page, of which rows begin new ones
on the way."""


@pytest.fixture(scope="module")
def engine_of():
    """An engine of so many slots over one small model."""
    family, overrides = MODELS["llama"]
    checkpoint = random_checkpoint(family(), {**SMALL, "num_hidden_layers": 1, **overrides}, seed=3)

    def made(slots, decode_run):
        backend = FusedJax(decode_run=decode_run)
        sizes = {"slots": slots, "context": 128, "chunk": 64, "page_size": PAGE}
        return real_engine(checkpoint, family(), backend=backend, kv_store=PagedKV, **sizes)

    return made


def begun(made, count, kind):
    """Rows of as many lengths, each with its first token; `mixed` are greedy ones and usual ones in turn."""
    rng, rows = np.random.default_rng(7), []
    for place in range(count):
        ids = rng.integers(0, SMALL["vocab_size"], 1 + place % 19)
        own = {**USUAL, "seed": place} if kind == "usual" or (kind == "mixed" and place % 2) else {}
        rows.append(made.open(ids, ignore_eos=True, max_tokens=40, **own))
        made.engine.prefill(rows[-1], made.plan(ids, 64))
    return rows


def decoded(made, rows, steps, together, *, ahead):
    """So many steps of all rows; their tokens."""
    parts, waiting = [Decode(row) for row in rows], deque()
    for _ in range(0, steps, together):
        assert together in (1, made.engine.run_length(parts))
        made.engine.reserve(parts, together)
        waiting.extend([made.engine.submit(parts)] if together == 1 else made.engine.submit_run(parts, together))
        while len(waiting) > ahead * together:
            made.engine.collect(waiting.popleft())
    for ticket in waiting:
        made.engine.collect(ticket)
    return [list(made.engine.view(row).output) for row in rows]


def stored(made, rows):
    """Keys and values of each row as bytes, whichever pages hold them: runs reserve theirs earlier."""
    leaves, found = [np.moveaxis(np.asarray(leaf), 1, 0) for leaf in made.backend._running.kv], []  # of the one layer
    for row in rows:
        length, pages = made.engine.view(row).stored, made.engine._kv.page_table(row)
        held = [leaf[:, pages].reshape(len(leaf), -1, leaf.shape[-1])[:, :length] for leaf in leaves]
        found.append([keys.tobytes() for keys in held])
    return found


@pytest.mark.parametrize(
    ("count", "kind"),
    [
        (9, "usual"),
        pytest.param(9, "mixed", marks=pytest.mark.slow),
        pytest.param(32, "greedy", marks=pytest.mark.slow),
        pytest.param(33, "mixed", marks=pytest.mark.slow),
    ],
)
def test_runs_of_many_rows_draw_what_single_steps_draw(engine_of, count, kind, monkeypatch):
    """C54: every token, and every bit of the KV, with a run ahead and without; among 33 rows and more, where forward
    and draw of a single step are programs of their own, too."""
    runs, program = [], jax_backend.forward_and_draw_run
    monkeypatch.setattr(jax_backend, "forward_and_draw_run", lambda *args: runs.append(args[1].rows) or program(*args))
    single = engine_of(count, 1)
    rows = begun(single, count, kind)
    expected, kept = decoded(single, rows, 6, 1, ahead=False), stored(single, rows)
    assert runs == []
    for ahead in (False, True):
        made = engine_of(count, TOGETHER)
        rows = begun(made, count, kind)
        assert decoded(made, rows, 6, TOGETHER, ahead=ahead) == expected
        assert runs == [32 if count <= 32 else 128] * 3
        assert stored(made, rows) == kept
        runs.clear()


def test_where_a_wide_run_has_no_program_there_are_single_steps(engine_of, monkeypatch):
    """C54: a row that keeps as many ids as it takes asks for a draw whose runs are not in the closed set."""
    monkeypatch.setattr(jax_backend, "forward_and_draw_run", lambda *args: pytest.fail("not in the closed set"))
    found = []
    for together in (1, TOGETHER):
        made = engine_of(9, together)
        rows = begun(made, 8, "greedy")
        rows.append(made.open([1, 2], ignore_eos=True, max_tokens=40, temperature=0.9, top_k=0, top_p=0.5, seed=3))
        made.engine.prefill(rows[-1], made.plan([1, 2], 64))
        found.append(decoded(made, rows, 4, together, ahead=False))
    assert found[0] == found[1]


def test_rows_that_ignore_their_ends_run_together(engine_of, monkeypatch):
    """C54, S16: a greedy and a usual one, with the ids of tokens that they would draw for ends; a row that is masked
    draws the same, and does not."""
    runs, program = [], jax_backend.forward_and_draw_run
    monkeypatch.setattr(jax_backend, "forward_and_draw_run", lambda *args: runs.append(1) or program(*args))
    found = {}
    for way in ("plain", "ignored", "masked"):
        made = engine_of(2, TOGETHER)
        ends = () if way == "plain" else sorted({row[1] for row in found["plain"]})
        asked = {"logit_bias": [(token, None) for token in ends]} if way == "masked" else {"ignore_eos": True}
        rows = []
        for place, own in enumerate(({"temperature": 0, "seed": 0}, {**USUAL, "seed": 5})):
            params = SamplingParams(max_tokens=40, **asked, **own)
            spec = SequenceSpec(f"row {place}", np.array([1, 2, 3], np.int32), params, frozenset(ends))
            rows.append(made.engine.open(spec))
        for row in rows:
            made.engine.prefill(row, made.plan([1, 2, 3], 64))
        runs.clear()
        together = made.engine.run_length([Decode(row) for row in rows])
        assert together == (1 if way == "masked" else TOGETHER)
        found[way] = decoded(made, rows, 4, together, ahead=False)
        assert len(runs) == (0 if way == "masked" else 2)
    assert found["ignored"] == found["masked"] != found["plain"]
    assert not {token for row in found["ignored"] for token in row}.intersection(ends)


def model_and_shapes(engine_of):
    running = engine_of(SLOTS, 1).backend._running
    return running, running.model, running.launching.decodes


def test_widths_say_how_many_steps_run_together(engine_of):
    """Each width up to 128 rows; the engine asks by the rows that there are."""
    made = engine_of(SLOTS, TOGETHER)
    assert made.backend.caps.decode_runs == ((8, 2), (32, 2), (128, 2))
    assert [made.backend.caps.run_steps(rows) for rows in (1, 8, 9, 32, 128, 129, 300)] == [2, 2, 2, 2, 2, 1, 1]
    varied = attrs.evolve(made.backend.caps, decode_runs=((8, 4), (32, 2)))
    assert [varied.run_steps(rows) for rows in (1, 8, 9, 32, 33)] == [4, 4, 2, 2, 1]
    assert attrs.evolve(varied, decode_runs=()).run_steps(1) == 1


def of_kernels(rows):
    """`persistent_step` of launches whose kernel takes so many rows."""
    return lambda model, shape: SimpleNamespace(rows=rows[shape]) if shape in rows else None


def test_steps_of_one_kernel_run_in_fours_and_others_in_twos(engine_of, monkeypatch):
    """Where the weights are read in less than 2 ms, and no layer has room for one step too many alone."""
    _, model, shapes = model_and_shapes(engine_of)
    one_kernel = shapes[0]
    monkeypatch.setattr(runs_together, "persistent_step", of_kernels({one_kernel: 8}))
    assert [shape.rows for shape in shapes] == [8, 32, 128, 256]
    assert [steps_of(model, shape, 10**9) for shape in shapes] == [4, 2, 2, 1]
    assert [steps_of(model, shape, 10**10) for shape in shapes] == [1, 1, 1, 1]
    monkeypatch.setattr(runs_together, "persistent_step", of_kernels({one_kernel: 8, shapes[1]: 16}))
    assert [steps_of(model, shape, 10**9) for shape in shapes] == [4, 2, 2, 1]
    monkeypatch.setattr(runs_together, "persistent_step", lambda model, shape: None)
    assert [steps_of(model, shape, 10**9) for shape in shapes] == [2, 2, 2, 1]
    watched = attrs.evolve(model, numerics=attrs.evolve(model.numerics, watched=True))
    assert {steps_of(watched, shape, 10**9) for shape in shapes} == {1}


def test_the_closed_set_has_few_runs_of_many_rows(engine_of, monkeypatch):
    """Spec S44: every narrow draw where a step is one kernel, the two cheapest where it is launches, which cost more to
    make. What `submit_run` takes is what was listed."""
    running, model, shapes = model_and_shapes(engine_of)
    sampler, one_kernel = running.sampler, shapes[0]
    monkeypatch.setattr(runs_together, "persistent_step", of_kernels({one_kernel: 8}))
    runs = runs_of(model, sampler, shapes, lambda shape: steps_of(model, shape, 10**9))
    listed = programs(model, sampler, running.launching, runs)
    assert [[run.steps for run in each.runs] for each in listed[:4]] == [[4, 4, 4], [2, 2], [2, 2], []]
    assert not any(each.runs for each in listed[4:])
    assert isinstance(sampler, ChainSampler)
    for each in listed[:3]:
        shape = each.launch.shape
        draws = [DrawShape.of(sampler, sampling, shape.logits) for sampling in sampler.stage_sets(shape.logits)]
        taken = [drawing for drawing in draws if runs[shape].takes(drawing)]
        assert taken == [run.drawing for run in each.runs]
