"""Engine.score: what a model says of given ids (docs/spec/engine.md 1.2, S37 to S41)."""

import json

import numpy as np
import pytest
from company import PATIENT
from engine_rows import CAPS, decode, opened, scripted, spec, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_family import Layered
from real_engine import assert_same_bits, real_engine
from reference_forward import forward
from test_engine_interrupts import interrupted_at
from tested_backends import REFERENCE
from tiny_checkpoint import tiny_weights, write_tiny_llama

from mlxcel.core import score as scoring
from mlxcel.core.backend import BackendCaps
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.score import score_plan
from mlxcel.errors import (
    BackendFault,
    BatchShapeError,
    CapacityError,
    ContextTooLong,
    EmptyPrompt,
    EngineUnhealthy,
    NoTokenAllowed,
    NumericFault,
    RequestError,
)
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.logprobs import log_softmax
from mlxcel.plugins.sampling.scoring import pack_scores
from mlxcel.self_test import seeded_checkpoint
from mlxcel.testing.faults import Fault, FaultPlan, InjectedFault
from mlxcel.testing.scripted import CERTAIN, ScriptedBackend

LOGITS_TOLERANCE = 2e-5
"""float32 against float64 over two layers of 64 and a logarithm of 320 terms."""

EXPONENTIALS = 1e-6
"""A few last bits of a float32 near 4: two libraries' sums of up to 320 exponentials, and their logarithms."""

KINDS = {"llama": None, "windows": ["full", "window 5", "window 3"], "state": ["state", "full+experts"]}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """A checkpoint with each kind of KV, and its family."""
    layers = KINDS[request.param]
    if layers is None:
        return SafetensorsCheckpoint(write_tiny_llama(tmp_path_factory.mktemp("tiny"))), Llama()
    return seeded_checkpoint(Layered(), "layered", {"layers": layers}), Layered()


@pytest.fixture(scope="module")
def real(backend, model):
    """Chunks of 7, so that prompts of the tests have several pieces."""
    return real_engine(*model, chunk=7)


@pytest.fixture
def grouped(monkeypatch):
    """How many positions a step may hold logits of."""

    def group(count, vocab):
        monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * vocab * count)

    return group


def prompt_of(real, length, seed=0):
    return np.random.default_rng(seed).integers(0, real.vocab, length).astype(np.int32)


def said_by_prefills(real, ids):
    """Logits [P - 1, V]: each prefix prefilled by itself, in pieces of 5, and the token behind it drawn."""
    return np.concatenate([real.alone(ids[: end + 1], 0, chunk=5)[0] for end in range(len(ids) - 1)])


def assert_nothing_left(engine, stats):
    assert engine.kv_stats == stats
    assert engine.open_sequences == ()


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize(("start", "top", "group"), [(0, 5, 3), (0, 20, 1), (4, 3, 100), (13, 0, 5), (17, 2, 2)])
def test_scores_are_those_of_prefills_of_each_prefix(backend, real, grouped, start, top, group):
    """1.2 and S38: bit for bit at R2, however the positions are cut; ranked as a stable sort ranks."""
    grouped(group, real.vocab)
    ids = prompt_of(real, 19)
    stats = real.engine.kv_stats
    found = real.engine.score(ids, start, top)
    values = log_softmax(np, said_by_prefills(real, ids)[start:])
    order = np.argsort(-values, axis=-1, kind="stable")[:, :top]
    own, best = values[np.arange(18 - start), ids[start + 1 :]], np.take_along_axis(values, order, axis=-1)
    assert found.top_ids.dtype == np.int32
    assert np.array_equal(found.top_ids, order)
    if backend == REFERENCE:
        assert_same_bits(found.logprobs[:, None], own[:, None])
        assert np.array_equal(found.top_logprobs, best)
        return
    # NumPy's exponentials are not those of XLA; what another cut gives is the same bits.
    np.testing.assert_allclose(found.logprobs, own, rtol=0, atol=EXPONENTIALS)
    np.testing.assert_allclose(found.top_logprobs, best, rtol=0, atol=EXPONENTIALS)
    grouped(group + 4, real.vocab)
    again = real.engine.score(ids, start, top)
    assert (again.logprobs.tobytes(), again.top_logprobs.tobytes()) == (
        found.logprobs.tobytes(), found.top_logprobs.tobytes(),
    )  # fmt: skip
    assert_nothing_left(real.engine, stats)


def test_h_h5_scores_are_those_of_a_direct_forward(backend, tmp_path):
    """H-H5: the sum that an evaluation takes, against the formulas in float64."""
    folder = write_tiny_llama(tmp_path)
    real = real_engine(SafetensorsCheckpoint(folder))
    ids = prompt_of(real, 60, seed=1)
    config = json.loads((folder / "config.json").read_text())
    logits = forward(tiny_weights(), config, ids, dtype=np.float64)[:-1]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    exact = (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))[np.arange(59), ids[1:]]
    found = real.engine.score(ids).logprobs
    assert np.abs(found - exact).max() < LOGITS_TOLERANCE
    assert abs(found[20:].sum() - exact[20:].sum()) < LOGITS_TOLERANCE * 39
    assert_same_bits(found[20:, None], real.engine.score(ids, 20).logprobs[:, None])


@pytest.mark.on_jax(most=1)
def test_h_h8_scores_do_not_know_their_company(real):
    """H-H8: bits alone and in a crowd; and the crowd says what it says without them."""
    ids = prompt_of(real, 19)
    alone = real.engine.score(ids, 0, 4)
    prompts = [prompt_of(real, length, seed=length) for length in (3, 9, 16)]
    undisturbed = [real.alone(prompt, 4, chunk=7) for prompt in prompts]
    rows = [real.open(prompt) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        real.engine.prefill(row, real.plan(prompt, 7))
    for _ in range(4):
        crowded = real.engine.score(ids, 0, 4)
        assert_same_bits(crowded.logprobs[:, None], alone.logprobs[:, None])
        assert_same_bits(crowded.top_logprobs, alone.top_logprobs)
        real.engine.step(rows)
    for row, (logits, output) in zip(rows, undisturbed, strict=True):
        found, same = real.close(row)
        assert same == output
        assert_same_bits(found, logits)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(real, length):
    """Of one id there is nothing to say, and no step runs for it."""
    ids = prompt_of(real, length)
    assert real.engine.score(ids, 0, 3).top_ids.shape == (length - 1, 3)
    assert real.engine.score(ids, length - 1).logprobs.shape == (0,)
    it = scripted({})
    it.engine.score(np.array([5] * length))
    assert it.backend.steps == length - 1


def test_a_list_of_the_whole_vocabulary(backend, tmp_path_factory):
    """S41: -1 is V, which a lifted cap allows, V - 1 is one less; the order is that of the shorter lists."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    real = real_engine(SafetensorsCheckpoint(folder), max_logprobs=-1)
    ids = prompt_of(real, 5)
    every, most, few = (real.engine.score(ids, 0, top) for top in (-1, real.vocab - 1, 7))
    assert every.top_ids.shape == (4, real.vocab)
    assert np.array_equal(every.top_ids[:, :-1], most.top_ids)
    assert np.array_equal(every.top_ids[:, :7], few.top_ids)
    assert np.array_equal(np.sort(every.top_ids, axis=-1), np.tile(np.arange(real.vocab), (4, 1)))
    assert np.all(np.diff(every.top_logprobs, axis=-1) <= 0)


@pytest.mark.parametrize("vocab", [320, 49152, 262144])
def test_what_a_step_holds_is_bounded(vocab):
    """Positions before `start` run in whole chunks; from there on no step has more logits than LOGITS_BYTES."""
    plan = score_plan(np.zeros(7000, np.int32), 3000, 0, vocab=vocab, chunk=2048, level="R2", caps=CAPS)
    assert plan.pieces[0].end == 2048
    counts = [len(part.positions) if (part := plan.scoring_of(i)) else 0 for i in range(len(plan.pieces))]
    assert max(counts) * vocab * 4 <= scoring.LOGITS_BYTES
    assert max(counts) == min(2048, scoring.LOGITS_BYTES // (4 * vocab))


@settings(max_examples=200, **PATIENT)
@given(
    st.integers(1, 200),
    st.integers(0, 199),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["R0", "R1", "R2"]),
)
def test_score_plans_tile_the_ids_and_score_each_position_once(length, start, chunk, group, level):
    """P3 and P5: pieces of at most the chunk, their widths by the level; nothing is drawn."""
    start = min(start, length - 1)
    caps = BackendCaps("R1", "cpu", "x", "float32", (16,), False, False, prefill_widths=(8, 64), r1_tokens=32)
    vocab = scoring.LOGITS_BYTES // 4 // group
    ids = np.arange(length, dtype=np.int32)
    plan = score_plan(ids, start, 2, vocab=vocab, chunk=chunk, level=level, caps=caps)
    assert plan == score_plan(ids, start, 2, vocab=vocab, chunk=chunk, level=level, caps=caps)
    assert not plan.draw
    edges = [0, *(span.end for span in plan.pieces)]
    assert [span.start for span in plan.pieces] == edges[:-1]
    assert edges[-1] == length - 1
    assert np.array_equal(np.concatenate([[], *map(plan.token_ids, range(len(plan.pieces)))]), ids[:-1])
    assert all(0 < span.length <= min(chunk, span.width) for span in plan.pieces)
    assert all(span.width % 32 == 0 for span in plan.pieces if level == "R1")
    asked = [part for index in range(len(plan.pieces)) if (part := plan.scoring_of(index)) is not None]
    assert [position for part in asked for position in part.positions] == list(range(start, length - 1))
    most = max(32, group // 32 * 32) if level == "R1" else group
    assert all(len(part.positions) <= most for part in asked)
    if level == "R1":  # the forwards of these widths are those of the whole chunk
        assert all(span.start % chunk % 32 == 0 for span in plan.pieces)


@pytest.mark.parametrize(
    ("ids", "options", "kind"),
    [
        ([], {}, EmptyPrompt),
        ([1, -1], {}, RequestError),
        ([1, 256 + 3], {}, RequestError),
        ([2**63], {}, RequestError),
        ([2**70], {}, RequestError),
        ([True], {}, RequestError),
        ([1.0, 2.0], {}, RequestError),
        ([[1, 2]], {}, RequestError),
        ([7] * 64, {}, ContextTooLong),
        ([1, 2], {"start": 2}, RequestError),
        ([1, 2], {"start": -1}, RequestError),
        ([1, 2], {"top": 21}, RequestError),
        ([1, 2], {"top": -1}, RequestError),
        ([1, 2], {"top": -2}, RequestError),
        ([1, 2], {"top": 2**40}, RequestError),
    ],
)
def test_h_i12_what_cannot_be_scored_is_refused(ids, options, kind):
    """As `open` refuses, and S41: before any forward, and a good request then works."""
    it = scripted({}, context=64)
    stats = it.kv.stats()
    with pytest.raises(kind) as caught:
        it.engine.score(np.array(ids), **options)
    assert isinstance(caught.value, RequestError)
    assert len(str(caught.value)) < 200
    assert it.backend.steps == 0
    assert_nothing_left(it.engine, stats)
    assert it.engine.score(np.array([7] * 63), top=20).top_ids.shape == (62, 20)


def test_no_row_is_free():
    it = scripted({"a": b"hello"}, slots=1)
    row, _ = opened(it.engine, "a")
    with pytest.raises(CapacityError):
        it.engine.score(np.array([1, 2]))
    it.engine.close(row)
    assert len(it.engine.score(np.array([1, 2])).logprobs) == 1


def test_a_step_in_flight_or_a_sick_engine_refuses():
    it = scripted({"a": b"hello"}, faults=FaultPlan([Fault("read", 3)]), max_consecutive_faults=1)
    row, plan = opened(it.engine, "a")
    it.engine.prefill(row, plan)
    parts = decode(row)
    it.engine.reserve(parts)
    ticket = it.engine.submit(parts)
    with pytest.raises(BatchShapeError, match="in flight"):
        it.engine.score(np.array([1, 2]))
    assert it.engine.collect(ticket)[0].token == b"hello"[1]
    it.engine.step([row])
    with pytest.raises(EngineUnhealthy):
        it.engine.score(np.array([1, 2]))


def test_the_scripted_backend_is_certain_of_a_prompt():
    """For client authors: each position names the token behind it; what has no chance is far below."""
    it = scripted({})
    found = it.engine.score(np.array(list(b"abcab")), top=2)
    assert found.top_ids[:, 0].tolist() == list(b"bcab")
    assert np.all(found.logprobs > -1e-6)
    assert np.all(found.top_logprobs[:, 1] < 1 - CERTAIN)
    listed = found.of_tokens(np.array(list(b"bcab")))
    assert [each.token for each in listed] == list(b"bcab")
    assert [each.top[0] for each in listed] == [(each.token, each.logprob) for each in listed]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *[(Fault("submit", nth), BackendFault) for nth in (1, 2, 3)],
        (Fault("read", 2), BackendFault),
        (Fault("read", 2, "short"), BackendFault),
        (Fault("read", 2, "out_of_range"), BackendFault),
        (Fault("read", 2, "lose_kv"), BackendFault),
        (Fault("status", 2, "nan"), NumericFault),
        (Fault("reserve", 2), CapacityError),
        *[(Fault(f"open.{stage}", 1), InjectedFault) for stage in ("kv", "backend", "sampler", "finish")],
    ],
)
def test_faults_are_raised_and_free_everything(grouped, fault, kind):
    """E8 and 1.5: of its second step, or of one of the stages of `open`; the next request works."""
    it = scripted({}, faults=FaultPlan([fault]))
    grouped(2, 259)
    stats = it.kv.stats()
    ids = np.array(list(b"abcdefg"))
    with pytest.raises(kind):
        it.engine.score(ids)
    assert_nothing_left(it.engine, stats)
    assert it.engine.healthy
    assert len(it.engine.score(ids).logprobs) == 6


@pytest.mark.parametrize("level", ["R0", "R1"])
def test_every_level_scores(grouped, level):
    """The same calls where steps are not mixed and pieces are padded."""
    it = scripted({}, level=level, mixed_steps=False)
    grouped(3, 259)
    assert it.engine.score(np.array(list(b"abcdefg")), 2, 1).top_ids[:, 0].tolist() == list(b"defg")


def test_a_sampler_that_gives_no_scores_is_a_fault(monkeypatch):
    """1.3 step 1: what a plugin's sampler leaves out is found where the step is read."""

    def forgetful(self, targets, top):
        return pack_scores(targets, 0, 259)

    monkeypatch.setattr(ChainSampler, "pack_scores", forgetful)
    it = scripted({})
    assert len(it.engine.score(np.array([1, 2]), 0, 0).logprobs) == 1
    with pytest.raises(BackendFault, match="3 best"):
        it.engine.score(np.array([1, 2]), 0, 3)
    assert it.engine.open_sequences == ()


def test_a_numeric_fault_names_the_position():
    """S45: of the token behind the first position that failed."""
    it = scripted({}, faults=FaultPlan([Fault("status", 1, rows=(3, 4))]))
    with pytest.raises(NumericFault, match="position 5"):
        it.engine.score(np.array(list(b"abcdefg")), 1)


def test_its_faults_count_for_the_health_guard():
    """E19: a failed step counts whatever it was for, and a successful one ends the count."""
    it = scripted({}, faults=FaultPlan([Fault("read", nth) for nth in (1, 3, 4)]), max_consecutive_faults=2)
    for fails in (True, False, True):
        if fails:
            with pytest.raises(BackendFault):
                it.engine.score(np.array([1, 2]))
        else:
            it.engine.score(np.array([1, 2]))
        assert it.engine.healthy
    with pytest.raises(BackendFault):
        it.engine.score(np.array([1, 2]))
    assert not it.engine.healthy


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(
    ("owner", "method"), [(ScriptedBackend, "submit"), (ScriptedBackend, "read"), (DenseKV, "advance")]
)
def test_an_interrupt_frees_everything(monkeypatch, grouped, owner, method, nth):
    """E8: the row and its pages are gone, and rows beside it go on."""
    it = scripted({"a": b"hello"})
    row, plan = opened(it.engine, "a")
    it.engine.prefill(row, plan)
    grouped(2, 259)
    stats = it.kv.stats()
    interrupted_at(monkeypatch, owner, method, nth)
    with pytest.raises(KeyboardInterrupt):
        it.engine.score(np.array(list(b"abcdefg")))
    assert it.kv.stats() == stats
    assert it.engine.open_sequences == (row,)
    assert it.engine.step([row])[0].token == b"hello"[1]
    assert len(it.engine.score(np.array(list(b"abcdefg"))).logprobs) == 6


def test_observers_hear_of_its_steps(grouped):
    """E10: as of any step, with the pieces as executed."""
    heard = []

    class Watching:
        def step_finished(self, report):
            heard.append(report)

        def request_finished(self, result):
            heard.append(result)

    it = scripted({}, observers=[Watching()])
    grouped(4, 259)
    it.engine.score(np.arange(11))
    assert [report.tokens for report in heard] == [4, 4, 2]
    assert [report.parts[0].plan.pieces[report.parts[0].index].end for report in heard] == [4, 8, 10]


def test_a_piece_that_scores_is_alone_and_draws_nothing():
    """1.2: refused before any forward."""
    it = scripted({"a": b"hello", "b": b"world"})
    row, plan = opened(it.engine, "a")
    it.engine.prefill(row, plan)
    other = it.engine.open(spec("b", b"abcdef"))
    scored = score_plan(np.array(list(b"abcdef")), 0, 0, vocab=259, chunk=64, level="R2", caps=CAPS)
    steps = it.backend.steps
    with pytest.raises(BatchShapeError, match="of its own"):
        it.engine.reserve([Piece(other, scored, 0), Decode(row)])
    too_far = score_plan(np.array(list(b"abcdefg")), 0, 0, vocab=259, chunk=64, level="R2", caps=CAPS)
    with pytest.raises(BatchShapeError, match="token of the row behind"):
        it.engine.reserve([Piece(other, too_far, 0)])
    assert it.backend.steps == steps
    assert len(turn(it.engine, Piece(other, scored, 0))[0].scores.logprobs) == 5
    assert it.engine.view(other).stored == 5
    assert it.engine.view(other).output == ()


def test_logits_that_say_nothing(model, monkeypatch):
    """S39 and S45: -inf is no fault and is the score of what has no chance; nothing but -inf, or NaN, is one."""
    real = real_engine(*model, chunk=7)
    ids = prompt_of(real, 6)
    forward = real.backend._model.family.forward
    spoilt = {}

    def with_holes(family, context, config):
        logits = forward(context, config)
        logits[:, list(spoilt)] = list(spoilt.values())
        return logits

    monkeypatch.setattr(type(real.backend._model.family), "forward", with_holes)
    spoilt[int(ids[3])] = -np.inf
    found = real.engine.score(ids, 0, 5)
    assert found.logprobs[2] == -np.inf
    assert np.isfinite(found.top_logprobs).all()
    assert found.of_tokens(ids[1:])[2].logprob == -9999.0
    spoilt.update(dict.fromkeys(range(real.vocab), -np.inf))
    with pytest.raises(NoTokenAllowed):
        real.engine.score(ids)
    spoilt[0] = np.nan
    with pytest.raises(NumericFault, match="position 3"):
        real.engine.score(ids, 2)
