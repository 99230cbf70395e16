"""State that runs from token to token: mirostat's mu, adaptive-p's sums (docs/spec/engine.md S26, S30, S33, E11)."""

import functools
import itertools
import math

import numpy as np
import pytest
from chain_reference import adapted, mirostat_1_rank, mirostat_2, shares, surprises, top_k
from engine_rows import decode, opened, pieces, plan_for
from sampling_rows import LIBRARIES, WORKED, draw_states, flat_logits, params, spec
from tested_backends import KeepingSampler, keeping_backend

from mlxcel.core.engine import Engine
from mlxcel.core.plan import Decode
from mlxcel.core.sampling import Carry
from mlxcel.core.settings import EngineSettings
from mlxcel.core.source import NoProgress
from mlxcel.errors import BackendFault
from mlxcel.plugins.families.tiny import Tiny
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.self_test import CONFIG, seeded_checkpoint
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.text.detokeniser import Detokeniser

STEPS = 30

DRIFT = 2e-5
"""float32 against float64 after 30 additions of values below 10."""

MIROSTAT = {
    "version 2": {"seed": 3, "mirostat": 2, "mirostat_tau": 2.5, "mirostat_eta": 0.3},
    "version 1": {"seed": 4, "mirostat": 1, "mirostat_tau": 3, "mirostat_eta": 0.2, "temperature": 0.9},
    "cold": {"seed": 5, "mirostat": 2, "mirostat_tau": 1, "temperature": 0},
}
ADAPTIVE = {
    "slow": {"seed": 6, "adaptive_target": 0.2, "adaptive_decay": 0.95},
    "filtered": {"seed": 7, "adaptive_target": 0.4, "adaptive_decay": 0.5, "min_p": 0.02, "temperature": 1.4},
    "forgetful": {"seed": 8, "adaptive_target": 0.3, "adaptive_decay": 0},
}


@pytest.fixture(params=["numpy", "jax"])
def xp(request):
    return LIBRARIES[request.param]


# --- fixed logits, step by step, against the formulas -----------------------------------------------------------------


def run(xp, sampler, states, logits, positions, steps):
    """`steps` draws of all rows; (tokens [steps][R], states' running numbers [steps][R])."""
    tokens, traces = [], []
    for step in range(steps):
        drawn = draw_states(xp, logits, states, [at + step for at in positions], sampler=sampler)
        for state, token, observed in zip(states, drawn.tokens, drawn.observed, strict=True):
            sampler.commit(state, int(token), float(observed))
        tokens.append(drawn.tokens.tolist())
        traces.append([(state.mu, *state.adaptive) for state in states])
    return tokens, traces


@pytest.mark.parametrize("name", MIROSTAT)
def test_h_e13_mu_over_30_steps_is_that_of_a_slow_reference(xp, name):
    """Spec S29 to S31: given what was drawn, each mu is the formula's; what was drawn was among the kept."""
    row = params(**MIROSTAT[name])
    logits = flat_logits(1, 40, 7)
    sampler = ChainSampler(vocab=40)
    state = sampler.open(spec(row))
    assert state.mu == np.float32(2 * row.mirostat_tau)
    tokens, traces = run(xp, sampler, [state], logits, [5], STEPS)
    z = {i: float(v) for i, v in enumerate(logits[0])}
    mu = 2 * row.mirostat_tau
    for (token,), ((found, _, _),) in zip(tokens, traces, strict=True):
        if row.temperature < 1e-5:
            surprise = 0.0
            assert token == max(z, key=z.get)
        else:
            heated = {i: v / row.temperature for i, v in z.items()}
            kept = mirostat_2(heated, mu) if row.mirostat == 2 else top_k(heated, mirostat_1_rank(heated, mu, 40))
            assert 1 < len(kept) < 40
            surprise = surprises(kept)[token] / math.log(2)
        mu -= row.mirostat_eta * (surprise - row.mirostat_tau)
        assert found == pytest.approx(mu, abs=DRIFT)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_sums_of_adaptive_p_over_30_steps_are_those_of_a_slow_reference(xp, name):
    """Spec S26: s = p + d s with the drawn id's p from before, w = 1 + d w."""
    row = params(**ADAPTIVE[name])
    logits = np.log(np.array([0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05], np.float32))[None]
    sampler = ChainSampler(vocab=7)
    state = sampler.open(spec(row))
    total, weight = row.adaptive_target / (1 - row.adaptive_decay), 1 / (1 - row.adaptive_decay)
    tokens, traces = run(xp, sampler, [state], logits, [5], STEPS)
    p = shares({i: float(v) / row.temperature for i, v in enumerate(logits[0])})
    assert len(set(itertools.chain(*tokens))) > 2
    for (token,), ((_, found, found_weight),) in zip(tokens, traces, strict=True):
        total, weight = p[token] + row.adaptive_decay * total, 1 + row.adaptive_decay * weight
        assert found == pytest.approx(total, abs=DRIFT)
        assert found_weight == pytest.approx(weight, abs=DRIFT)
    # The numbers act: what the next token is drawn from is the formula with them.
    processed = row.clone(logprobs=-1, logprobs_mode="processed")
    state = sampler.open(spec(processed))
    state.adaptive = (float(np.float32(total)), float(np.float32(weight)))
    drawn = draw_states(xp, logits, [state], [9], sampler=sampler)
    heated = {i: float(v) / row.temperature for i, v in enumerate(logits[0])}
    expected = adapted(heated, row.adaptive_target, total, weight)
    exact = {i: -s for i, s in surprises(expected).items()}
    assert np.allclose(drawn.top_logprobs[0], [exact[i] for i in range(7)], rtol=0, atol=1e-4)


def test_worked_mirostat(xp):
    """Spec 4.8: tau = 1, version 2 keeps {0, 1}; drawing 0 observes 0.70044 and makes mu 2.02996. Version 1: K = 2."""
    for version in (1, 2):
        row = params(mirostat=version, mirostat_tau=1)
        sampler = ChainSampler(vocab=7)
        found = {}
        for position in range(20):
            drawn = draw_states(xp, WORKED[None], [sampler.open(spec(row))], [position], sampler=sampler)
            found[int(drawn.tokens[0])] = float(drawn.observed[0])
        assert found.keys() == {0, 1}
        assert found[0] == pytest.approx(2.02996, abs=5e-6)  # printed digits
        assert found[1] == pytest.approx(2 - 0.1 * (-math.log2(0.25 / 0.65) - 1), abs=5e-6)


def test_an_overridden_token_moves_neither(xp):
    """Spec S26: what was put in the place of a draw was not drawn."""
    sampler = ChainSampler(vocab=7)
    for row in (params(**MIROSTAT["version 2"]), params(**ADAPTIVE["slow"])):
        state = sampler.open(spec(row))
        before = (state.mu, state.adaptive)
        sampler.commit(state, 3, None)
        assert (state.mu, state.adaptive) == before


@pytest.mark.on_jax(most=3)
@pytest.mark.parametrize("row", [*MIROSTAT.values(), *ADAPTIVE.values()], ids=str)
def test_a_draw_in_flight_is_the_draw_that_was_read(xp, row):
    """Spec C51, E12: the next draw is the same bits whether the host committed the one before or the carry tells of it;
    what the carry holds of a row that has nothing in flight does not count."""
    logits = flat_logits(2, 317, 7)
    sampler = ChainSampler(vocab=317)
    states = [sampler.open(spec(params(**row))) for _ in range(2)]
    for step in range(9, 15):
        first = draw_states(xp, logits, states, [step] * 2, sampler=sampler)
        sampler.commit(states[0], int(first.tokens[0]), float(first.observed[0]))
        carry = Carry(np.array([7, first.tokens[1]], np.int32), np.array([np.nan, first.observed[1]], np.float32))
        ahead = {"pending": [False, True], "carry": carry}
        one_ahead = draw_states(xp, logits[::-1], states, [step + 1] * 2, sampler=sampler, **ahead)
        sampler.commit(states[1], int(first.tokens[1]), float(first.observed[1]))
        all_read = draw_states(xp, logits[::-1], states, [step + 1] * 2, sampler=sampler)
        assert one_ahead.tokens.tolist() == all_read.tokens.tolist()
        assert one_ahead.observed.tobytes() == all_read.observed.tobytes()


# --- through the engine -----------------------------------------------------------------------------------------------


class TracingSampler(KeepingSampler):
    """The chain, which notes each row's running numbers after every commit."""

    def __init__(self, **options):
        super().__init__(**options)
        self.traces = {}

    def commit(self, state, token, observed):
        super().commit(state, token, observed)
        self.traces.setdefault(state.spec.request_id, []).append((token, state.mu, *state.adaptive))


@pytest.fixture(scope="module")
def model():
    family = Tiny()
    checkpoint = seeded_checkpoint(family, "mlxcel-tiny", CONFIG)
    return family, family.parse_config(checkpoint), checkpoint


ROWS = MIROSTAT | ADAPTIVE
OTHERS = {
    "greedy": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "usual": {"seed": 9, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}


@functools.cache
def sampler_for(vocab):
    """Engines share it, and with it the programs that draw."""
    return TracingSampler(vocab=vocab, tokenizer=ByteTokenizer())


def make(model, faults=()):
    family, config, checkpoint = model
    backend, sampler = keeping_backend(), sampler_for(config.vocab_size)
    sampler.traces = {}
    backend.load(family, config, checkpoint, NoProgress())
    kv_spec = family.kv_spec(config)
    engine = Engine(
        backend=FaultPlan(faults).backend(backend),
        kv_spec=kv_spec,
        kv=DenseKV(kv_spec=kv_spec, slots=8, context=config.context, page_size=16),
        sampler=sampler,
        finish=StandardFinish(stream=lambda spec: Detokeniser(ByteTokenizer()), steps={}),
        settings=EngineSettings(config.vocab_size, config.context, 8),
    )
    return engine, sampler


def begin(engine, name):
    fields = (ROWS | OTHERS)[name]
    return opened(
        engine, name, b"once upon", 4, **{"temperature": 1, "max_tokens": STEPS, "ignore_eos": True, **fields}
    )


def finish_row(engine, row):
    while engine.view(row).ending is None:
        assert engine.step([row])[0].error is None


@pytest.fixture(scope="module")
def alone(backend, model):
    """{name: [(token, mu, sum, weight) after each token]}, each row by itself."""
    engine, sampler = make(model)
    for name in ROWS | OTHERS:
        row, plan = begin(engine, name)
        engine.prefill(row, plan)
        finish_row(engine, row)
        engine.close(row)
    assert all(len(trace) == STEPS for trace in sampler.traces.values())
    assert all(len(set(trace)) > 20 for name, trace in sampler.traces.items() if name in ROWS)
    return sampler.traces


@pytest.mark.on_jax(most=0)
def test_h_e9_h_e13_rows_in_company_are_the_rows_alone(model, alone):
    """Spec S33, S47: mu moves no neighbour, no neighbour moves mu; a greedy row keeps its penalties beside mirostat."""
    engine, sampler = make(model)
    rows = {name: begin(engine, name) for name in ROWS | OTHERS}
    left = {name: pieces(row, plan) for name, (row, plan) in rows.items()}
    for turn in itertools.count():
        live = [name for name, (row, _) in rows.items() if engine.view(row).ending is None]
        if not live:
            break
        live = live[turn % len(live) :] + live[: turn % len(live)]
        parts = [left[name].pop(0) if left[name] else Decode(rows[name][0]) for name in live]
        engine.reserve(parts)
        engine.collect(engine.submit(parts))
    assert sampler.traces == alone


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("name", ROWS)
def test_running_ahead_gives_the_same_trace(model, alone, name):
    """Spec C51, C52: each step is submitted before the one before it is read."""
    engine, sampler = make(model)
    row, plan = begin(engine, name)
    flight = []
    for parts in [*([part] for part in pieces(row, plan)), *([decode(row)] * (STEPS - 1))]:
        engine.reserve(parts)
        flight.append(engine.submit(parts))
        if len(flight) == 2:
            engine.collect(flight.pop(0))
    engine.collect(flight.pop())
    assert sampler.traces[name] == alone[name]


def bring_back(engine, row):
    known = [*b"once upon", *engine.view(row).output]
    assert engine.prefill(row, plan_for(known[:-1], 4, draw=False)).error is None


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kept", [1, 13])
def test_a_preempted_row_gives_the_same_trace(model, alone, name, kept):
    """Spec S33, C18."""
    engine, sampler = make(model)
    row, plan = begin(engine, name)
    engine.prefill(row, plan)
    for _ in range(kept - 1):
        engine.step([row])
    engine.preempt(row)
    bring_back(engine, row)
    finish_row(engine, row)
    assert sampler.traces[name] == alone[name]


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kept", [1, 13])
def test_a_fault_gives_the_same_trace(model, alone, name, kept):
    """Spec E11: a step in flight that was lost to a neighbour's fault is drawn again, and moves nothing twice."""
    steps = 3 + (kept - 1) + 2  # pieces of the row, its steps, all pieces of the neighbour but the last
    engine, sampler = make(model, [Fault("read", steps + 1, "lose_kv")])
    row, plan = begin(engine, name)
    engine.prefill(row, plan)
    for _ in range(kept - 1):
        engine.step([row])
    other, other_plan = begin(engine, "usual")
    *first, last = pieces(other, other_plan)
    for part in first:
        engine.reserve([part])
        engine.collect(engine.submit([part]))
    tickets = []
    for parts in ([last], decode(row)):
        engine.reserve(parts)
        tickets.append(engine.submit(parts))
    outcomes = [engine.collect(ticket)[0] for ticket in tickets]
    assert isinstance(outcomes[0].error, BackendFault)
    assert outcomes[1].token is None
    bring_back(engine, row)
    finish_row(engine, row)
    assert sampler.traces[name] == alone[name]
