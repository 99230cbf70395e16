"""What the sampler costs where it is traced: no sort, and one executable for each set of stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_rows import FEATURE_SETS, Words, flat_logits, no_carry, params, spec

from mlxcel.core.plan import SamplingArrays
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.pack import FEATURES


def primitives(jaxpr):
    """Names of all primitives, those of loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from primitives(value.jaxpr)


def traced_primitives(rows):
    sampler = ChainSampler(vocab=317, tokenizer=Words(300))
    packed = sampler.pack(
        [sampler.open(spec(row, eos_ids=(7,))) for row in rows], range(len(rows)), [False] * len(rows)
    )

    def step(logits, arrays):
        return sampler.draw(
            jnp, logits, SamplingArrays(packed.stages, arrays, packed.top_logprobs), no_carry(len(rows))
        )

    return packed, set(primitives(jax.make_jaxpr(step)(flat_logits(len(rows), 317), dict(packed.params)).jaxpr))


@pytest.mark.parametrize("name", FEATURE_SETS)
def test_no_stage_sorts_the_vocabulary(name):
    """Spec S42."""
    _, found = traced_primitives([params(**FEATURE_SETS[name])])
    assert "argmax" in found
    assert not {name for name in found if "sort" in name or "top_k" in name}


def test_no_step_of_all_stages_sorts_the_vocabulary():
    """Every feature there is, side by side."""
    rows = [*FEATURE_SETS.values(), {"ignore_eos": True}]
    packed, found = traced_primitives([params(**row) for row in rows])
    assert set(FEATURES) <= set(packed.stages)
    assert not {name for name in found if "sort" in name or "top_k" in name}


def test_the_search_for_primitives_sees_inside_loops_and_calls():
    def hidden(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(jnp.sort)(y), x)

    assert "sort" in set(primitives(jax.make_jaxpr(hidden)(jnp.zeros(5)).jaxpr))


def random_rows(rng):
    """Five rows that use every stage, whatever their values are."""

    def between(low, high):
        return float(rng.uniform(low, high))

    def penalised():
        return {
            "repetition_penalty": between(0.5, 0.9),
            "repeat_last_n": int(rng.integers(1, 100)),
            "frequency_penalty": between(0.1, 2),
            "presence_penalty": between(-2, -0.1),
            "window_frequency_penalty": between(0.1, 2),
            "window_presence_penalty": between(0.1, 2),
            "dry_multiplier": between(0.1, 2),
            "dry_base": between(1, 3),
            "dry_allowed_length": int(rng.integers(1, 5)),
            "dry_penalty_last_n": int(rng.choice([-1, 5, 64])),
            "logit_bias": [[int(token), between(-5, 5)] for token in rng.integers(0, 300, rng.integers(1, 8))],
            "min_tokens": int(rng.integers(1, 9)),
            "ignore_eos": True,
        }

    def seeded(**more):
        return params(seed=int(rng.integers(2**63)), temperature=between(0.1, 0.9), **more)

    filters = {
        "top_n_sigma": between(0.1, 4),
        "top_k": int(rng.integers(2, 300)),
        "typical_p": between(0.1, 0.9),
        "top_p": between(0, 0.99),
        "min_p": between(0.01, 0.9),
        "min_keep": int(rng.integers(2, 10)),
        "xtc_probability": between(0.1, 1),
        "xtc_threshold": between(0, 0.5),
    }
    mirostat = {"mirostat_tau": between(0.1, 9), "mirostat_eta": between(0.01, 1)}
    dynatemp = {"dynatemp_range": between(0.1, 2), "dynatemp_exponent": between(0.1, 3)}
    first = {"samplers": ["penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]}
    adaptive = {"adaptive_target": between(0.01, 1), "adaptive_decay": between(0, 0.99)}
    return [
        seeded(**filters, **dynatemp, **adaptive, **penalised(), logprobs=int(rng.integers(1, 21))),
        # A k above 64 is always there: whether one is, is known by a feature, not by a value.
        seeded(
            **{**filters, "top_k": int(rng.integers(65, 300))},
            **first,
            logprobs=int(rng.integers(0, 21)),
            logprobs_mode="processed",
        ),
        seeded(mirostat=1, **mirostat, **penalised()),
        seeded(mirostat=2, **mirostat),
        params(temperature=float(rng.choice([0, 1e-9, 9e-6])), **penalised()),
    ]


def test_two_hundred_requests_of_any_values_are_one_executable():
    """Spec S44: not a value, not a length of a prompt, of a list of ends or of logprobs chooses an executable."""
    sampler = ChainSampler(vocab=317, tokenizer=Words(300))
    traces = []

    @jax.jit
    def step(logits, arrays, carry):
        traces.append(1)
        return sampler.draw(jnp, logits, SamplingArrays(stages, arrays, top_logprobs), carry)

    rng = np.random.default_rng(0)
    logits = flat_logits(5, 317, 5)
    stages = top_logprobs = None
    seen = set()
    for request in range(40):
        states = []
        for row in random_rows(rng):
            prompt = rng.integers(0, 300, rng.integers(1, 50)).astype(np.int32)
            states.append(sampler.open(spec(row, prompt, tuple(range(rng.integers(1, 9))))))
        packed = sampler.pack(states, rng.integers(1, 2**20, 5).tolist(), rng.random(5) < 0.5)
        stages, top_logprobs = packed.stages, packed.top_logprobs
        seen.add((stages, top_logprobs))
        drawn = step(logits, dict(packed.params), no_carry(5))
        assert np.asarray(drawn.status).tolist() == [0] * 5, request
    assert len(seen) == 1
    assert set(FEATURES) <= set(stages)
    assert len(traces) == 1
