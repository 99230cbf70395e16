"""SentencePiece tokenizers, from tokenizer.model and from GGUF metadata (engine specification 6.4)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_files import (
    BYTES,
    CONTROL,
    FOLDER,
    NORMAL,
    SPECIAL,
    UNUSED,
    USER_DEFINED,
    Piece,
    gguf_metadata,
    model_bytes,
    vectors,
)
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import gguf_sentencepiece, gguf_tokenizer, hf_model
from mlxcel.plugins.tokenizers.sentencepiece import SentencePieceTokenizer
from mlxcel.plugins.tokenizers.sentencepiece_file import read_model_file
from mlxcel.text.detokeniser import Detokeniser

MODELS = ("bpe", "bpe_gemma", "unigram", "unigram_bytes")
WORDS: tuple[Piece, ...] = tuple(
    (word, -float(rank), NORMAL)
    for rank, word in enumerate(("he", "ll", "llo", "hello", "▁hello", "▁x", "▁h", "▁", "x", "h", "e", "l", "o", "é"))
)
PIECES = (*SPECIAL, *BYTES, *WORDS, ("[tool]", 0.0, USER_DEFINED), ("<|im_end|>", 0.0, CONTROL), ("[pad]", 0.0, UNUSED))
SIZE = len(PIECES)
IDS = {spelling: index for index, (spelling, _, _) in enumerate(PIECES)}


@cache
def of_file(name: str) -> SentencePieceTokenizer:
    model, roles = read_model_file(FOLDER / f"{name}.model")
    return SentencePieceTokenizer(model, special_ids=roles, eos_ids=frozenset(), prefix=[], suffix=[])


@cache
def of_gguf(name: str) -> SentencePieceTokenizer:
    """The model of a file as a converter writes it: user-defined tokens have true spaces."""
    model, _ = read_model_file(FOLDER / f"{name}.model")
    pieces = [
        (token.replace("▁", " ") if kind == USER_DEFINED else token, score, kind)
        for token, score, kind in zip(model.tokens, model.scores, model.kinds, strict=True)
    ]
    changes: dict[str, Any] = {"add_space_prefix": model.space_prefix, "pre": "default"}
    if model.remove_extra_spaces:
        blob = charsmap_of(FOLDER / f"{name}.model")
        signed = [byte - 256 if byte > 127 else byte for byte in blob]
        changes |= {"remove_extra_whitespaces": True, "precompiled_charsmap": signed}
    return from_gguf(pieces, model="t5" if model.unigram else "llama", **changes)


def charsmap_of(path: Path) -> bytes:
    """The blob that begins with the length of its trie, found by the names of the fields around it."""
    data = path.read_bytes()
    at = data.index(b"user_defined") + len(b"user_defined")
    assert data[at] == 0x12
    length = data[at + 1] & 0x7F | data[at + 2] << 7
    return data[at + 3 : at + 3 + length]


def from_gguf(pieces: Sequence[Piece] = PIECES, **changes: Any) -> SentencePieceTokenizer:
    return gguf_sentencepiece.from_metadata(gguf_metadata(pieces, **changes), Path("model.gguf"))


def folder(path: Path, pieces: Sequence[Piece] = PIECES, config: Mapping[str, Any] | None = None) -> Path:
    """A folder that has tokenizer.model and no tokenizer.json."""
    write_tiny_llama(path)
    (path / "tokenizer.json").unlink()
    (path / "generation_config.json").unlink()
    (path / "tokenizer.model").write_bytes(model_bytes(pieces))
    (path / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return path


def of_folder(path: Path, pieces: Sequence[Piece] = PIECES, **config: Any) -> SentencePieceTokenizer:
    return hf_model.load(SafetensorsCheckpoint(folder(path, pieces, config)))


def spelled(tokenizer: Tokenizer, text: str, **options: bool) -> list[str]:
    ids = tokenizer.encode(text, **{"add_special": False, **options})
    return [tokenizer.token_text(index) for index in ids]


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
    detokeniser = Detokeniser(tokenizer, skip_special=skip_special)
    return [*(detokeniser.push(index) for index in ids), detokeniser.flush()]


# --- against sentencepiece itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("source", [of_file, of_gguf])
def test_t23_ids_are_those_of_sentencepiece_from_either_source(name: str, source: Any) -> None:
    """T21, T23."""
    tokenizer = source(name)
    assert len(vectors()[name]) > 100
    for text, ids, _ in vectors()[name]:
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("source", [of_file, of_gguf])
def test_t2_texts_are_those_of_sentencepiece(name: str, source: Any) -> None:
    """T2; sentencepiece writes " ⁇ " for the unknown token, which is special here."""
    tokenizer = source(name)
    compared = 0
    for text, ids, decoded in vectors()[name]:
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids, skip_special=True), text
        if 0 not in ids:
            assert tokenizer.decode(ids, skip_special=True) == decoded, text
            compared += 1
    assert compared > 40


@pytest.mark.parametrize("name", MODELS)
def test_t2_any_ids_stream_as_they_decode(name: str) -> None:
    """T2, T3, T6: ids of the whole vocabulary in any order, and beyond it."""
    tokenizer = of_file(name)
    assert tokenizer.byte_exact

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.size + 3), max_size=12), st.booleans())
    def law(ids: list[int], skip: bool) -> None:
        assert "".join(streamed(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)

    law()


def test_t23_text_comes_back() -> None:
    """T23: with bytes for what is no piece, any text without ▁ is kept, from both sources alike."""
    left, right = of_file("bpe"), of_gguf("bpe")

    @settings(max_examples=150, deadline=None)
    @given(st.text(max_size=40).filter(lambda text: "▁" not in text))
    def check(text: str) -> None:
        ids = left.encode(text, add_special=False, parse_special=False)
        assert ids == right.encode(text, add_special=False, parse_special=False)
        assert left.decode(ids, skip_special=True) == text

    check()


@pytest.mark.parametrize("name", MODELS)
def test_h_l9_every_id_of_a_sentencepiece_vocabulary_decodes(name: str) -> None:
    """T6."""
    tokenizer = of_file(name)
    for index in (*range(tokenizer.size), tokenizer.size, 2**31, 2**63, -1):
        text = tokenizer.decode([index], skip_special=False)
        assert "".join(streamed(tokenizer, [index], skip_special=False)) == text
        assert isinstance(tokenizer.token_text(index), str)
        if not 0 <= index < tokenizer.size:
            assert (text, tokenizer.token_bytes(index), tokenizer.is_special(index)) == ("", b"", False)


# --- spaces and bytes ------------------------------------------------------------------------------------------------


def test_h_a3_one_space_in_front_is_the_prefix_and_the_others_are_text() -> None:
    """T2: ids of "▁" and "▁x"."""
    tokenizer = from_gguf()
    space, word, end = IDS["▁"], IDS["▁x"], IDS["<|im_end|>"]
    for ids, text in (
        ([word, word], "x x"),
        ([space, word], " x"),
        ([space, space, word], "  x"),
        ([IDS["x"], word], "x x"),
        ([end, word], "x"),
        ([IDS["[pad]"], SIZE, word, word], "x x"),  # ids without text begin no text
        ([space], ""),
        ([IDS["<0x20>"], word], " x"),
    ):
        assert tokenizer.decode(ids, skip_special=True) == text
        assert "".join(streamed(tokenizer, ids)) == text
    assert tokenizer.decode([end, word], skip_special=False) == "<|im_end|> x"
    plain = from_gguf(add_space_prefix=False)
    assert plain.decode([word, word], skip_special=True) == " x x"
    assert tokenizer.token_bytes(word) == b" x"
    assert tokenizer.token_bytes(word, first=True) == b"x"


def test_h_a1_an_emoji_appears_with_its_last_byte() -> None:
    """T3: in the middle of a run of bytes, and cut off by a limit."""
    tokenizer = from_gguf()
    ids = tokenizer.encode("😀€x", add_special=False)
    assert [tokenizer.token_text(index) for index in ids[1:5]] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert streamed(tokenizer, ids) == ["", "", "", "", "😀", "", "", "€", "x", ""]
    assert streamed(tokenizer, ids[:4]) == ["", "", "", "", "\ufffd"]
    assert tokenizer.decode(ids[:4], skip_special=True) == "\ufffd"


def test_the_space_prefix_is_a_setting() -> None:
    assert spelled(from_gguf(), "hello x") == ["▁hello", "▁x"]
    assert spelled(from_gguf(add_space_prefix=False), "hello x") == ["hello", "▁x"]
    assert spelled(from_gguf(), "  x ") == ["▁", "▁", "▁x", "▁"]
    assert spelled(from_gguf(remove_extra_whitespaces=True), "  x   x ") == ["▁x", "▁x"]
    assert spelled(from_gguf(remove_extra_whitespaces=True), "   ") == []
    marked = from_gguf((*PIECES, ("[sp] ", 0.0, USER_DEFINED)), remove_extra_whitespaces=True)
    assert spelled(marked, "  x [tool]  x[sp]  x ") == ["▁x", "▁", "[tool]", "▁x", "[sp] ", "x"]


def test_a_character_that_is_no_piece_is_bytes_or_the_unknown_token() -> None:
    without = (*SPECIAL, *WORDS)
    assert spelled(from_gguf(), "xü") == ["▁x", "<0xC3>", "<0xBC>"]
    assert spelled(from_gguf(without), "üüx") == ["▁", "<unk>", "x"]
    lacking = (*SPECIAL, *BYTES[:0xBC], *BYTES[0xBD:], *WORDS)
    assert spelled(from_gguf(lacking), "xüþ") == ["▁x", "<unk>", "<0xC3>", "<0xBE>"]
    assert spelled(from_gguf(WORDS), "xü") == ["▁x"]  # nothing can stand for it


def test_a_lone_surrogate_is_no_crash() -> None:
    assert from_gguf().encode("x\ud800", add_special=False) == from_gguf().encode("x\ufffd", add_special=False)


# --- special tokens --------------------------------------------------------------------------------------------------


def test_t24_control_tokens_come_from_spellings_only_when_asked() -> None:
    """T24; user-defined tokens come from them always."""
    tokenizer = from_gguf()
    text = "x<|im_end|>x[tool]x"
    assert spelled(tokenizer, text) == ["▁x", "<|im_end|>", "▁x", "[tool]", "x"]
    literal = tokenizer.encode(text, add_special=False, parse_special=False)
    assert IDS["<|im_end|>"] not in literal
    assert IDS["[tool]"] in literal
    assert tokenizer.decode(literal, skip_special=True) == text
    assert [tokenizer.is_special(IDS[spelling]) for spelling in ("<unk>", "<s>", "<|im_end|>", "[tool]", "x")] == [
        *(True, True, True),
        *(False, False),
    ]
    assert tokenizer.decode([IDS["[pad]"], IDS["x"]], skip_special=False) == "x"  # a row that pads the vocabulary


def test_the_longest_spelling_is_found_first() -> None:
    more = (*PIECES, ("<|im_end|>x", 0.0, CONTROL), ("[tool]x", 0.0, USER_DEFINED), ("[", 0.0, USER_DEFINED))
    assert spelled(from_gguf(more), "<|im_end|>x[tool]x[too") == [
        "<|im_end|>x",
        "▁",
        "[tool]x",
        "[",
        "<0x74>",
        "o",
        "o",
    ]


def test_h_d1_a_text_gets_one_bos() -> None:
    """T14."""
    tokenizer = from_gguf()
    bare = tokenizer.encode("hello", add_special=False)
    assert tokenizer.adds_bos
    assert tokenizer.encode("hello", add_special=True) == [1, *bare]
    assert tokenizer.encode("<s>hello", add_special=True) == [1, *bare]
    assert tokenizer.encode("", add_special=True) == [1]
    off = from_gguf(add_bos_token=False, add_eos_token=True)
    assert (off.adds_bos, off.encode("hello", add_special=True)) == (False, [*bare, 2])


def test_t22_roles_of_gguf_and_what_holds_without_them() -> None:
    """T22."""
    tokenizer = from_gguf()
    assert tokenizer.special_ids == {"bos": 1, "eos": 2, "unk": 0, "eot": IDS["<|im_end|>"]}
    assert tokenizer.eos_ids == {2, IDS["<|im_end|>"]}
    said = from_gguf(bos_token_id=2, eos_token_id=1, unknown_token_id=0, padding_token_id=5, eot_token_id=1)
    assert said.special_ids == {"bos": 2, "eos": 1, "unk": 0, "pad": 5, "eot": 1}
    plain = from_gguf((*BYTES, *WORDS))  # no control token: ids 0 to 2 are bytes, not roles
    assert (plain.special_ids, plain.adds_bos, plain.eos_ids) == ({}, False, frozenset())
    t5 = from_gguf((("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), SPECIAL[0], *WORDS), model="t5")
    assert t5.special_ids == {"pad": 0, "eos": 1, "unk": 2}
    assert t5.encode("x", add_special=True)[-1] == 1
    assert spelled(t5, "x") == ["x"]  # no space prefix unless the file says so


def test_phi_3_tokens_take_the_white_space_behind_them() -> None:
    """As the "rstrip" of its tokenizer.json has it, which GGUF cannot say."""
    user, end = ("<|user|>", 0.0, USER_DEFINED), ("<|end|>", 0.0, CONTROL)
    metadata = gguf_metadata((*PIECES, user, end))
    phi = gguf_sentencepiece.from_metadata({**metadata, "general.architecture": "phi3"}, Path("model.gguf"))
    text = "<|user|> \n x<|end|>\n x<s> x"
    assert spelled(phi, text) == ["<|user|>", "▁x", "<|end|>", "▁x", "<s>", "▁", "▁x"]
    assert spelled(phi, text, parse_special=False)[:2] == ["<|user|>", "▁x"]
    other = gguf_sentencepiece.from_metadata(metadata, Path("model.gguf"))
    assert spelled(other, text)[:6] == ["▁", "<|user|>", "▁", "<0x0A>", "▁x", "<|end|>"]


def test_a_gguf_file_on_disk(tmp_path: Path) -> None:
    """T21: through the reader and the choice by model name."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([spelling for spelling, _, _ in PIECES])
    writer.add_token_scores([score for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    writer.add_add_space_prefix(False)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = gguf_tokenizer.load(GgufCheckpoint(path))
    assert spelled(tokenizer, "hello x") == ["hello", "▁x"]


# --- tokenizer.model in a folder -------------------------------------------------------------------------------------


def test_a_folder_without_settings(tmp_path: Path) -> None:
    tokenizer = of_folder(tmp_path)
    assert spelled(tokenizer, "hello<|im_end|>x", add_special=True) == ["<s>", "▁hello", "<|im_end|>", "▁x"]
    assert tokenizer.special_ids == {"bos": 1, "eos": 2, "unk": 0, "eot": IDS["<|im_end|>"]}
    assert tokenizer.size == SIZE


def test_the_settings_of_a_folder_are_obeyed(tmp_path: Path) -> None:
    """T21, T22."""
    turned = of_folder(tmp_path, add_bos_token=False, add_eos_token=True, legacy=False, add_prefix_space=True)
    assert spelled(turned, "hello<|im_end|>x", add_special=True) == ["▁hello", "<|im_end|>", "x", "</s>"]
    bare = of_folder(tmp_path, add_prefix_space=False)
    assert spelled(bare, "hello x") == ["hello", "▁x"]
    roles = of_folder(tmp_path, eos_token={"content": "x"}, pad_token="<s>", bos_token="not there")
    assert roles.special_ids == {"bos": 1, "eos": IDS["x"], "unk": 0, "pad": 1, "eot": IDS["<|im_end|>"]}
    assert roles.is_special(IDS["x"])


def test_added_tokens_of_a_folder(tmp_path: Path) -> None:
    """They come behind the model's own, or turn one of these into a special token."""
    size = SIZE
    added = {
        str(size): {"content": "<|user|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<think>", "special": False},
        str(IDS["[tool]"]): {"content": "[tool]", "special": True},
        "0": {"content": "<unk>", "special": True},
        "3": {"content": "other", "special": True},
    }
    tokenizer = of_folder(tmp_path, added_tokens_decoder=added)
    assert tokenizer.size == size + 2
    assert spelled(tokenizer, "<|user|>\n x<think>x[tool]") == ["<|user|>", "▁x", "<think>", "x", "[tool]"]
    assert [tokenizer.is_special(index) for index in (size, size + 1, IDS["[tool]"], 3)] == [True, False, True, False]
    assert tokenizer.decode([size, IDS["▁x"], size + 1], skip_special=True) == "x<think>"


def test_t21_tokenizer_json_comes_before_tokenizer_model(tmp_path: Path) -> None:
    """T21: both are assets, and the registered priorities choose."""
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model_bytes(PIECES))
    assets = SafetensorsCheckpoint(tmp_path).assets
    assert {"tokenizer.json", "tokenizer.model"} <= set(assets)
