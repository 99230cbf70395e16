"""Configs as they are published, of which a key decides that the model must be run otherwise or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hollow_checkpoint import GEMMA3, parsed
from tiny_checkpoint import tiny_config, write_json, write_tiny_llama

from mlxcel.core.kv import FullKV, SlidingKV
from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.mistral import Mistral
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint

OUTER = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "eos_token_id": 1}


def wrapped(folder: Path, inner: dict[str, Any], **outer: Any) -> SafetensorsCheckpoint:
    write_tiny_llama(folder)
    write_json(folder / "config.json", {**OUTER, **outer, "text_config": {**tiny_config(), **inner}})
    return SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("inner", "layer"),
    [
        ({"sliding_window": None}, FullKV(2, 16, 16)),
        ({"sliding_window": 16}, SlidingKV(2, 16, 16, 16)),
        ({"max_position_embeddings": 8192}, SlidingKV(2, 16, 16, 4096)),
    ],
    ids=["null", "a number", "left out"],
)
def test_h_l11_a_null_window_inside_a_wrapper_is_no_window(
    tmp_path: Path, inner: dict[str, Any], layer: FullKV | SlidingKV
) -> None:
    """Mistral Small 3: left out, the key means the 4096 of the first Mistral."""
    config = Mistral().parse_config(wrapped(tmp_path, {"model_type": "mistral", **inner}))
    assert Mistral().kv_spec(config).layers == (layer, layer)


@pytest.mark.parametrize(("outer", "rows"), [({}, 4), ({"num_key_value_heads": 2}, 2)])
def test_h_l7_a_null_inside_a_wrapper_is_completed_from_outside_only(
    tmp_path: Path, outer: dict[str, Any], rows: int
) -> None:
    inner = {"model_type": "mistral", "num_key_value_heads": None}
    assert Mistral().parse_config(wrapped(tmp_path, inner, **outer)).kv_heads == rows


@pytest.mark.parametrize(
    ("key", "value"), [("is_causal", False), ("qk_norm", True), ("lm_head_bias", True), ("use_qk_norm", True)]
)
def test_h_l1_a_key_of_another_mathematics_is_refused(tmp_path: Path, key: str, value: bool) -> None:
    """Embedding models see both ways; heads with a bias and norms of q and k are no Llama."""
    with pytest.raises(CheckpointError, match=f"{key} = {value}"):
        Llama().parse_config(SafetensorsCheckpoint(write_tiny_llama(tmp_path, config_overrides={key: value})))
    folder = write_tiny_llama(tmp_path / "neutral", config_overrides={key: not value})
    assert Llama().parse_config(SafetensorsCheckpoint(folder)).layers == 2


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForRewardModel"])
@pytest.mark.parametrize("inside", [False, True])
def test_h_l5_a_model_that_classifies_is_refused_by_its_architecture(tmp_path: Path, head: str, inside: bool) -> None:
    """With tied embeddings nothing is missing, and the body would write fluent nonsense."""
    fields: dict[str, Any] = {"architectures": [f"Llama{head}"]}
    if inside:
        fields["text_config"] = tiny_config()
    with pytest.raises(CheckpointError, match=f"architecture is 'Llama{head}'"):
        SafetensorsCheckpoint(write_tiny_llama(tmp_path, config_overrides=fields))


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", ["LlamaModel"], [3], ["XForConditionalGeneration"]])
def test_other_architectures_say_nothing(tmp_path: Path, names: Any) -> None:
    folder = write_tiny_llama(tmp_path, config_overrides={"architectures": names})
    assert SafetensorsCheckpoint(folder).architecture == "llama"


def test_h_l1_an_embedding_model_of_gemma_is_refused() -> None:
    with pytest.raises(CheckpointError, match="use_bidirectional_attention = True"):
        parsed({**GEMMA3, "use_bidirectional_attention": True})
