"""The text model of multimodal wrappers, and other spellings of the same names: read as if it lay there alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import tiny_config, tiny_weights, write_json, write_safetensors, write_tiny_llama
from wrapped_checkpoint import RawTensor, renamed_as, write_raw_safetensors, write_wrapped

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.formats.text_tower import text_model_config
from mlxcel.text.end_ids import end_ids

VISION = {
    "vision_tower.encoder.layers.0.proj.weight": np.ones((4, 4), np.float32),
    "multi_modal_projector.linear.bias": np.ones(4, np.float32),
}
SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "llava, mistral3, gemma3": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "transformers 5": {"model.": "model.language_model."},
    "head inside": {"model.": "model.language_model.", "lm_head.": "model.language_model.lm_head."},
    "idefics3, smolvlm": {"model.": "model.text_model."},
    "base of a wrapper": {"model.": "language_model."},
    "ovis": {"model.": "llm.model.", "lm_head.": "llm.lm_head."},
    "qwen2_vl as published": {"model.": "model."},
    "a prefix nobody knows": {"model.": "x.y1.z.", "lm_head.": "x.lm_head."},
}


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    return caught.value


def assert_is_the_tiny_llama(checkpoint: SafetensorsCheckpoint, *, tie: bool) -> None:
    weights = tiny_weights(tie=tie)
    for name, values in weights.items():
        assert np.array_equal(checkpoint.read(name), values), name
        assert checkpoint.tensors[name].name == name
        assert checkpoint.tensors[name].shape == values.shape
    config = Llama().parse_config(checkpoint)
    assert set(Llama().schema(config).tensor_names("hf")) == set(weights)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("names", SPELLINGS.values(), ids=SPELLINGS.keys())
@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_a_wrapped_text_model_is_seen_alone(tmp_path: Path, names: Mapping[str, str], tie: bool, key: str) -> None:
    write_wrapped(tmp_path, names, tie=tie, key=key, more=VISION, outer={"vision_config": {"hidden_size": 9}})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.architecture == "llama"
    assert set(checkpoint.tensors) == {*tiny_weights(tie=tie), *VISION}
    assert_is_the_tiny_llama(checkpoint, tie=tie)


@pytest.mark.parametrize(("prefix", "told"), [("language_model.model.", True), ("model.", False)])
def test_other_names_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str, told: bool) -> None:
    write_wrapped(tmp_path, {"model.": prefix})
    with caplog.at_level(logging.INFO):
        SafetensorsCheckpoint(tmp_path)
    assert ("lies under 'language_model.model.'" in caplog.text) == told


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("index", ["complete", "none", "of older names", "with a vision shard"])
def test_h_l15_shards_and_prefixes_go_together(tmp_path: Path, shards: int, index: str) -> None:
    write_tiny_llama(tmp_path, shards=shards, config_overrides={"text_config": tiny_config()})
    weights, weight_map = list(tiny_weights().items()), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {f"language_model.{name}": RawTensor.of(values) for name, values in weights[number::shards]}
        write_raw_safetensors(tmp_path / file, part)
        weight_map |= dict.fromkeys(part, file)
    if index == "of older names":
        weight_map = {
            name.replace("language_model.model.", "model.language_model."): weight_map[name] for name in weight_map
        }
    if index == "with a vision shard":
        weight_map |= {"vision_tower.proj.weight": "model-00009-of-00009.safetensors"}
    (tmp_path / "model.safetensors.index.json").unlink()
    if index != "none":
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    assert_is_the_tiny_llama(SafetensorsCheckpoint(tmp_path), tie=True)


def test_h_l15_a_shard_with_tensors_of_the_text_model_is_missed_under_a_prefix_too(tmp_path: Path) -> None:
    write_wrapped(tmp_path, SPELLINGS["llava, mistral3, gemma3"])
    named = [f"language_model.{name}" for name in tiny_weights()]
    weight_map = {**dict.fromkeys(named, "model.safetensors"), named[-1]: "lost.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    weights = {f"language_model.{name}": values for name, values in tiny_weights().items()}
    del weights[named[-1]]
    write_safetensors(tmp_path / "model.safetensors", weights)
    assert "missing files: lost.safetensors" in refusal(tmp_path).message


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("prefix", ["", "model.model.", "base_model.model.model.", "module.model.", "_orig_mod.model."])
def test_names_without_or_with_more_than_the_usual_prefix_are_read(tmp_path: Path, prefix: str, tie: bool) -> None:
    """As AutoModel saves a base model, and as wrappers of training frameworks name it."""
    write_tiny_llama(tmp_path, tie=tie)
    renamed = {renamed_as(name, {"model.": prefix}): values for name, values in tiny_weights(tie=tie).items()}
    write_safetensors(tmp_path / "model.safetensors", renamed)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.tensors) == set(tiny_weights(tie=tie))
    assert_is_the_tiny_llama(checkpoint, tie=tie)


@pytest.mark.parametrize("prefix", ["transformer.", "backbone."])
def test_a_family_may_have_names_of_its_own(tmp_path: Path, prefix: str) -> None:
    write_tiny_llama(tmp_path)
    renamed = {renamed_as(name, {"model.": prefix}): values for name, values in tiny_weights().items()}
    write_safetensors(tmp_path / "model.safetensors", renamed)
    assert set(SafetensorsCheckpoint(tmp_path).tensors) == set(renamed)


@pytest.mark.parametrize(
    "drop", ["model.embed_tokens.weight", *(name for name in tiny_weights() if "layers.1." in name)], ids=str
)
def test_an_incomplete_text_model_keeps_the_names_of_the_file(tmp_path: Path, drop: str) -> None:
    """A lost layer or embedding; a single lost tensor of a layer is named by whoever knows what the family needs."""
    write_wrapped(tmp_path, SPELLINGS["llava, mistral3, gemma3"])
    weights = {f"language_model.{name}": values for name, values in tiny_weights().items()}
    lost = ("language_model.model.layers.1.",) if "layers.1." in drop else (f"language_model.{drop}",)
    kept = {name: values for name, values in weights.items() if not name.startswith(lost)}
    write_safetensors(tmp_path / "model.safetensors", kept)
    assert set(SafetensorsCheckpoint(tmp_path).tensors) == set(kept)


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    write_wrapped(tmp_path, SPELLINGS["llava, mistral3, gemma3"], more={"model.norm.weight": np.ones(64, np.float32)})
    message = refusal(tmp_path).message
    assert "'language_model.model.norm.weight'" in message
    assert "'model.norm.weight'" in message
    assert "two spellings" in message


def test_two_heads_are_refused(tmp_path: Path) -> None:
    head = np.ones((320, 64), np.float32)
    write_wrapped(
        tmp_path, {"model.": "language_model.model."}, tie=False, more={"language_model.lm_head.weight": head}
    )
    assert "two spellings of 'lm_head.weight'" in refusal(tmp_path).message


def test_two_text_models_are_refused(tmp_path: Path) -> None:
    second = {f"talker.{name}": values for name, values in tiny_weights().items()}
    write_wrapped(tmp_path, {"model.": "language_model.model."}, more=second)
    message = refusal(tmp_path).message
    assert "2 text models" in message
    assert "'talker.model.'" in message


def test_a_layer_that_holds_an_embedding_is_no_text_model(tmp_path: Path) -> None:
    """As the draft layers of some models do."""
    more = {"model.layers.2.embed_tokens.weight": np.ones((320, 64), np.float32)}
    write_wrapped(tmp_path, {"model.": "model."}, more=more)
    assert_is_the_tiny_llama(SafetensorsCheckpoint(tmp_path), tie=True)


# --- config ----------------------------------------------------------------------------------------------------------


def test_the_inner_config_wins_and_the_outer_one_completes_it() -> None:
    inner = {"model_type": "llama", "hidden_size": 64, "tie_word_embeddings": None, "eos_token_id": 1}
    outer = {"model_type": "llava", "hidden_size": 5, "tie_word_embeddings": False, "eos_token_id": [1, 106]}
    merged = text_model_config({**outer, "text_config": inner}, "config.json")
    assert (merged["model_type"], merged["hidden_size"], merged["tie_word_embeddings"]) == ("llama", 64, False)
    assert merged["eos_token_id"] == [1, 106]


@pytest.mark.parametrize(
    ("outer", "inner", "ids"), [([5, 7], 3, {3, 5, 7}), (None, 3, {3}), (4, None, {4}), (4, [4, 6], {4, 6})]
)
def test_both_configs_name_ends(tmp_path: Path, outer: Any, inner: Any, ids: set[int]) -> None:
    """docs/spec/engine.md 5.2: the union of everything that names one."""
    text = {**tiny_config(), "eos_token_id": inner}
    write_tiny_llama(tmp_path, config_overrides={"model_type": "llava", "eos_token_id": outer, "text_config": text})
    assert end_ids(SafetensorsCheckpoint(tmp_path).config, None, None, (), 320).ids == ids


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_config": 3}, "text_config is 3, an object is needed"),
        ({"text_config": ["llama"]}, "text_config is list, an object is needed"),
        ({"text_config": {}}, "text_config has no model_type, so that the text model of 'llama'"),
        ({"text_config": {"model_type": 3}}, "model_type is 3"),
        (
            {"model_type": "omni", "thinker_config": {}, "talker_config": {}, "num_hidden_layers": None},
            "'omni' is made of thinker_config, talker_config and has no text_config",
        ),
        ({"vision_config": {"depth": 3}, "num_hidden_layers": None}, "made of vision_config and has no text_config"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder-decoder"),
        ({"text_config": {"model_type": "florence2_language", "is_encoder_decoder": True}}, "is an encoder-decoder"),
        ({"is_encoder_decoder": True, "text_config": {"model_type": "bart"}}, "'bart' is an encoder-decoder"),
    ],
)
def test_what_has_no_text_model_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    error = refusal(write_tiny_llama(tmp_path, config_overrides=fields))
    assert words in error.message
    assert str(tmp_path / "config.json") in error.message


def test_a_flat_config_with_another_tower_beside_it_is_a_text_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, config_overrides={"vision_config": {"depth": 3}})
    assert_is_the_tiny_llama(SafetensorsCheckpoint(tmp_path), tie=True)


def test_files_that_an_index_names_for_another_tower_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_wrapped(tmp_path, SPELLINGS["transformers 5"])
    named = dict.fromkeys([f"model.language_{name}" for name in tiny_weights()], "model.safetensors")
    write_json(
        tmp_path / "model.safetensors.index.json", {"weight_map": {**named, "model.visual.x": "vision.safetensors"}}
    )
    with caplog.at_level(logging.WARNING):
        assert_is_the_tiny_llama(SafetensorsCheckpoint(tmp_path), tie=True)
    assert "vision.safetensors" in caplog.text
