"""The backends that engine tests run on.

A test that takes the fixture `backend` runs on each of them. `real_engine`, `loaded_family` and what is built on them
make the one that the running test is about, which is the reference where a test says nothing.
"""

import functools
from contextlib import contextmanager
from contextvars import ContextVar

import attrs

from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.family_run import LoadedFamily
from mlxcel_reference_numpy.backend import NumpyBackend

REFERENCE = "reference-numpy"
BACKENDS = (REFERENCE, "jax-cuda")

_tested = ContextVar("tested backend", default=REFERENCE)


@contextmanager
def running_on(name):
    """Inside, `backend_in_test()` is this one."""
    token = _tested.set(name)
    try:
        yield name
    finally:
        _tested.reset(token)


def backend_in_test():
    """The name of the backend that the running test is about."""
    return _tested.get()


class KeepingSampler(ChainSampler):
    """The chain, which also keeps the logits of the last step."""

    logits = None

    def draw(self, xp, logits, sampling, carry):
        self.logits = logits
        return super().draw(xp, logits, sampling, carry)


class KeepingNumpy(NumpyBackend):
    """NumPy, which keeps the logits [V] of each draw by (sequence id, position of the token that was drawn), and takes
    runs of steps as a backend does that has a program for them."""

    decode_runs = ((2, 4), (4, 2))

    @property
    def caps(self):
        return attrs.evolve(super().caps, decode_runs=self.decode_runs)

    def submit_run(self, plans):
        return list(map(self.submit, plans))

    def start(self, layout, sampler):
        self.sampler = sampler
        self.kept = {}
        super().start(layout, sampler)

    def submit(self, plan):
        result = super().submit(plan)
        for place, row in enumerate(plan.draw_rows):
            key = int(plan.sequence_ids[row]), int(plan.seq_lens[row])
            self.kept[key] = self.sampler.logits[place].copy()
        return result

    def kv_arrays(self):
        """Every array of KV and state."""
        return [array for layer in self._running.storage for array in layer.arrays]

    def fill_kv(self, value):
        """All of them hold `value`."""
        for array in self.kv_arrays():
            array[...] = value


def keeping_backend(**options):
    """One of the tested kind that keeps logits: `backend.kept[sequence id, position]`."""
    if backend_in_test() == REFERENCE:
        return KeepingNumpy()
    from keeping_jax import KeepingJax

    return KeepingJax(device="cpu", **options)


def loaded_family(family, checkpoint):
    """The family with these weights, on the tested backend and without an engine."""
    if backend_in_test() == REFERENCE:
        return LoadedFamily.load(family, checkpoint)
    from keeping_jax import JaxFamily

    return JaxFamily.load(family, checkpoint)


def chain_for(backend, *, vocab, tokenizer=None):
    """The sampler for a keeping backend. Engines on JAX share one, and with it what was compiled for it."""
    if isinstance(backend, NumpyBackend):
        return KeepingSampler(vocab=vocab, tokenizer=tokenizer)
    if isinstance(tokenizer, ByteTokenizer | None):
        return _shared_chain(vocab, tokenizer is not None)
    return ChainSampler(vocab=vocab, tokenizer=tokenizer)


@functools.cache
def _shared_chain(vocab, bytes_only):
    return ChainSampler(vocab=vocab, tokenizer=ByteTokenizer() if bytes_only else None)
