"""Short words for tests of the logit stages: rows, and the stages run over them as the chain runs them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling.ends import few_ends, without_ends
from mlxcel.plugins.sampling.history import History
from mlxcel.plugins.sampling.logit_stages import logit_stages
from mlxcel.plugins.sampling.stage import RowState

LIBRARIES = {"numpy": np, "jax": jnp}


def params(**given):
    return SamplingParams(**{"seed": 0, **given})


@functools.cache
def stages(vocab, tokenizer=None):
    return logit_stages(vocab, tokenizer, {})


def opened(chain, row, prompt=(0,), output=(), eos_ids=()):
    """A row with these ids behind it."""
    spec = SequenceSpec("row", np.array(list(prompt), np.int32), row, frozenset(eos_ids))
    prepared = {stage.name: stage.prepare(spec) for stage in chain}
    history = History(spec.prompt_ids)
    for token in output:
        history.append(token)
    return RowState(spec, history, {name: value for name, value in prepared.items() if value is not None})


@functools.cache
def _traced(chain, names):
    def run(z, packed, carry):
        for stage in chain:
            if stage.name in names:
                z = stage.apply(jnp, z, packed, carry)
        return z

    return jax.jit(run)


def run(xp, chain, z, rows, newest=None, every=False):
    """z [R, V] through the stages that a row uses, or through all of them, and without the few ends that a row ignores.
    `newest` holds the ids in flight, None where a row has none."""
    pending = [token is not None for token in newest or [None] * len(rows)]
    tokens = np.array([0 if token is None else token for token in newest or [0] * len(rows)], np.int32)
    carry = Carry(tokens, np.zeros(len(rows), np.float32))
    active = [stage for stage in chain if every or any(stage.name in row.prepared for row in rows)]
    packed = {}
    for stage in active:
        packed |= stage.pack(rows, pending)
    ignored = np.stack([few_ends(row.spec, z.shape[-1]) for row in rows])
    if xp is jnp:
        z = _traced(chain, tuple(stage.name for stage in active))(z, packed, carry)
        return np.asarray(without_ends(jnp, z, ignored))
    with np.errstate(all="ignore"):
        for stage in active:
            z = stage.apply(np, z, packed, carry)
        return without_ends(np, z, ignored)


def assert_same_bits(left, right, words=""):
    assert left.dtype == right.dtype == np.float32
    assert left.shape == right.shape
    differ = np.argwhere(left.view(np.uint32) != right.view(np.uint32))
    if len(differ):
        place = tuple(differ[0])
        raise AssertionError(f"{words} at {place}: {left[place]!r} and {right[place]!r}, {len(differ)} differ")
