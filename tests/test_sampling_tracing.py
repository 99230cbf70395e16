"""What the sampler costs where it is traced: no sort, and one executable for each set of stages."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_rows import NINE, flat_logits, no_carry, params, spec

from mlxcel.core.plan import SamplingArrays
from mlxcel.plugins.sampling.chain import STAGES, ChainSampler


def primitives(jaxpr):
    """Names of all primitives, those of loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from primitives(value.jaxpr)


STAGE_SETS = [
    (),
    *(
        (*(name for name, on in zip(STAGES[:3], chosen, strict=True) if on), "temperature")
        for chosen in itertools.product([False, True], repeat=3)
    ),
]


@pytest.mark.parametrize("stages", STAGE_SETS, ids=lambda stages: "+".join(stages) or "greedy")
@pytest.mark.parametrize("top_logprobs", [None, 0, 5])
def test_no_stage_sorts_the_vocabulary(stages, top_logprobs):
    """Spec S42."""
    sampler = ChainSampler(vocab=317, tokenizer_size=300)
    packed = sampler.pack([sampler.open(spec(row)) for row in NINE], range(9), [False] * 9)

    def step(logits, arrays):
        return sampler.draw(jnp, logits, SamplingArrays(stages, arrays, top_logprobs), no_carry(9))

    found = set(primitives(jax.make_jaxpr(step)(flat_logits(9, 317), dict(packed.params)).jaxpr))
    assert "argmax" in found
    assert not {name for name in found if "sort" in name or "top_k" in name}


def test_the_search_for_primitives_sees_inside_loops_and_calls():
    def hidden(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(jnp.sort)(y), x)

    assert "sort" in set(primitives(jax.make_jaxpr(hidden)(jnp.zeros(5)).jaxpr))


def test_changing_values_never_retraces():
    """Spec S44: the executable depends on the set of stages alone."""
    sampler = ChainSampler(vocab=317)
    traces = []

    @jax.jit
    def step(logits, arrays):
        traces.append(1)
        return sampler.draw(jnp, logits, SamplingArrays(STAGES, arrays), no_carry(2)).tokens

    rng = np.random.default_rng(0)
    for n in range(20):
        row = params(
            seed=int(rng.integers(2**63)),
            temperature=float(rng.choice([0, 0.5, 100])),
            top_k=int(rng.integers(0, 400)),
            top_p=float(rng.random()),
            min_p=float(rng.random()),
        )
        packed = sampler.pack([sampler.open(spec(row)), sampler.open(spec(params()))], [n, 2**20 + n], [False] * 2)
        step(flat_logits(2, 317), dict(packed.params))
    assert len(traces) == 1
