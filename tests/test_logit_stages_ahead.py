"""Penalties, biases and masks with a step in flight: the ids of a reply, through the engine (spec C51, D28, E12)."""

import numpy as np
import pytest
from engine_rows import decode, plan_for
from real_engine import real_engine
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint

ROWS = {
    "repetition": {"repetition_penalty": 1.8, "repeat_last_n": 3},
    "repetition of one": {"repetition_penalty": 4.0, "repeat_last_n": 1},
    "repetition of all": {"repetition_penalty": 1.5, "repeat_last_n": -1, "temperature": 1.0, "seed": 3},
    "output": {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    "window": {"window_frequency_penalty": 1.0, "window_presence_penalty": 1.5, "repeat_last_n": 2},
    "masks": {
        "min_tokens": 5, "stop_token_ids": [3], "logit_bias": [[3, 50]], "allowed_token_ids": [*range(3, 40)],
        "frequency_penalty": 0.3,
    },
    "all": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.4, "window_presence_penalty": 0.7, "repeat_last_n": 4,
        "logit_bias": [[5, 1.5], [6, False]], "temperature": 0.8, "top_p": 0.9, "seed": 11,
    },
}  # fmt: skip
STEPS = 14


@pytest.fixture(scope="module")
def engine(backend, tmp_path_factory):
    folder = write_tiny_llama(tmp_path_factory.mktemp("ahead") / "tiny")
    with real_engine(SafetensorsCheckpoint(folder)).engine as engine:
        yield engine


def begun(engine, name):
    prompt = np.array([5, 6, 7, 5, 6], np.int32)
    chosen = SamplingParams(**{"temperature": 0, "seed": 0, "max_tokens": STEPS, **ROWS[name]})
    row = engine.open(SequenceSpec(name, prompt, chosen))
    engine.prefill(row, plan_for(prompt))
    return row


def alone(engine, name):
    row = begun(engine, name)
    while engine.view(row).ending is None:
        engine.step([row])
    output = engine.view(row).output
    engine.close(row)
    return output


def ahead(engine, names):
    """Each step is submitted before the one before it was collected."""
    rows = [begun(engine, name) for name in names]
    tickets = []
    for _ in range(STEPS - 1):
        going = [row for row in rows if engine.view(row).ending is None]
        if not going:
            break
        engine.reserve(decode(*going))
        tickets.append(engine.submit(decode(*going)))
        if len(tickets) > 1:
            engine.collect(tickets.pop(0))
    engine.collect(tickets.pop(0))
    outputs = [engine.view(row).output for row in rows]
    for row in rows:
        engine.close(row)
    return outputs


def test_a_step_ahead_changes_no_id(engine):
    """Every kind of row, all in one step and each by itself; plain rows say something else, so that each acts."""
    names = [name for name in ROWS if name != "masks"]
    expected = {name: alone(engine, name) for name in ROWS}
    assert dict(zip(names, ahead(engine, names), strict=True)) == {name: expected[name] for name in names}
    assert len(set(expected.values())) == len(ROWS)
    for name in names:
        assert ahead(engine, [name]) == [expected[name]]


def test_min_tokens_with_a_step_ahead(engine):
    """The stop that the row wants from the start comes when min_tokens lets it, and no step later."""
    expected = alone(engine, "masks")
    assert len([token for token in expected if token != 3]) == 5
    assert ahead(engine, ["masks"]) == [expected]
