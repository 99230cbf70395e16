"""The JAX backend for tests that look at logits. Only tests that run on it import this module, and with it JAX."""

import functools
from collections import UserDict

import jax
import numpy as np

from mlxcel.core.source import NoProgress
from mlxcel.testing.family_run import LoadedFamily
from mlxcel_jax_cuda.backend import JaxBackend
from mlxcel_jax_cuda.experts import mixture
from mlxcel_jax_cuda.numerics import Numerics


class Kept(UserDict):
    """Logits [V] by key, which stay on the device until somebody looks: keeping them waits for no step."""

    def __getitem__(self, key):
        logits, place = self.data[key]
        return np.asarray(logits)[place].copy()


class KeepingJax(JaxBackend):
    """JAX, which keeps the logits [V] of each draw by (sequence id, position of the token that was drawn)."""

    def start(self, layout, sampler):
        self.kept = Kept()
        super().start(layout, sampler)

    def _at_once(self, launch, asked):
        return False  # else there are no logits to keep

    def _draw(self, plan, launch, asked, logits):
        found = super()._draw(plan, launch, asked, logits)
        for drawn, place in zip(launch.draws, launch.logits, strict=True):
            row = plan.draw_rows[drawn]
            self.kept[int(plan.sequence_ids[row]), int(plan.seq_lens[row])] = logits, place
        return found

    def logits_of(self, plan):
        """Logits [R, V] of a step of which nothing is drawn."""
        running = self._running
        found = np.zeros((len(plan.logits_rows), running.model.config.vocab_size), np.float32)
        for launch in running.launching.cut(plan):
            found[launch.draws] = np.asarray(self._forward(launch)[0])[launch.logits]
        return found

    def kv_arrays(self):
        """Every array of KV and state."""
        return list(self._running.kv)

    def fill_kv(self, value):
        """All of them hold `value`."""
        self._running.kv = jax.tree.map(lambda leaf: leaf.at[...].set(value), self._running.kv)


def moe(x, router, weights, *, top_k, renormalise):
    """The op of that name, alone: x [T, D] by router logits [T, E] through gate, up and down, silu between them."""
    numerics = Numerics("cpu", "float32", "R2")
    program = functools.partial(
        mixture, top_k=top_k, renormalise=renormalise, gated=lambda a, b: jax.nn.silu(a) * b, numerics=numerics
    )
    return np.asarray(jax.jit(program)(x, router, tuple(weights)))


class JaxFamily(LoadedFamily):
    """A family on JAX, with the same ways to feed it. Here `weights` is a backend that has loaded them."""

    @classmethod
    def load(cls, family, checkpoint):
        config, backend = family.parse_config(checkpoint), KeepingJax(device="cpu")
        backend.load(family, config, checkpoint, NoProgress())
        return cls(family, config, backend)

    def _start(self, layout, held):
        self.weights.start(layout, None)
        if held:
            self.weights.fill_kv(held)
        return self.weights.logits_of
