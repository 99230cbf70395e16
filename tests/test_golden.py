"""Real checkpoints against an independent implementation's greedy streams (tests/data/golden/*.json)."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from real_engine import real_engine

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.direct import generate
from mlxcel.plugins.families.gemma import Gemma3
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.plugins.tokenizers.gguf_tokenizer import load
from mlxcel.text.chat_template import select_template
from mlxcel.text.prompt import encode_chat, encode_raw

GOLDEN = Path(__file__).parent / "data" / "golden"
PROMPTS = {prompt["id"]: prompt for prompt in json.loads((GOLDEN / "prompts.json").read_text())}

DECISIVE_GAP = 5e-4
"""Below this gap of the two best logits two float32 implementations may choose differently."""

LOGPROB_TOLERANCES = {"smollm2-135m": 2e-4, "gemma3-270m": 5e-4}
"""Float32 sums over 576 to 2048 terms and 18 to 30 layers in another order; what was seen is a quarter of it."""


def cases():
    """(model, case) of every file; gemma3-270m is 240 MB, which make test-slow fetches."""
    return [
        pytest.param(
            model, case, id=f"{model}-{case['id']}", marks=[pytest.mark.slow] if model == "gemma3-270m" else []
        )
        for model in LOGPROB_TOLERANCES
        for case in json.loads((GOLDEN / f"{model}.json").read_text())["cases"]
    ]


@pytest.fixture(scope="module")
def opened(request):
    """model -> (checkpoint, family, tokenizer), each opened once, when a case first asks for it."""
    fixtures = {"smollm2-135m": ("smollm2_path", Llama), "gemma3-270m": ("gemma3_path", Gemma3)}

    @functools.cache
    def open_once(model):
        fixture, family = fixtures[model]
        checkpoint = GgufCheckpoint(request.getfixturevalue(fixture))
        request.addfinalizer(checkpoint.close)
        return checkpoint, family(), load(checkpoint)

    return open_once


@pytest.fixture(scope="module")
def loaded(backend, request, opened):
    """model -> (engine, tokenizer), each loaded once on a backend, when a case first asks for it."""

    @functools.cache
    def load_once(model):
        checkpoint, family, tokenizer = opened(model)
        engine = real_engine(checkpoint, family, slots=1, tokenizer=tokenizer).engine
        request.addfinalizer(engine.shutdown)
        return engine, tokenizer

    return load_once


@pytest.mark.parametrize(("model", "case"), cases())
def test_prompt_ids_are_the_golden_ones(opened, model, case):
    checkpoint, _family, tokenizer = opened(model)
    prompt = PROMPTS[case["id"]]
    if "messages" in prompt:
        ids = encode_chat(tokenizer, select_template(checkpoint), prompt["messages"], now=0).ids
    else:
        ids = encode_raw(tokenizer, prompt["prompt"]).ids
    assert list(ids) == case["prompt_ids"]


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("tokens", [16, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("model", "case"), cases())
def test_greedy_streams_are_the_golden_ones(loaded, model, case, tokens):
    """docs/spec/clients.md 1.10, test 5; H-L21: forgetting to un-permute q and k would give fluent nonsense."""
    engine, tokenizer = loaded(model)
    golden, gaps = case["greedy_ids"][:tokens], case["top2_gap"][:tokens]
    end = next((place for place, token in enumerate(golden) if token in tokenizer.eos_ids), len(golden))
    spec = SequenceSpec(
        case["id"],
        np.array(case["prompt_ids"], np.int32),
        SamplingParams(temperature=0, seed=0, max_tokens=len(golden), logprobs=5),
        tokenizer.eos_ids,
    )
    planner = ChunkedPlanner(chunk=2048, level=engine.level, caps=engine.caps)
    result = generate(engine, spec, planner=planner)
    decided = next((place for place, gap in enumerate(gaps) if gap < DECISIVE_GAP), len(golden))
    assert list(result.token_ids[:decided]) == golden[: min(end, decided)]
    if decided >= end:
        assert result.cause == ("eos" if end < len(golden) else "max_tokens")
    shared = min(len(result.logprobs), len(case["top5_logprobs"]), decided)
    assert shared >= 1
    for ours, theirs in zip(result.logprobs[:shared], case["top5_logprobs"][:shared], strict=True):
        mine = dict(ours.top)
        for token, value in theirs:
            assert mine[token] == pytest.approx(value, abs=LOGPROB_TOLERANCES[model])


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize(("model", "case"), cases())
def test_h_h1_h_h5_scores_are_the_golden_ones(loaded, model, case):
    """H-H1 and H-H5: of the reply's first tokens, given as part of the prompt. No gap of two ids matters here."""
    engine, _tokenizer = loaded(model)
    theirs = case["top5_logprobs"]
    ids = np.array([*case["prompt_ids"], *case["greedy_ids"][: len(theirs)]], np.int32)
    found = engine.score(ids, len(case["prompt_ids"]) - 1, 5)
    values = np.array([[value for _, value in top] for top in theirs])
    np.testing.assert_allclose(found.logprobs, values[:, 0], rtol=0, atol=LOGPROB_TOLERANCES[model])
    np.testing.assert_allclose(found.top_logprobs, values, rtol=0, atol=LOGPROB_TOLERANCES[model])
