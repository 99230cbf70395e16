"""Which rows' samplers hear of what was drawn."""

import pytest
from engine_rows import CAPS, scripted, spec

from mlxcel.direct import generate
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import EOS

PLANNER = ChunkedPlanner(chunk=2048, level="R2", caps=CAPS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, False),
        ({"temperature": 0.8, "top_k": 5, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.2}, True),
        ({"dry_multiplier": 0.8}, True),
        ({"temperature": 1, "mirostat": 2}, True),
        ({"logprobs": 1}, True),
    ],
    ids=str,
)
def test_a_sampler_hears_of_the_tokens_that_its_draws_depend_on(given, told, monkeypatch):
    """Of memoryless rows nothing is kept: no draw of theirs would look at it (spec C54)."""
    heard, commit = [], ChainSampler.commit

    def heard_of(sampler, state, token, observed):
        heard.append(token)
        commit(sampler, state, token, observed)

    monkeypatch.setattr(ChainSampler, "commit", heard_of)
    it = scripted({"a": [*b"hello", EOS]})
    result = generate(it.engine, spec("a", **given), planner=PLANNER, clock=it.clock)
    assert result.text == "hello"
    assert heard == ([*b"hello"] if told else [])
