"""Standard blocks through the whole backend by fused steps, prompts by packed products: the kernels' formulas on
XLA:CPU in float32, against NumPy."""

from collections import deque

import jax
import numpy as np
import pytest
from cache_rows import caching
from keeping_jax import KeepingJax
from real_engine import real_engine
from spoilt_checkpoint import SpoiltCheckpoint
from test_standard_block import MODELS, SMALL

from mlxcel.core.plan import Decode, Piece
from mlxcel.errors import NumericFault
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import backend as jax_backend
from mlxcel_jax_cuda import decode_run
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_jax_cuda.drawing import Asked
from mlxcel_jax_cuda.forward import forward, forward_and_draw
from mlxcel_jax_cuda.fused_decode import runs_fused
from mlxcel_jax_cuda.launch import Launch

TOLERANCE = 4e-5
"""Of the largest logit of a step: float32 sums in another order, the norm's division behind a product instead of
before, and thirty positions of KV that carry both."""

STEPS, SLOTS = 12, 3
PROMPTS = [
    np.random.default_rng(seed).integers(0, SMALL["vocab_size"], length) for seed, length in enumerate((5, 19, 1))
]


class FusedJax(JaxBackend):
    """As it runs on the GPU, forward and draw of greedy and usual rows in one program."""

    def __init__(self, decode_run=1):
        super().__init__(device="cpu", level="R0", formulas=True, decode_run=decode_run)


class KeepingFusedJax(KeepingJax):
    """The same with the draw apart, whose logits are kept."""

    def __init__(self):
        super().__init__(device="cpu", level="R0", formulas=True)


@pytest.fixture(
    scope="module", params=["llama", pytest.param("llama, untied", marks=pytest.mark.slow), "qwen2", "qwen3"]
)
def model(request):
    family, overrides = MODELS[request.param]
    shape = {**SMALL, "num_hidden_layers": 2, **overrides}
    return family(), random_checkpoint(family(), shape, seed=3)


@pytest.fixture(scope="module")
def llama():
    family, overrides = MODELS["llama"]
    return family(), random_checkpoint(family(), {**SMALL, "num_hidden_layers": 2, **overrides}, seed=3)


def engine_of(model, backend, store=PagedKV):
    family, checkpoint = model
    return real_engine(checkpoint, family, slots=SLOTS, context=128, chunk=64, backend=backend, kv_store=store)


def run(made, steps=STEPS, *, ahead=False, together=1, params=({}, {}, {})):
    """Three rows, each prompt by itself and then all of them together: their ids in the engine, and the outcomes of
    each. With `ahead` every step is submitted before the one before it is read; so many `together` are a run."""
    rows = [
        made.open(ids, ignore_eos=True, max_tokens=steps + 1, **own) for ids, own in zip(PROMPTS, params, strict=True)
    ]
    found = {row: [] for row in rows}

    def keep(outcomes):
        for outcome in outcomes:
            assert outcome.error is None
            found[outcome.sequence_id].append(outcome)

    for row, ids in zip(rows, PROMPTS, strict=True):
        plan = made.plan(ids, 64)
        for index in range(len(plan.pieces)):
            parts = [Piece(row, plan, index)]
            made.engine.reserve(parts)
            keep(made.engine.collect(made.engine.submit(parts)))
    parts, waiting = [Decode(row) for row in rows], deque()
    for _ in range(0, steps, together):
        made.engine.reserve(parts, together)
        tickets = [made.engine.submit(parts)] if together == 1 else made.engine.submit_run(parts, together)
        waiting.extend(tickets)
        while len(waiting) > ahead * together:
            keep(made.engine.collect(waiting.popleft()))
    for ticket in waiting:
        keep(made.engine.collect(ticket))
    return rows, [found[row] for row in rows]


def ids_of(found):
    return [[outcome.token for outcome in row] for row in found]


def test_prompts_and_fused_decode_give_the_logits_of_numpy(model):
    """Three rows in one launch of eight; every id agrees while the best logit leads by more than what is tolerated."""
    fused, numpy = engine_of(model, KeepingFusedJax()), engine_of(model, None)
    shape = fused.backend._running.launching.shapes[0]
    assert runs_fused(fused.backend._running.model, shape), "this is not what the test is about"
    (rows, found), (wanted_rows, wanted) = run(fused), run(numpy)
    compared = 0
    for row, other, got, expected in zip(rows, wanted_rows, ids_of(found), ids_of(wanted), strict=True):
        length = len(PROMPTS[rows.index(row)])
        for step, (token, right) in enumerate(zip(got, expected, strict=True)):
            logits, reference = (made.backend.kept[key, length + step] for made, key in ((fused, row), (numpy, other)))
            bound = TOLERANCE * np.abs(reference).max()
            np.testing.assert_allclose(logits, reference, rtol=0, atol=bound)
            compared += 1
            if token != right:
                second, best = np.sort(reference)[-2:]
                assert best - second <= 2 * bound
                break
    assert compared > len(rows) * STEPS / 2


USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02}
ROWS = {
    "greedy": ({}, {}, {}),
    "usual": ({**USUAL, "seed": 1}, {}, {"temperature": 1, "seed": 2}),
    "penalised": ({**USUAL, "repetition_penalty": 1.3}, {}, {"logit_bias": {5: 3.0}}),
    "logprobs": ({"logprobs": 3}, {**USUAL, "logprobs": 0}, {}),
    "unusual": ({"temperature": 1, "mirostat": 2, "seed": 4}, {**USUAL, "xtc_probability": 0.5}, {"typical_p": 0.9}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in ("penalised", "logprobs") else kind for kind in ROWS]
)
def test_forward_and_draw_in_one_program_draw_what_two_draw(llama, kind, monkeypatch):
    """Read one step behind as well as at once; where a row wants more than the light sets have, there are two."""
    counted = []
    whole = jax_backend.forward_and_draw
    monkeypatch.setattr(jax_backend, "forward_and_draw", lambda *args: counted.append(1) or whole(*args))
    made = engine_of(llama, KeepingFusedJax())
    _, apart = run(made, params=ROWS[kind])
    assert not counted
    for ahead in (False, True):
        fused = engine_of(llama, FusedJax())
        _, found = run(fused, ahead=ahead, params=ROWS[kind])
        assert len(counted) == (STEPS if kind in ("greedy", "usual") else 0)
        assert ids_of(found) == ids_of(apart)
        assert [[o.logprobs for o in row] for row in found] == [[o.logprobs for o in row] for row in apart]
        for one, two in zip(fused.backend._running.kv, made.backend._running.kv, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
        counted.clear()
    asked = [params.get("logprobs") is not None for params in ROWS[kind]]
    assert [all(o.logprobs is not None for o in row) for row in found] == asked


@pytest.mark.parametrize("kind", [pytest.param("greedy", marks=pytest.mark.slow), "usual"])
def test_steps_that_run_as_one_program_draw_what_they_draw_one_by_one(llama, kind, monkeypatch):
    """C54: three runs of four steps, one of them ahead, over rows that begin new pages on the way; every bit of the KV.
    A step is traced once for all of a run."""
    traced, runs = [], []
    whole, program = decode_run.whole_step, jax_backend.forward_and_draw_run
    counting = jax.jit(lambda *args: traced.append(1) or whole(*args), static_argnums=(0, 1, 2))
    monkeypatch.setattr(decode_run, "_step", counting)
    monkeypatch.setattr(jax_backend, "forward_and_draw_run", lambda *args: runs.append(args[3]) or program(*args))
    single = engine_of(llama, FusedJax())
    _, expected = run(single, params=ROWS[kind])
    for ahead in (False, True):
        made = engine_of(llama, FusedJax(decode_run=4))
        _, found = run(made, ahead=ahead, together=4, params=ROWS[kind])
        assert runs == [4, 4, 4]
        assert ids_of(found) == ids_of(expected)
        for one, two in zip(made.backend._running.kv, single.backend._running.kv, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
        runs.clear()
    assert len(traced) == 1


def begun(made, **own):
    """A row of each prompt, its first token drawn; `own` are parameters by its place."""
    rows = []
    for place, ids in enumerate(PROMPTS):
        row = made.open(ids, ignore_eos=True, max_tokens=40, **ROWS["usual"][place], **own.get(f"row_{place}", {}))
        made.engine.prefill(row, made.plan(ids, 64))
        rows.append(row)
    return rows


def started(made, rows):
    made.engine.reserve([Decode(row) for row in rows], 4)
    return made.engine.submit_run([Decode(row) for row in rows], 4)


def outputs(made, rows):
    return [list(made.engine.view(row).output) for row in rows]


def test_what_befalls_rows_in_a_run_changes_nothing_before_it(llama, monkeypatch):
    """C54, E14, E18: a stop and a cancel in the middle, an interrupt, a program that fails: what was read counts, and
    the rows go on behind it, or others in their place."""
    _, found = run(engine_of(llama, FusedJax()), params=ROWS["usual"])
    expected = [[outcome.token for outcome in row] for row in found]
    stop = expected[0][6]
    ends = expected[0].index(stop)
    made = engine_of(llama, FusedJax(decode_run=4))
    engine, backend = made.engine, made.backend
    rows = begun(made, row_0={"stop_token_ids": (stop,)})
    tickets = [*started(made, rows), *started(made, rows)]
    for ticket in tickets[:6]:
        engine.collect(ticket)
    engine.cancel(rows[1])
    real = backend.read
    with monkeypatch.context() as patch:
        patch.setattr(backend, "read", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.collect(tickets[6])
    engine.collect(tickets[7])
    assert outputs(made, rows) == [expected[0][:ends], expected[1][:7], expected[2][:7]]
    assert backend.read == real
    for ticket in started(made, rows[2:]):
        engine.collect(ticket)
    assert outputs(made, rows[2:]) == [expected[2][:11]]

    tickets = started(made, rows[2:])
    with monkeypatch.context() as patch:
        patch.setattr(jax_backend, "forward_and_draw_run", lambda *args: 1 / 0)
        tickets += started(made, rows[2:])
    for ticket in tickets:
        outcome = engine.collect(ticket)[0]
        assert ("ZeroDivisionError" in str(outcome.error)) is (ticket is tickets[4])
    assert outputs(made, rows[2:])[0][:13] == expected[2]
    assert engine.healthy
    for row in rows:
        engine.close(row)
    assert engine.kv_stats.owned == 0
    rows = begun(made)
    for ticket in (*started(made, rows), *started(made, rows)):
        engine.collect(ticket)
    assert outputs(made, rows) == [ids[:9] for ids in expected]


@pytest.mark.slow
def test_nan_in_the_middle_of_a_run_fails_its_row_alone():
    """C54: the token that its third step draws has no finite embedding; nothing of it stays on its pages."""
    family, overrides = MODELS["llama, untied"]
    checkpoint = random_checkpoint(family(), {**SMALL, "num_hidden_layers": 2, **overrides}, seed=3)
    params = ROWS["usual"]
    _, found = run(engine_of((family(), checkpoint), FusedJax()), params=params)
    expected = [[outcome.token for outcome in row] for row in found]
    bad = next(token for token in expected[0][3:7] if not any(token in ids[:13] for ids in (*expected[1:], *PROMPTS)))
    place = expected[0].index(bad)
    spoilt = SpoiltCheckpoint(checkpoint, {"model.embed_tokens.weight": (bad, 1)})
    made = engine_of((family(), spoilt), FusedJax(decode_run=4))
    rows = begun(made)
    read = [made.engine.collect(ticket) for ticket in (*started(made, rows), *started(made, rows))]
    errors = [step for step, outcomes in enumerate(read) if isinstance(outcomes[0].error, NumericFault)]
    assert errors == [place]
    assert outputs(made, rows) == [expected[0][: place + 1], expected[1][:9], expected[2][:9]]
    made.engine.close(rows[0])
    assert all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in made.backend._running.kv)


def test_dense_storage_and_paged_give_the_same_bits(llama):
    paged, dense = engine_of(llama, KeepingFusedJax()), engine_of(llama, KeepingFusedJax(), DenseKV)
    (rows, found), (others, expected) = run(paged), run(dense)
    assert ids_of(found) == ids_of(expected)
    for row, other, prompt in zip(rows, others, PROMPTS, strict=True):
        for position in range(len(prompt), len(prompt) + STEPS + 1):
            logits, same = paged.backend.kept[row, position], dense.backend.kept[other, position]
            assert logits.tobytes() == same.tobytes()


def test_a_step_has_few_arrays_however_many_layers(model):
    """Each array in or out of a program costs the host about two microseconds a step, and the 130 and 33 that a model
    of sixteen layers had, one for each weight and layer, took it more than half as long as a GPU computes."""
    running = engine_of(model, FusedJax()).backend._running
    sampling = running.sampler.stage_sets(8)[0]
    asked = Asked.of(running.sampler, sampling, np.full(8, SLOTS, np.int32))
    step, piece = (Launch.of_padding(running.launching.shapes[place], SLOTS) for place in (0, -1))
    assert runs_fused(running.model, step.shape)
    for function, arguments, most in (
        (forward_and_draw, running.for_both(step, asked), (11, 6)),
        (forward, running.for_forward(piece), (10, 3)),
    ):
        traced = function.trace(*arguments)
        counts = len(jax.tree.leaves(traced.args_info)), len(jax.tree.leaves(traced.out_info))
        assert all(count <= limit for count, limit in zip(counts, most, strict=True)), counts


def test_the_prompt_cache_keeps_stacked_pages(llama, tmp_path):
    """V16, P7: a row goes on from pages that it shares and from a copy of one that it does not; and from a file, whose
    pages get other numbers in another engine."""
    family, checkpoint = llama
    ids = np.random.default_rng(8).integers(0, SMALL["vocab_size"], 77)

    def made():
        return caching(checkpoint, family, slots=SLOTS, context=128, chunk=64, backend=KeepingFusedJax())

    first, second = made(), made()
    cold = first.run(ids)
    first.cache.save(first.engine, tmp_path / "kept")
    second.run(ids[20::-1])
    second.cache.load(second.engine, tmp_path / "kept")
    for engine in (first, second):
        hit = engine.run(ids)
        assert hit.cached == 76
        assert hit.ids == cold.ids
        np.testing.assert_allclose(hit.logits, cold.logits, rtol=0, atol=TOLERANCE * np.abs(cold.logits).max())
