"""What the measuring tools share: the model they take, and the prompt of ours (docs/spec/clients.md 6.2, 6.5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoint import write_tiny_llama

from mlxcel.config import EngineConfig
from mlxcel.core.bind_params import Caps
from mlxcel.core.params import SamplingParams
from mlxcel.core.source import NoProgress
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.direct import generate
from mlxcel.errors import UsageError
from mlxcel.plugins.manager import PluginManager
from mlxcel.prepare import Prompt, sequence_spec
from mlxcel.testing.byte_tokenizer import BOS, ByteTokenizer
from mlxcel.testing.random_checkpoint import SHAPES
from mlxcel.tools.model_choice import ChosenModel, chosen_model
from mlxcel.tools.prompts import PARAGRAPH, built_in_prompt, random_prompt
from mlxcel.tools.random_tokenizer import RandomTokenizer

SMALL = {
    **SHAPES["qwen3-0.6b"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2000,
    "max_position_embeddings": 256,
}


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager.load(only=(), trace=None)


def config(**given: object) -> EngineConfig:
    return EngineConfig.resolve({"backend": "reference-numpy", **given}, environ={"HOME": "/nowhere"})


def small(manager: PluginManager, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> ChosenModel:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    return chosen_model(config(), manager, random_weights="small", weights_seed=seed)


@pytest.mark.parametrize("length", [1, 2, 100, len(PARAGRAPH), 5000])
def test_the_prompt_has_its_length_to_the_token(length: int) -> None:
    plain, with_bos = ByteTokenizer(), ByteTokenizer(adds_bos=True)
    ids = built_in_prompt(plain, length)
    assert (ids.dtype, len(ids)) == (np.int32, length)
    assert bytes(ids.tolist()) == (PARAGRAPH * (1 + length // len(PARAGRAPH))).encode()[:length]
    assert built_in_prompt(with_bos, length).tolist() == [BOS, *ids.tolist()][:length]


def test_random_prompts_are_of_the_whole_vocabulary_and_of_their_seed() -> None:
    ids = random_prompt(2000, 4000)
    assert (ids.dtype, ids.min() < 20, ids.max() > 1980) == (np.int32, True, True)
    assert np.array_equal(ids, random_prompt(2000, 4000, seed=0))
    assert not np.array_equal(ids, random_prompt(2000, 4000, seed=1))


def test_every_id_of_random_weights_is_a_token() -> None:
    tokenizer: Tokenizer = RandomTokenizer(300)
    assert tokenizer.size == 300
    assert tokenizer.decode([72, 105, 299, 300, -1], skip_special=True) == "Hi⟨299⟩"
    assert tokenizer.encode("Hi", add_special=True) == [72, 105]
    assert not tokenizer.eos_ids
    assert not any(tokenizer.is_special(token) for token in range(301))


def test_random_weights_are_loaded_and_served_as_a_model_is(
    manager: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = small(manager, monkeypatch)
    assert (chosen.name, chosen.random, chosen.vocab) == ("random:small", True, 2000)
    tokenizer = chosen.tokenizer(config(), manager, NoProgress())
    prompt = chosen.prompt(tokenizer, 20)
    assert prompt.max() >= 256
    with chosen.load(config(), manager, NoProgress()) as model:
        assert (model.facts.name, model.facts.source, model.facts.vocab) == ("random:small", "random", 2000)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
        spec = sequence_spec(model, Prompt(tuple(prompt.tolist())), params, request_id="x", caps=Caps(max_n=1))
        first = generate(model.engine, spec, planner=model.planner)
        fingerprint = model.engine.settings.identity.fingerprint
    assert max(first.token_ids) >= 300  # no tokenizer of a file cuts the vocabulary
    serving = chosen.serve(config(), manager, NoProgress(), max_queue_depth=4)
    try:
        assert serving.model.engine.settings.slots == 4
        assert serving.model.engine.settings.identity.fingerprint == fingerprint
    finally:
        serving.close()
    with small(manager, monkeypatch, seed=1).load(config(), manager, NoProgress()) as other:
        assert other.engine.settings.identity.fingerprint != fingerprint


def test_a_named_model_is_read_as_far_as_its_tokenizer(manager: PluginManager, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    chosen = chosen_model(config(model=str(folder)), manager, random_weights=None)
    assert (chosen.name, chosen.random, chosen.vocab) == (str(folder), False, None)
    tokenizer = chosen.tokenizer(config(model=str(folder)), manager, NoProgress())
    assert tokenizer.size == 300
    assert len(chosen.prompt(tokenizer, 50)) == 50


def test_random_weights_beside_a_model_are_refused(manager: PluginManager) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        chosen_model(config(model="tiny"), manager, random_weights="qwen3-0.6b")
    with pytest.raises(UsageError, match="no such shape") as caught:
        chosen_model(config(), manager, random_weights="qwen3")
    assert "qwen3-1.7b" in str(caught.value.hint)
    by_variable = EngineConfig.resolve({}, environ={"HOME": "/nowhere", "MLXCEL_MODEL": "tiny"})
    assert chosen_model(by_variable, manager, random_weights="qwen3-0.6b").random
