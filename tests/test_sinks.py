"""Sinks: a learned score of each head beside those of positions, which takes its share of the softmax for nothing."""

import attrs
import numpy as np
import pytest
from broken_families import broken_by
from layered_family import HEADS, Layered, layered_checkpoint, layered_logits
from real_engine import assert_same_bits
from test_family_kit_layers import changed_context, layered_over
from test_windows import LOGITS_TOLERANCE, TOLERANCE, fed, ids_of
from tested_backends import loaded_family

from mlxcel.core.kv import BLOCK
from mlxcel.self_test import seeded_checkpoint
from mlxcel_reference_numpy.attention import attend_token, attend_window

KV_HEADS, GROUP, DIM = 2, 3, 8
SINKS = np.array([[-100, -1, 0], [0.5, 4, 30]], np.float32)
"""From one that takes nothing to one that takes nearly everything, some above every score of a row."""


@pytest.mark.parametrize("position", [0, 5, 127, 128, 300])
@pytest.mark.parametrize("window", [None, 100])
def test_a_sink_takes_its_share_and_gives_nothing(window, position):
    rng = np.random.default_rng(position)
    blocks = position // BLOCK + 1
    keys, values = np.full((2, KV_HEADS, blocks * BLOCK, DIM), np.nan, np.float32)
    for pool in (keys, values):
        pool[:, : position + 1] = rng.standard_normal((KV_HEADS, position + 1, DIM))
    q = rng.standard_normal((KV_HEADS, GROUP, DIM)).astype(np.float32)
    first = 0 if window is None else max(0, position - window + 1)
    seen = slice(first, position + 1)
    scores = np.einsum("kgd,kpd->kgp", q.astype(np.float64), keys[:, seen])
    weights = np.exp(scores)
    shares = weights / (weights.sum(axis=-1) + np.exp(SINKS.astype(np.float64)))[..., None]
    expected = np.einsum("kgp,kpd->kgd", shares, values[:, seen])
    if window is None:
        ours = attend_token(q, keys[None], values[None], np.array([0]), position, 1.0, sinks=SINKS)
    else:
        ours = attend_window(q, keys, values, window, position, 1.0, sinks=SINKS)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("layers", [("window 20 sinks", "full"), ("full sinks", "window 130", "window 20 sinks")])
def test_layers_with_sinks_are_the_formula_in_any_chunks(backend, layers):
    """Beside layers without; what the other layers compute has no word of them."""
    checkpoint = layered_checkpoint(*layers, softcap=2.0)
    loaded, ids = loaded_family(Layered(), checkpoint), ids_of(150)
    whole = loaded.logits(ids, context=512)
    expected = layered_logits(checkpoint, ids)
    bound = LOGITS_TOLERANCE * np.abs(expected).max()
    assert np.abs(whole - expected).max() <= bound
    without = layered_checkpoint(*(kind.removesuffix(" sinks") for kind in layers), softcap=2.0)
    assert np.abs(expected - layered_logits(without, ids)).max() > 100 * bound
    for chunk in (7, 64):
        assert_same_bits(whole, fed(loaded, ids, chunk), f"chunk {chunk}")


class TwoOfEachHead(Layered):
    def schema(self, config):
        schema = super().schema(config)
        return attrs.evolve(
            schema,
            weights=tuple(attrs.evolve(w, shape=(2 * HEADS,)) if w.name == "sinks" else w for w in schema.weights),
        )


def asking(name):
    def attend(self, q, k, v, **options):
        return self.ctx.attend(q, k, v, **{**options, "sinks": name})

    return layered_over(changed_context(attend=attend))


@pytest.mark.parametrize(
    ("family", "layers", "words"),
    [
        (TwoOfEachHead(), ["full sinks"], f"attend asks for the sinks 'sinks', [{2 * HEADS}], of {HEADS} heads"),
        (asking("taps"), ["state", "full"], "attend asks for 'taps' in layer 1"),
        (asking("mixer_norm"), ["full"], "mixer_norm"),
    ],
)
def test_the_kit_finds_sinks_that_are_none(family, layers, words):
    checkpoint = seeded_checkpoint(family, "layered", {"layers": layers})
    assert words in broken_by(family, checkpoint)
