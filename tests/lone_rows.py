"""Requests over tiny models, and what each comes to alone: the measure for rows that were disturbed."""

import functools

import numpy as np
from cache_rows import VOCAB, caching
from layered_family import layered_checkpoint
from tested_backends import backend_in_test

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.testing.byte_tokenizer import ByteTokenizer

SLOTS, CONTEXT, CHUNK, PAGE = 4, 128, 32, 16
FULL = CONTEXT // PAGE
"""Pages that a row of the whole context fills: a smaller pool could not hold a lone row (spec V20)."""

MODELS = {
    "full": ("full", "full"),
    "window": ("full", "window 16"),
    "state": ("full", "state"),
}

KINDS = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 1.4, "seed": 5, "top_p": 0.8, "min_p": 0.02},
    "mirostat": {"temperature": 1.0, "seed": 7, "mirostat": 2, "mirostat_tau": 2.0},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.6},
    "dry": {"temperature": 0, "dry_multiplier": 2.0, "dry_allowed_length": 1},  # the host must know each token
    "adaptive": {"temperature": 1.0, "seed": 13, "adaptive_target": 0.3},
}


def prompt_tree():
    """Prompts that share beginnings of all lengths around pages and chunks, and strangers of the same lengths."""
    rng = np.random.default_rng(17)
    stem, twig, other = (tuple(rng.integers(0, VOCAB, 80).tolist()) for _ in range(3))
    prompts = [stem[:length] for length in (1, 15, 16, 17, 31, 33, 48, 64, 80)]
    prompts += [stem[:cut] + twig[:more] for cut in (16, 20, 32, 47, 64) for more in (1, 9, 30)]
    return [*prompts, other[:5], other[:48], other[:80]]


PROMPTS = prompt_tree()
LENGTHS = (1, 5, 12, 33, 33)


@functools.lru_cache
def checkpoint(model):
    return layered_checkpoint(*MODELS[model], vocab_size=VOCAB)


@functools.lru_cache
def lone_engine(model, backend):
    return caching(
        checkpoint(model), store="dense", slots=SLOTS, context=CONTEXT, chunk=CHUNK, tokenizer=ByteTokenizer()
    ).real  # fmt: skip


def spec_of(prompt, kind, length):
    params = SamplingParams(max_tokens=length, **{"seed": 0, **KINDS[kind]})
    return SequenceSpec("row", np.asarray(PROMPTS[prompt], np.int32), params)


def lone(model, prompt, kind, length):
    """Ids and logits [drawn, V] of a request that has an engine to itself, dense, without a cache, on the backend that
    the running test is about."""
    return _lone(model, prompt, kind, length, backend_in_test())


@functools.cache
def _lone(model, prompt, kind, length, backend):
    real, spec = lone_engine(model, backend), spec_of(prompt, kind, length)
    row = real.engine.open(spec)
    outcome = real.engine.prefill(row, real.plan(spec.prompt_ids, CHUNK))
    while outcome.cause is None:
        assert outcome.error is None
        outcome = real.engine.step([row])[0]
    logits, ids = real.close(row)
    return ids, logits
