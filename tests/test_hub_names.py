"""What is a name at Hugging Face, and which files of a repository it means (docs/spec/clients.md 1.9)."""

from __future__ import annotations

import pytest

from mlxcel.errors import CheckpointError, MlxcelError, UsageError
from mlxcel.plugins.sources.hub_files import HubFile, chosen_files
from mlxcel.store import HubName
from mlxcel.store.record import RECORD, folder_of


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner", "name")),
        ("Qwen/Qwen3-0.6B", HubName("Qwen", "Qwen3-0.6B")),
        ("owner/name@main", HubName("owner", "name")),
        ("owner/name@v1.0", HubName("owner", "name", "v1.0")),
        ("owner/name@refs/pr/1", HubName("owner", "name", "refs/pr/1")),
        ("owner/name:Q4_K_M", HubName("owner", "name", choice="Q4_K_M")),
        ("owner/name:q4_k_m", HubName("owner", "name", choice="Q4_K_M")),
        ("owner/name:sub/Model-q8_0.gguf", HubName("owner", "name", choice="sub/Model-q8_0.gguf")),
        ("owner/name@abc123:BF16", HubName("owner", "name", "abc123", "BF16")),
        ("owner/name.gguf:Q8_0", HubName("owner", "name.gguf", choice="Q8_0")),
    ],
)
def test_a_name_of_the_hub(text: str, name: HubName) -> None:
    assert HubName.parse(text) == name
    assert HubName.parse(name.text) == name
    folder = folder_of(name.text)
    assert folder == name.folder
    assert "/" not in folder


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "owner/", "/name", "./name", "../name", "~/name", "a/b/c", "owner/name/", "owner//name"),
        *(
            "owner/na me",
            "owner/name@",
            "owner/name:",
            "owner/name@a@b",
            "owner/name:a:b",
            "owner/name\n",
            "ow--ner/name",
        ),
        *("owner/na..me", "folder/model.gguf", "folder/model.safetensors", "folder/config.json", "owner/.hidden"),
        *(
            "owner/" + "x" * 97,
            "owner/name@" + "x" * 121,
            "owner/name:" + "x" * 121,
            "ówner/name",
            "owner/name@\0",
            "o/n@" + "é" * 60,
        ),
    ],
)
def test_no_name_of_the_hub(text: str) -> None:
    assert HubName.parse(text) is None
    assert folder_of(text) in (None, text if text == "name" else None)


def test_different_models_have_different_folders() -> None:
    texts = [
        "o/n",
        "o/n@v",
        "o/n:V",
        "o/n@a/b",
        "o/n@a--b",
        "o/n@a%2Fb",
        "o/n:a+b.gguf",
        "o/n@v:Q8_0",
        "o--n",
        "o/n@v+Q8_0",
    ]
    folders = [folder_of(text) for text in texts]
    assert None not in folders
    assert len(set(folders)) == len(texts)


def test_only_one_spelling_is_a_name_in_the_store() -> None:
    for text in ("owner/name@main", "owner/name:q8_0"):
        assert folder_of(text) is None


# --- which files --------------------------------------------------------------------------------------------------


def names(text: str, *files: str) -> list[str]:
    """The names of the files that `text` means, where each file is of as many bytes as its name has letters."""
    name = HubName.parse(text)
    assert name is not None
    return [file.name for file in chosen_files(name, [HubFile(file, len(file), None, None) for file in files])]


GGUFS = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16.gguf", "README.md")


def test_safetensors_with_what_belongs_to_them_and_nothing_else() -> None:
    beside = ("config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE", "LICENCE.txt")
    refused = ("README.md", "model.bin", "model.pt", "modeling.py", "onnx/model.onnx", "original/config.json", RECORD)
    more = ("original/x.safetensors", "training_args.bin", ".gitattributes", "tokenizer.model.v3", "flax_model.msgpack")
    found = names("o/n", "model.safetensors", *refused, *beside, *more)
    assert found[0] == "model.safetensors"
    assert set(found) == {"model.safetensors", *beside}


def test_shards_come_without_the_same_weights_for_another_program() -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    found = names("o/n", *shards, "consolidated.safetensors", "model.safetensors.index.json", "config.json")
    assert set(found) == {*shards, "model.safetensors.index.json", "config.json"}


def test_safetensors_go_before_gguf_unless_one_is_chosen() -> None:
    both = ("model.safetensors", "config.json", *GGUFS)
    assert names("o/n", *both) == ["model.safetensors", "config.json"]
    assert names("o/n:Q8_0", *both) == ["m-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("choice", "file"),
    [("Q8_0", "m-Q8_0.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("bf16", "m-BF16.gguf"), ("m-Q8_0.gguf", "m-Q8_0.gguf")],
)
def test_one_gguf_is_chosen_by_quantisation_or_name(choice: str, file: str) -> None:
    assert names(f"o/n:{choice}", *GGUFS, "LICENSE", "config.json") == [file, "LICENSE"]


def test_a_gguf_in_a_folder_is_chosen_by_its_last_name_too() -> None:
    for choice in ("sub/m-Q2_K.gguf", "m-Q2_K.gguf", "Q2_K"):
        assert names(f"o/n:{choice}", *GGUFS, "sub/m-Q2_K.gguf") == ["sub/m-Q2_K.gguf"]


def test_the_only_gguf_needs_no_choice() -> None:
    others = ("mmproj-model-f16.gguf", "m.mmproj-Q8_0.gguf", "m-imatrix.gguf", "model.bin", "NOTICE")
    assert names("o/n", "m-Q8_0.gguf", *others) == ["m-Q8_0.gguf", "NOTICE"]


def refusal(text: str, *files: str) -> MlxcelError:
    with pytest.raises(MlxcelError) as caught:
        names(text, *files)
    assert caught.value.hint
    return caught.value


def test_several_ggufs_are_listed_with_their_sizes() -> None:
    error = refusal("o/n@v2", *GGUFS)
    assert isinstance(error, UsageError)
    assert "holds 3 GGUF files and none is chosen" in error.message
    assert "m-BF16.gguf (11 B), m-Q4_K_M.gguf (13 B), m-Q8_0.gguf (11 B)" in error.message
    assert "o/n@v2:BF16" in str(error.hint)


@pytest.mark.parametrize(
    ("text", "files", "words"),
    [
        ("o/n:Q5_0", GGUFS, "no GGUF file 'Q5_0'"),
        ("o/n:Q8_0", ("a-Q8_0.gguf", "b-Q8_0.gguf"), "'Q8_0' fits 2 GGUF files"),
        ("o/n:Q8_0", ("model.safetensors", "config.json"), "holds no GGUF file, so that nothing is called 'Q8_0'"),
    ],
)
def test_a_choice_that_fits_not_one_file(text: str, files: tuple[str, ...], words: str) -> None:
    error = refusal(text, *files)
    assert isinstance(error, UsageError)
    assert words in error.message


def test_of_many_files_thirty_are_shown() -> None:
    error = refusal("o/n", *(f"m{place:02}-Q8_0.gguf" for place in range(50)))
    assert "m29-Q8_0.gguf" in error.message
    assert "m30-Q8_0.gguf" not in error.message
    assert "and 20 more" in error.message


@pytest.mark.parametrize(
    "files", [("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"), ("m-00001-of-00001.gguf",)]
)
@pytest.mark.parametrize("text", ["o/n", "o/n:Q8_0"])
def test_a_split_gguf_is_refused_before_it_is_fetched(text: str, files: tuple[str, ...]) -> None:
    if text == "o/n:Q8_0":
        files = tuple(file.replace("m-0", "m-Q8_0-0") for file in files)
    error = refusal(text, *files)
    assert isinstance(error, CheckpointError)
    assert "is split into parts" in error.message
    assert "llama-gguf-split --merge" in str(error.hint)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl", "W.BIN"])
def test_pickles_alone_are_refused_with_the_way_to_convert(file: str) -> None:
    error = refusal("o/n", file, "config.json", "tokenizer.json")
    assert isinstance(error, CheckpointError)
    assert file in error.message
    assert "convert" in str(error.hint)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "no safetensors and no GGUF"),
        (("README.md", "config.json"), "no safetensors and no GGUF"),
        (("adapter_model.safetensors", "adapter_config.json"), "no config.json"),
        (("../model.safetensors", "/etc/m.gguf", "config.json"), "no safetensors and no GGUF"),
    ],
)
def test_a_repository_without_a_model(files: tuple[str, ...], words: str) -> None:
    error = refusal("o/n", *files)
    assert isinstance(error, CheckpointError)
    assert words in error.message
