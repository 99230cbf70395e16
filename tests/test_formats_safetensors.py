"""Safetensors folders: values, the choice of shards, assets, refusals."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_checkpoint import CHATML, tiny_weights, write_safetensors, write_tiny_llama

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.detect import is_gguf, is_safetensors_folder
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
WORKING_MEMORY = 4 << 20  # a few blocks of 1 MiB; the tensor of the test has 16 MiB


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and bool(np.array_equal(left.view(np.uint32), right.view(np.uint32)))


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    return caught.value


def rewrite(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "kind"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("shards", [1, 3])
def test_values_are_the_written_ones(tmp_path: Path, dtype: str, kind: Any, shards: int) -> None:
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path, dtype=dtype, shards=shards, tie=False))
    weights = tiny_weights(tie=False)
    assert set(checkpoint.tensors) == set(weights)
    for name, values in weights.items():
        assert same_bits(checkpoint.read(name), values.astype(kind).astype(np.float32)), name
        assert checkpoint.tensors[name].shape == values.shape
        assert checkpoint.tensors[name].dtype == dtype
        assert checkpoint.tensors[name].nbytes == values.size * np.dtype(kind).itemsize


def test_values_equal_the_safetensors_library(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path, dtype="F16"))
    for name, values in load_file(tmp_path / "model.safetensors").items():
        assert same_bits(checkpoint.read(name), values.astype(np.float32)), name


@pytest.mark.parametrize(("dtype", "name"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_facts(tmp_path: Path, dtype: str, name: str) -> None:
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path, dtype=dtype))
    assert (checkpoint.format, checkpoint.naming, checkpoint.architecture) == ("safetensors", "hf", "llama")
    assert checkpoint.quantisation == name
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.path == tmp_path


def test_reads_into_a_slice_of_a_larger_array(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path, vocab=5000))  # 320,000 values: more than one block
    fused = np.full((2, 5000, 64), -1, np.float32)
    assert checkpoint.read(EMBED, fused[1]) is not None
    assert same_bits(fused[1], tiny_weights(vocab=5000)[EMBED])
    assert (fused[0] == -1).all()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_reading_needs_a_block_and_not_a_tensor(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(tmp_path / "model.safetensors", {"w": np.ones((2048, 2048), np.float32)}, dtype)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    out = np.zeros((2048, 2048), np.float32)
    tracemalloc.start()
    try:
        checkpoint.read("w", out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (out == 1).all()
    assert peak < WORKING_MEMORY


def test_out_must_fit(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path))
    with pytest.raises(KeyError):
        checkpoint.read("model.nothing")
    for out in (np.empty((320, 64)), np.empty((64, 320), np.float32), np.empty((64, 320), np.float32).T):
        with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight must be writable float32 \[320, 64\]"):
            checkpoint.read(EMBED, out)
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read(EMBED)


def test_an_integer_tensor_may_lie_there_and_is_refused_when_read(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    header = json.dumps({"ids": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "extra.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.tensors["ids"].dtype == "I64"
    with pytest.raises(CheckpointError, match=r"'ids' \[2\] is I64; F32, F16, BF16 are read"):
        checkpoint.read("ids")


# --- which files ---------------------------------------------------------------------------------------------------


def test_h_l5_tied_embeddings_with_a_stray_head_open_and_leave_the_choice_to_the_schema(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    stray = {HEAD: np.full((320, 64), 7, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", {**tiny_weights(), **stray})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert HEAD in checkpoint.tensors
    assert same_bits(checkpoint.read(EMBED), tiny_weights()[EMBED])


def test_h_l15_an_index_with_old_file_names_gives_way_to_the_files(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    for number in (1, 2):
        (tmp_path / f"model-{number:05d}-of-00002.safetensors").rename(tmp_path / f"weights{number}.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, values in tiny_weights().items():
        assert same_bits(checkpoint.read(name), values), name


def test_h_l15_an_index_with_one_tensor_in_the_wrong_file_gives_way_to_the_files(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    rewrite(tmp_path / INDEX, weight_map={**weight_map, EMBED: "model-00002-of-00002.safetensors"})
    assert same_bits(SafetensorsCheckpoint(tmp_path).read(EMBED), tiny_weights()[EMBED])


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_h_l15_a_shard_that_is_missing_is_named(tmp_path: Path, lost: int) -> None:
    write_tiny_llama(tmp_path, shards=3)
    file = f"model-{lost:05d}-of-00003.safetensors"
    (tmp_path / file).unlink()
    error = refusal(tmp_path)
    assert f"missing files: {file}" in error.message
    assert "names 20 tensors" in error.message


def test_h_l15_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2, tie=False)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    weights = tiny_weights(tie=False)
    names = json.loads((tmp_path / INDEX).read_text())["weight_map"].items()
    write_safetensors(shard, {name: weights[name] for name, file in names if file == shard.name and name != HEAD})
    assert f"1 of them are in no file here, '{HEAD}'" in refusal(tmp_path).message


OLD_HEAD = {"lm_head.weight": "model-00003-of-00003.safetensors"}
BUFFER = {"model.layers.0.self_attn.rotary_emb.inv_freq": "model-00001-of-00002.safetensors"}
DRAFT = {"model.layers.2.self_attn.q_proj.weight": "model-00003-of-00003.safetensors"}


@pytest.mark.parametrize("more", [OLD_HEAD, BUFFER, DRAFT], ids=["tied head", "buffer", "layer beyond the last"])
def test_h_l15_what_the_text_model_does_not_need_may_be_missing(tmp_path: Path, more: dict[str, str]) -> None:
    write_tiny_llama(tmp_path, shards=2)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    rewrite(tmp_path / INDEX, weight_map={**weight_map, **more})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, values in tiny_weights().items():
        assert same_bits(checkpoint.read(name), values), name


@pytest.mark.parametrize("layers", [2, 3])
def test_h_l15_a_folder_that_lacks_the_last_layers_says_which_file_had_them(tmp_path: Path, layers: int) -> None:
    write_tiny_llama(tmp_path, shards=2, layers=layers)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "missing files: model-00002-of-00002.safetensors" in refusal(tmp_path).message


def test_h_l15_without_an_index_a_number_may_lack_where_nothing_else_does(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, values in tiny_weights().items():
        assert same_bits(checkpoint.read(name), values), name


@pytest.mark.parametrize("lost", [*tiny_weights(tie=False)])
def test_h_l15_without_an_index_one_tensor_of_a_missing_file_is_noticed(tmp_path: Path, lost: str) -> None:
    write_tiny_llama(tmp_path, tie=False)
    (tmp_path / "model.safetensors").unlink()
    kept = {name: values for name, values in tiny_weights(tie=False).items() if name != lost}
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", kept)
    assert "lacks 1 of 2 shards: model-00002-of-00002.safetensors" in refusal(tmp_path).message


def test_h_l15_without_an_index_the_files_are_taken_together(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=3)
    (tmp_path / INDEX).unlink()
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, values in tiny_weights().items():
        assert same_bits(checkpoint.read(name), values), name


def test_h_l15_without_an_index_the_numbering_tells_what_is_missing(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=3)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 of 3 shards: model-00002-of-00003.safetensors" in refusal(tmp_path).message


def test_h_l16_a_complete_index_keeps_stray_files_out(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    write_safetensors(tmp_path / "stray.safetensors", {**tiny_weights(seed=9), "extra": np.ones(3, np.float32)})
    (tmp_path / "broken.safetensors").write_bytes(b"not opened at all")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.tensors) == set(tiny_weights())
    for name, values in tiny_weights().items():
        assert same_bits(checkpoint.read(name), values), name


@pytest.mark.parametrize("index", ["none", "stale"])
def test_h_l16_the_same_tensor_in_two_files_is_refused(tmp_path: Path, index: str) -> None:
    write_tiny_llama(tmp_path, shards=2)
    write_safetensors(tmp_path / "stray.safetensors", {EMBED: tiny_weights(seed=9)[EMBED]})
    if index == "none":
        (tmp_path / INDEX).unlink()
    else:
        weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        rewrite(tmp_path / INDEX, weight_map={name: f"old-{file}" for name, file in weight_map.items()})
    error = refusal(tmp_path)
    assert EMBED in error.message
    assert "model-00001-of-00002.safetensors" in error.message
    assert "stray.safetensors" in error.message


def test_an_empty_index_gives_way_to_the_files(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    rewrite(tmp_path / INDEX, weight_map={})
    assert set(SafetensorsCheckpoint(tmp_path).tensors) == set(tiny_weights())


@pytest.mark.parametrize("weight_map", [None, [], {EMBED: 3}])
def test_an_index_without_a_map_is_explained(tmp_path: Path, weight_map: Any) -> None:
    write_tiny_llama(tmp_path, shards=2)
    rewrite(tmp_path / INDEX, weight_map=weight_map)
    assert "has no weight_map" in refusal(tmp_path).message


@pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, outside: str) -> None:
    write_tiny_llama(tmp_path, shards=2)
    rewrite(tmp_path / INDEX, weight_map={EMBED: outside})
    assert "not a plain file name" in refusal(tmp_path).message


# --- what lies beside the weights ----------------------------------------------------------------------------------


def test_assets_hold_what_is_there(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|bos|>"}')
    assets = SafetensorsCheckpoint(tmp_path).assets
    assert assets["tokenizer.json"] == tmp_path / "tokenizer.json"
    assert assets["tokenizer_config.json"]["chat_template"] == CHATML
    assert assets["generation_config.json"]["eos_token_id"] == [1, 3]
    assert assets["special_tokens_map.json"] == {"bos_token": "<|bos|>"}
    assert assets["chat_template.jinja"] == "{{ 'é' }}"
    assert "chat_template.json" not in assets
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    assert set(SafetensorsCheckpoint(tmp_path).assets) == {"chat_template.jinja", "special_tokens_map.json"}


# --- refusals ------------------------------------------------------------------------------------------------------


class Trap:
    """A pickle that would make a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "MODEL.BIN"])
def test_h_p9_pickled_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder, sprung = tmp_path / "model", tmp_path / "sprung"
    write_tiny_llama(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(sprung)))
    assert is_safetensors_folder(folder)
    error = refusal(folder)
    assert name in error.message
    assert error.hint is not None
    assert "convert" in error.hint
    assert name in refusal(folder / name).message
    assert not sprung.exists()


def test_h_p9_pickled_weights_are_not_even_opened(tmp_path: Path) -> None:
    """The link leads nowhere: any attempt to open it would be another error."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").symlink_to(tmp_path / "nowhere")
    assert "pytorch_model.bin" in refusal(tmp_path).message


def test_pickles_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "pytorch_model.bin").symlink_to(tmp_path / "nowhere")
    assert same_bits(SafetensorsCheckpoint(tmp_path).read(EMBED), tiny_weights()[EMBED])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no config.json"),
        ("{", "config.json is not valid JSON"),
        ("[1]", "config.json holds a JSON list"),
        ("\xff", "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ('{"model_type": "llama", "model_type": "qwen2"}', "'model_type' occurs twice"),
        ("{}", "model_type is None"),
        ('{"model_type": 3}', "model_type is 3"),
    ],
)
def test_a_bad_config_is_explained(tmp_path: Path, text: str | None, words: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    error = refusal(tmp_path)
    assert words in error.message
    assert str(tmp_path) in error.message


def test_a_damaged_asset_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    assert "generation_config.json is not valid JSON" in refusal(tmp_path).message


def test_detection_looks_at_names(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    assert is_safetensors_folder(folder)
    assert is_safetensors_folder(folder / "model.safetensors")
    assert not is_safetensors_folder(folder / "config.json")
    assert not is_safetensors_folder(tmp_path / "empty")
    assert not is_safetensors_folder(tmp_path / "nowhere")
    assert not is_gguf(folder)
    (folder / "config.json").unlink()
    assert is_safetensors_folder(folder)
    assert f"give the folder instead: {folder}" in str(refusal(folder / "model.safetensors").hint)
    shutil.rmtree(folder)
    assert not is_safetensors_folder(folder)
