"""Short words for tests of the sampler: rows, logits and draws on either array library."""

import functools

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import SamplingArrays, StepResult
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.noise import threefry2x32

LOGPROB_TOLERANCE = 4e-6
"""float32 sums of up to 49152 terms and one logarithm against float64, relative to max(1, |value|)."""

WORKED = np.log(np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.03, 0.01])).astype(np.float32)
"""The worked row of spec 4.6."""

LIBRARIES = {"numpy": np, "jax": jnp}


def params(**given):
    return SamplingParams(**{"seed": 0, **given})


class Words:
    """A tokenizer as the sampler needs one: `size` ids, each with the bytes given for it, else its number's."""

    def __init__(self, size, texts=()):
        self.size = size
        self._texts = dict(texts)

    def token_bytes(self, token_id, *, first=False):
        return self._texts.get(token_id, str(token_id).encode())

    def encode(self, text, *, add_special, parse_special=True):
        return [token_id for token_id in range(self.size) if self.token_bytes(token_id) == text.encode()]

    def is_special(self, token_id):
        return False


def spec(row, prompt=(0,), eos_ids=()):
    return SequenceSpec("row", np.array(prompt, np.int32), row, frozenset(eos_ids))


def flat_logits(rows, size, spread=1.0):
    """Logits between 0 and `spread` from the words of threefry: the same on every machine and version."""
    key = np.arange(rows, dtype=np.uint32)[:, None], np.zeros((rows, 1), np.uint32)
    ids = np.arange(size, dtype=np.uint32)[None]
    word = threefry2x32(np, key, (ids, np.full_like(ids, 99)))[0]
    return ((word >> np.uint32(8)) * np.float32(2.0**-24) * np.float32(spread)).astype(np.float32)


def no_carry(rows):
    """No draw is in flight."""
    return Carry(np.zeros(rows, np.int32), np.zeros(rows, np.float32))


@functools.cache
def traced(sampler, stages, top_logprobs):
    """`sampler.draw` jitted, kept for the next call of the same kind."""
    return jax.jit(
        lambda logits, arrays, carry: sampler.draw(jnp, logits, SamplingArrays(stages, arrays, top_logprobs), carry)
    )


@functools.cache
def chain(vocab, named=None):
    """A chain kept for the next test; ids at or above `named` are padding."""
    return ChainSampler(vocab=vocab, tokenizer=None if named is None else Words(named))


def draw(xp, logits, rows, positions, *, sampler=None, stages=None):
    """Draw for rows of SamplingParams. Eager on NumPy, jitted on JAX; arrays come back as NumPy's."""
    sampler = sampler or chain(logits.shape[-1])
    states = [sampler.open(spec(row)) for row in rows]
    return draw_states(xp, logits, states, positions, sampler=sampler, stages=stages)


def draw_states(xp, logits, states, positions, *, sampler, stages=None, pending=None, carry=None):
    """Draw for rows that are open."""
    sampling = sampler.pack(states, positions, pending or [False] * len(states))
    carry = carry or no_carry(len(states))
    if stages is not None:
        sampling = attrs.evolve(sampling, stages=stages)
    if xp is np:
        return sampler.draw(np, logits, sampling, carry)
    drawn = traced(sampler, sampling.stages, sampling.top_logprobs)(logits, dict(sampling.params), carry)
    return type(drawn)(*(None if field is None else np.asarray(field) for field in drawn))


def ids(xp, logits, rows, positions, **options):
    return draw(xp, logits, rows, positions, **options).tokens.tolist()


def told(drawn, place, row):
    """The log-probabilities that a row of SamplingParams is told."""
    fields = (None if field is None else np.asarray(field) for field in drawn)
    return StepResult(*fields).token_logprobs(place, row.logprobs, linear=row.post_sampling_probs)


def assert_same_bits(left, right):
    assert left.dtype == right.dtype
    assert left.tobytes() == right.tobytes()


NINE = [
    params(temperature=0),
    params(seed=1, temperature=0.7, top_k=5),
    params(seed=2, top_p=0.8, logprobs=0),
    params(seed=3, temperature=1.3),
    params(seed=2**63 - 1, min_p=0.2, logprobs=3),
    params(seed=5, temperature=2.0, top_k=40, top_p=0.95, min_p=0.05),
    params(top_k=1, top_p=0.5),
    params(seed=7, temperature=1e-5, top_k=3),
    params(seed=8, temperature=100, top_k=2, logprobs=20),
]
"""One row of each kind: greedy in both ways, every stage alone, all together, with and without log-probabilities."""


FEATURE_SETS = {
    "greedy": {"temperature": 0},
    "temperature": {"seed": 1, "temperature": 0.7},
    "server": {"seed": 2, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "top_n_sigma": {"seed": 3, "top_n_sigma": 1.5},
    "top_k": {"seed": 4, "top_k": 5},
    "typ_p": {"seed": 5, "typical_p": 0.6},
    "top_p": {"seed": 6, "top_p": 0.5},
    "min_p": {"seed": 7, "min_p": 0.2},
    "min_keep": {"seed": 8, "top_p": 0.01, "min_p": 0.99, "typical_p": 0.1, "min_keep": 6},
    "xtc": {"seed": 9, "xtc_probability": 0.6, "xtc_threshold": 0.004},
    "temperature first": {"seed": 10, "temperature": 1.6, "min_p": 0.3, "samplers": ["temperature", "min_p"]},
    "dynatemp": {"seed": 11, "temperature": 0.9, "dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
    "dynatemp first": {"seed": 12, "dynatemp_range": 0.8, "top_p": 0.7, "samplers": ["temperature", "top_p"]},
    "adaptive_p": {"seed": 13, "adaptive_target": 0.2, "temperature": 1.2},
    "mirostat 1": {"seed": 14, "mirostat": 1, "mirostat_tau": 4},
    "mirostat 2": {"seed": 15, "mirostat": 2, "mirostat_tau": 3},
    "cold mirostat": {"temperature": 0, "mirostat": 2},
    "logprobs": {"seed": 16, "logprobs": 3, "temperature": 0.5},
    "processed logprobs": {"seed": 17, "logprobs": 5, "top_k": 9, "logprobs_mode": "processed"},
    "probabilities": {"temperature": 0, "logprobs": -1, "post_sampling_probs": True},
    "penalties": {"seed": 18, "repetition_penalty": 1.3, "presence_penalty": 0.7, "window_frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1},
    "dry": {"seed": 19, "dry_multiplier": 0.8, "dry_penalty_last_n": -1, "dry_allowed_length": 1},
    "bias and masks": {"seed": 20, "logit_bias": [[5, 3], [6, False]], "min_tokens": 4, "bad_words": ["7", "8"]},
}
"""One row for each thing a row can ask of the sampler."""
