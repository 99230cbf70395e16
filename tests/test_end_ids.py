"""Ends of a reply, and what is taken from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from tiny_checkpoint import write_json, write_tiny_gguf, write_tiny_llama

from mlxcel.errors import CheckpointError, MlxcelError, UsageError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import gguf_tokenizer, hf_json
from mlxcel.text.end_ids import end_ids
from mlxcel.text.generation_config import GenerationDefaults

VOCAB = 320


@attrs.frozen
class Files:
    """As much of a checkpoint as a generation config needs."""

    assets: dict[str, Any]
    path: Path = Path("model")


def read(settings: Any, mode: str | Path = "auto") -> GenerationDefaults:
    assets = {} if settings is None else {"generation_config.json": settings}
    return GenerationDefaults.read(mode, Files(assets))  # type: ignore[arg-type]  # a part of one


def ends(
    config: dict[str, Any], generation: GenerationDefaults | None = None, family: tuple[int, ...] = ()
) -> set[int]:
    return set(end_ids(config, generation, None, family, VOCAB).ids)


@pytest.mark.parametrize(("value", "ids"), [([2, 7], {2, 7}), (7, {7}), ([7], {7}), ([], set()), (None, set())])
def test_h_c1_every_id_of_the_generation_config_ends(value: Any, ids: set[int]) -> None:
    """5.2: an int or a list."""
    assert ends({}, read({"eos_token_id": value})) == ids
    assert ends({"eos_token_id": value}) == ids
    assert ends({"text_config": {"eos_token_id": value}}) == ids


def test_the_set_is_the_union_and_says_who_named_each() -> None:
    """5.2."""
    found = end_ids(
        {"eos_token_id": 1, "text_config": {"eos_token_id": [1, 4]}}, read({"eos_token_id": [2, 1]}), None, [9], VOCAB
    )
    assert dict(found.sources) == {
        1: ("config.json", "config.json text_config", "model/generation_config.json"),
        4: ("config.json text_config",),
        2: ("model/generation_config.json",),
        9: ("family",),
    }
    assert found.ids == {1, 2, 4, 9}
    assert found.warnings == ()


@pytest.mark.parametrize("outside", [-1, VOCAB, 2**70])
def test_an_id_outside_the_vocabulary_is_dropped_with_a_warning(outside: int) -> None:
    """5.2."""
    found = end_ids({"eos_token_id": [outside, VOCAB - 1]}, read({"eos_token_id": outside}), None, (outside, 0), VOCAB)
    assert found.ids == {0, VOCAB - 1}
    assert len(found.warnings) == 3
    assert all(str(outside) in warning and str(VOCAB) in warning for warning in found.warnings)
    assert [warning.split()[0] for warning in found.warnings] == [
        "config.json",
        "model/generation_config.json",
        "family",
    ]


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "7"], [[2]], {"id": 2}])
def test_an_end_that_is_no_id_names_file_and_key(value: Any) -> None:
    with pytest.raises(CheckpointError, match="config: eos_token_id"):
        ends({"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        read({"eos_token_id": value}, "eos")


def test_h_c5_tokenizer_and_files_together(tmp_path: Path) -> None:
    """5.2: config 1, generation config [1, 3], and the tokenizer's own, from either format."""
    folder = SafetensorsCheckpoint(write_tiny_llama(tmp_path / "hf"))
    found = end_ids(folder.config, GenerationDefaults.read("eos", folder), hf_json.load(folder), (), VOCAB)
    assert found.ids == {1, 3}
    assert "tokenizer" in found.sources[1]
    assert str(tmp_path / "hf" / "generation_config.json") in found.sources[3]
    gguf = GgufCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eot_token_id": 2}))
    found = end_ids(gguf.config, GenerationDefaults.read("auto", gguf), gguf_tokenizer.load(gguf), (), VOCAB)
    assert dict(found.sources) == {1: ("tokenizer",), 2: ("tokenizer",), 3: ("tokenizer",)}


def test_generation_config_none_leaves_that_file_out() -> None:
    settings = {"eos_token_id": [2, 7], "temperature": 0.3}
    assert read(settings, "none") == GenerationDefaults()
    assert ends({"eos_token_id": 1}, read(settings, "none")) == {1}


FULL = {
    "eos_token_id": [2, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 50, "do_sample": True,
    "repetition_penalty": 1.2, "max_length": 20, "bos_token_id": 1,
}  # fmt: skip


def test_auto_takes_the_named_fields_and_no_penalty() -> None:
    file = "model/generation_config.json"
    assert read(FULL) == GenerationDefaults(eos_ids=(2, 7), temperature=0.6, top_p=0.9, top_k=50, eos_origin=file)
    assert {field.name for field in attrs.fields(GenerationDefaults)} == {
        "eos_ids", "temperature", "top_p", "top_k", "eos_origin",
    }  # fmt: skip
    assert read(None) == GenerationDefaults()


def test_eos_takes_the_ends_only_and_looks_at_nothing_else() -> None:
    only = GenerationDefaults(eos_ids=(2, 7), eos_origin="model/generation_config.json")
    assert read(FULL, "eos") == only
    assert read({**FULL, "temperature": "warm"}, "eos") == only


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": None}])
def test_do_sample_false_is_temperature_zero(settings: dict[str, Any]) -> None:
    assert read({**settings, "do_sample": False}).temperature == 0.0
    assert read({**settings, "do_sample": None}).temperature == settings.get("temperature")


@pytest.mark.parametrize("dropped", ["temperature", "top_p", "top_k", "do_sample"])
def test_h_c4_each_field_is_taken_alone(dropped: str) -> None:
    """One that the file lacks, or that a request overrides, drops no other, least of all the ends."""
    taken, whole = read({key: value for key, value in FULL.items() if key != dropped}), read(FULL)
    for name in ("eos_ids", "temperature", "top_p", "top_k", "eos_origin"):
        assert getattr(taken, name) == (None if name == dropped else getattr(whole, name))
    overridden = attrs.evolve(read(FULL), temperature=0.0)
    assert ends({}, overridden) == {2, 7}


def test_a_file_is_read_as_auto_reads_the_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    write_json(file, {**FULL, "eos_token_id": 5})
    for mode in (file, str(file)):
        taken = read(FULL, mode)
        assert taken == GenerationDefaults(eos_ids=(5,), temperature=0.6, top_p=0.9, top_k=50, eos_origin=str(file))
    assert ends({}, read(FULL, file)) == {5}


@pytest.mark.parametrize("said", [{}, {"eos_token_id": None}])
@pytest.mark.parametrize("beside", [{"eos_token_id": [2, 7]}, {"eos_token_id": [2, 7], "temperature": "warm"}])
def test_h_c4_a_file_that_names_no_end_leaves_the_models_in_force(
    tmp_path: Path, said: dict[str, Any], beside: dict[str, Any]
) -> None:
    """An override of the temperature only; of the model's own file nothing but the ends is looked at."""
    file = tmp_path / "mine.json"
    write_json(file, {"temperature": 0.6, **said})
    taken = read(beside, file)
    assert taken == GenerationDefaults(eos_ids=(2, 7), temperature=0.6, eos_origin="model/generation_config.json")
    assert ends({"eos_token_id": 1}, taken) == {1, 2, 7}
    assert end_ids({}, taken, None, (), VOCAB).sources[7] == ("model/generation_config.json",)
    assert read(None, file) == GenerationDefaults(temperature=0.6)


def test_h_c4_a_file_may_name_an_empty_list_of_ends(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    write_json(file, {"eos_token_id": []})
    assert ends({}, read(FULL, file)) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temperature", bad) for bad in (-0.1, 101, "0.6", True, float("nan"), float("inf"), [0.6])),
        *(("top_p", bad) for bad in (-0.1, 1.1, "0.9", False)),
        *(("top_k", bad) for bad in (-2, 50.0, "50", True)),
        *(("do_sample", bad) for bad in ("false", 0, 1)),
        ("eos_token_id", "2"),
    ],
)
def test_a_bad_value_names_file_and_key(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} is") as caught:
        read({key: value})
    assert caught.value.hint
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({key: value}))
    with pytest.raises(UsageError, match=rf"mine\.json: {key} is"):
        read(FULL, file)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", '{"a": 1, "a": 2}'])
def test_a_file_that_cannot_be_read_is_a_usage_error(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MlxcelError, match=r"mine\.json") as caught:
        read(FULL, file)
    assert type(caught.value) is UsageError
    assert caught.value.exit_code == 2
