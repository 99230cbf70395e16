"""--debug-numerics: which layer and which weights are not finite (hand case H-Q9)."""

import logging

import numpy as np
import pytest
from layered_family import Layered, layered_checkpoint
from real_engine import assert_same_bits, real_engine
from spoilt_checkpoint import SpoiltCheckpoint
from tested_backends import REFERENCE, keeping_backend
from tiny_checkpoint import tiny_weights, write_safetensors, write_tiny_llama

from mlxcel import LLM
from mlxcel.choose_backend import choose_backend
from mlxcel.config import EngineConfig
from mlxcel.core.plan import Decode
from mlxcel.errors import NumericFault, UsageError
from mlxcel.finite_weights import FiniteWeights
from mlxcel.plugins.manager import PluginManager

pytestmark = pytest.mark.on_jax(most=1)

BAD = 7
"""The token whose embedding is spoilt in some of the tests."""


def engine_of(checkpoint, *, watched=True, slots=3):
    backend = keeping_backend()
    if watched:
        backend.watch_numerics()
    return real_engine(checkpoint, Layered(), slots=slots, context=128, backend=backend)


def layers():
    return layered_checkpoint("full", "state", "window 16+experts", "full")


def first_outcome(made, ids, **params):
    row = made.open(ids, **params)
    return row, made.engine.prefill(row, made.plan(ids))


@pytest.mark.parametrize(
    ("tensor", "place", "words"),
    [
        ("o.0", (3, 4), "in layer 0"),
        ("taps.1", (0, 0), "in layer 1"),
        ("expert_down.2.1", (0, 0), "in layer 2"),
        ("down.3", (5, 5), "in layer 3"),
        ("embed", (BAD, 1), "in the embedding"),
        ("final_norm", (2,), "behind the last layer"),
    ],
)
def test_h_q9_a_row_with_nan_says_the_first_layer(backend, tensor, place, words):
    """Every token of the prompt counts, so that an expert that the last one does not choose is found too."""
    made = engine_of(SpoiltCheckpoint(layers(), {tensor: place}))
    ids = [BAD, *range(1, 40)]
    _, outcome = first_outcome(made, ids)
    assert isinstance(outcome.error, NumericFault)
    assert str(outcome.error).endswith(f"NaN or +inf in its logits at position 40; first not finite {words}")


def test_without_the_flag_nobody_looks(backend):
    made = engine_of(SpoiltCheckpoint(layers(), {"o.0": (3, 4)}), watched=False)
    _, outcome = first_outcome(made, range(1, 30))
    assert str(outcome.error).endswith("NaN or +inf in its logits at position 29")


@pytest.mark.on_jax(most=0)
def test_a_row_that_fails_is_told_apart_from_its_neighbours(backend):
    """Of rows that decode together one is fed the spoilt token; the others have the bits of an engine that nobody
    watches."""
    made, plain = engine_of(SpoiltCheckpoint(layers(), {"embed": (BAD, 1)})), engine_of(layers(), watched=False)
    ids = range(10, 30)
    alone, _ = plain.alone(ids, 1)
    rows = [first_outcome(made, ids, **options)[0] for options in ({}, {"logit_bias": {BAD: 100.0}}, {})]
    parts = [Decode(row) for row in rows]
    made.engine.reserve(parts)
    before, bad, behind = made.engine.collect(made.engine.submit(parts))
    assert str(bad.error).endswith("at position 21; first not finite in the embedding")
    assert [before.error, behind.error] == [None, None]
    for row in (rows[0], rows[2]):
        assert_same_bits(made.close(row)[0], alone)


def test_positions_that_are_scored_say_it_too(backend):
    made = engine_of(SpoiltCheckpoint(layers(), {"down.3": (5, 5)}))
    with pytest.raises(NumericFault, match="first not finite in layer 3"):
        made.engine.score(np.arange(1, 20, dtype=np.int32), top=1)


def test_tensors_that_are_not_finite_are_named_as_they_are_read(caplog):
    checkpoint = FiniteWeights(SpoiltCheckpoint(layers(), {"o.0": (3, 4), "taps.1": (0,)}))
    with caplog.at_level(logging.WARNING, "mlxcel.load"):
        for name in checkpoint.tensors:
            np.testing.assert_array_equal(checkpoint.read(name), checkpoint.inside.read(name))
    assert [record.message for record in caplog.records] == [
        "the tensor o.0 has 1 values of 768 that are not finite",
        "the tensor taps.1 has 24 values of 72 that are not finite",
    ]


def test_h_q9_the_option_reaches_the_weights_and_the_reply(tmp_path, caplog):
    folder = write_tiny_llama(tmp_path / "model")
    weights = tiny_weights()
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = np.inf
    write_safetensors(folder / "model.safetensors", weights)
    with (
        caplog.at_level(logging.WARNING, "mlxcel.load"),
        LLM(folder, backend=REFERENCE, debug_numerics=True, max_model_len=64) as llm,
        pytest.raises(NumericFault, match="first not finite in layer 1"),
    ):
        llm.generate([[5, 6, 7]])
    assert "model.layers.1.mlp.down_proj.weight has 1 values" in caplog.text


def test_a_backend_that_cannot_look_refuses(third_party):
    third_party.install("blind", BLIND)
    config = EngineConfig.resolve({"backend": "blind", "debug_numerics": True}, environ={"HOME": "/nowhere"})
    with pytest.raises(UsageError, match="blind cannot say in which layer"):
        choose_backend(config, PluginManager.load(only=None, trace=None))


BLIND = """
from mlxcel import hookimpl
from mlxcel.core.backend import BackendSpec, Probe

def probe(device):
    return Probe(True, "here")

class Blind:
    def __init__(self, **options):
        pass

@hookimpl
def mlxcel_backends():
    return [BackendSpec("blind", "", f"{__name__}:Blind", priority=1, probe_target=f"{__name__}:probe")]
"""
