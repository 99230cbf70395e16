"""`mlxcel download NAME --export-tokenizer DIR`: the tokenizer and chat template as Hugging Face's own library reads
them (docs/spec/clients.md 1.8)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import tokenizers
from tiny_checkpoint import CHATML, write_json, write_tiny_gguf, write_tiny_llama

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import CheckpointError, UsageError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import gguf_sentencepiece, gguf_tokenizer, hf_json
from mlxcel.plugins.tokenizers.charsmap import CharsMap
from mlxcel.plugins.tokenizers.sentencepiece import SentencePieceTokenizer
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.token_kinds import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.tokenizer_export import PROBES, export_tokenizer

TEXTS = (*PROBES, "", " ", "the thing", "<|im_start|>user\nhi<|im_end|>", "a<|eos|> b", "é", "\0")


@attrs.frozen
class Assets:
    """As much of a checkpoint as a tokenizer comes from."""

    assets: Mapping[str, Any] = attrs.field(factory=dict)
    path: Path = Path("model")


def exported(checkpoint: Any, tokenizer: Tokenizer, folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """What was written, as its readers see it."""
    written = export_tokenizer(checkpoint, tokenizer, folder)
    assert [path.name for path in written.files] == ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert written.differing == ()
    return tokenizers.Tokenizer.from_file(str(written.files[0])), json.loads(written.files[1].read_text())


def assert_same(library: tokenizers.Tokenizer, tokenizer: Tokenizer, texts: tuple[str, ...] = TEXTS) -> None:
    for text in texts:
        ids = tokenizer.encode(text, add_special=True)
        assert library.encode(text).ids == ids, repr(text)
        assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, add_special=False)
        assert library.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special=True)


# --- byte-level BPE, from both formats ----------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("source", ["folder", "gguf"])
def test_the_exported_tokenizer_is_the_models_own(tmp_path: Path, source: str, add_bos: bool) -> None:
    checkpoint: SafetensorsCheckpoint | GgufCheckpoint
    tokenizer: Tokenizer
    if source == "folder":
        checkpoint = SafetensorsCheckpoint(write_tiny_llama(tmp_path / "model", add_bos=add_bos))
        tokenizer = hf_json.load(checkpoint)
    else:
        checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "model" / "m.gguf", add_bos=add_bos))
        tokenizer = gguf_tokenizer.load(checkpoint)
    library, settings = exported(checkpoint, tokenizer, tmp_path / "new" / "out")
    assert_same(library, tokenizer)
    assert (library.encode("a").ids[:1] == [0]) == add_bos
    assert settings["chat_template"] == CHATML
    assert (settings["bos_token"], settings["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (True, False), (False, False)])
def test_settings_over_the_files_own_template_are_in_the_export(tmp_path: Path, bos: bool, eos: bool) -> None:
    """tokenizer.json itself adds a BOS; tokenizer_config.json decides."""
    folder = write_tiny_llama(tmp_path / "model", add_bos=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    more = {
        "add_bos_token": bos,
        "add_eos_token": eos,
        "auto_map": {"AutoTokenizer": "code.py"},
        "model_max_length": 77,
    }
    write_json(folder / "tokenizer_config.json", settings | more)
    checkpoint = SafetensorsCheckpoint(folder)
    library, written = exported(checkpoint, hf_json.load(checkpoint), tmp_path / "out")
    assert library.encode("").ids == [0] * bos + [1] * eos
    if (bos, eos) != (True, False):  # else the file's own post-processor is right, and stays as it is
        assert library.encode("", "").ids == ([0] * bos + [1] * eos) * 2
    assert written["model_max_length"] == 77
    assert "auto_map" not in written, "a tokenizer runs no code of a checkpoint"


def test_a_template_of_its_own_file_goes_into_the_settings(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checkpoint = SafetensorsCheckpoint(folder)
    _, settings = exported(checkpoint, hf_json.load(checkpoint), tmp_path / "out")
    assert settings["chat_template"] == "{{ messages }}"


def test_a_model_without_a_template_exports_none(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf"))
    metadata = {key: value for key, value in checkpoint.assets["gguf"].items() if key != "tokenizer.chat_template"}
    _, settings = exported(Assets({"gguf": metadata}), gguf_tokenizer.load(checkpoint), tmp_path / "out")
    assert "chat_template" not in settings


def test_the_default_models_export_reads_as_the_model_does(tmp_path: Path, smollm2_path: Path) -> None:
    checkpoint = GgufCheckpoint(smollm2_path)
    tokenizer = gguf_tokenizer.load(checkpoint)
    library, settings = exported(checkpoint, tokenizer, tmp_path / "out")
    assert_same(library, tokenizer)
    assert settings["chat_template"] == checkpoint.assets["gguf"]["tokenizer.chat_template"]


# --- SentencePiece ------------------------------------------------------------------------------------------------

WORDS = ("▁", *"abcdehlnorst.,!", "▁a", "he", "▁the", "▁he", "ll", "lo", "▁hello", "er", "or", "ed", "st", "▁▁", "▁▁▁")


def sentencepiece(**changes: Any) -> SentencePieceModel:
    """A model of some English, with bytes for what it lacks and scores as training gives them: by rank."""
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
    scores = [*[0.0] * 260, *(-float(rank) for rank in range(len(WORDS), 0, -1))]
    fields = {"unigram": False, "space_prefix": True, "remove_extra_spaces": False, "charsmap": None}
    return SentencePieceModel("m.gguf", tokens, scores, kinds, **(fields | changes))


def english(*more: str, count: int = 400) -> tuple[str, ...]:
    draw = random.Random(5)
    letters = [*"abcdehlnorst.,! ", "the ", "hello ", "  ", "é", "</s>", *more]
    return tuple("".join(draw.choices(letters, k=draw.randrange(24))) for _ in range(count))


@pytest.mark.parametrize("unigram", [False, True])
@pytest.mark.parametrize("space_prefix", [False, True])
@pytest.mark.parametrize(("prefix", "suffix"), [((1,), ()), ((), (2,)), ((), ())])
def test_a_sentencepiece_model_reads_the_same(
    tmp_path: Path, unigram: bool, space_prefix: bool, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> None:
    tokenizer = SentencePieceTokenizer(
        sentencepiece(unigram=unigram, space_prefix=space_prefix),
        special_ids={"bos": 1, "eos": 2, "unk": 0},
        eos_ids=frozenset({2}),
        prefix=prefix,
        suffix=suffix,
    )
    library, settings = exported(Assets(), tokenizer, tmp_path / "out")
    for text in english() if space_prefix else english("<tool>"):  # behind <tool> a prefix differs, as documented
        assert library.encode(text).ids == tokenizer.encode(text, add_special=True), repr(text)
    ids = tokenizer.encode("hello the é", add_special=True)
    assert library.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special=True) == "hello the é"
    assert (settings["bos_token"], settings["eos_token"], settings["unk_token"]) == ("<s>", "</s>", "<unk>")


@pytest.mark.parametrize(
    "changes", [{"remove_extra_spaces": True}, {"charsmap": CharsMap(bytes([4, 0, 0, 0, *[0] * 8]))}]
)
def test_a_model_that_changes_characters_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokenizer = SentencePieceTokenizer(
        sentencepiece(**changes), special_ids={}, eos_ids=frozenset(), prefix=[], suffix=[]
    )
    with pytest.raises(CheckpointError, match=r"m\.gguf: .* no exact tokenizer\.json") as caught:
        export_tokenizer(Assets(), tokenizer, tmp_path / "out")  # type: ignore[arg-type]
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_gguf_metadata_of_sentencepiece_end_to_end(tmp_path: Path) -> None:
    model = sentencepiece()
    key = "tokenizer.ggml."
    metadata = {
        f"{key}model": "llama",
        f"{key}tokens": list(model.tokens),
        f"{key}scores": list(model.scores),
        f"{key}token_type": list(model.kinds),
        f"{key}bos_token_id": 1,
        f"{key}eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}",
    }
    tokenizer = gguf_sentencepiece.from_metadata(metadata, Path("m.gguf"))
    library, settings = exported(Assets({"gguf": metadata}), tokenizer, tmp_path / "out")
    assert library.encode("hello").ids == tokenizer.encode("hello", add_special=True)
    assert (settings["chat_template"], settings["bos_token"]) == ("{{ bos_token }}", "<s>")


# --- what cannot be written ---------------------------------------------------------------------------------------


def test_nothing_is_written_over(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "model" / "m.gguf"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years")
    for folder, words in ((tmp_path / "full", "not empty"), (tmp_path / "model" / "m.gguf", "cannot be written to")):
        with pytest.raises(UsageError, match=words) as caught:
            export_tokenizer(checkpoint, gguf_tokenizer.load(checkpoint), folder)
        assert caught.value.hint
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    exported(checkpoint, gguf_tokenizer.load(checkpoint), tmp_path / "empty")


def test_a_tokenizer_without_such_a_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ByteTokenizer"):
        export_tokenizer(Assets(), ByteTokenizer(), tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_probes_that_read_otherwise_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf"))
    tokenizer = gguf_tokenizer.load(checkpoint)
    encode = tokenizer.encode

    def otherwise(text: str, *, add_special: bool) -> list[int]:
        ids: list[int] = encode(text, add_special=add_special)
        return ids[::-1] if text == PROBES[1] else ids

    monkeypatch.setattr(tokenizer, "encode", otherwise)
    assert export_tokenizer(checkpoint, tokenizer, tmp_path / "out").differing == (PROBES[1],)
