"""SentencePiece models that are damaged or not known are refused with what is wrong, and never crash anything."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_files import (
    BYTES,
    FOLDER,
    NORMAL,
    SPECIAL,
    UNIGRAM,
    Piece,
    gguf_metadata,
    message,
    model_bytes,
    number,
    piece_message,
    varint,
)
from tiny_checkpoint import write_tiny_llama

from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import gguf_sentencepiece, gguf_tokenizer, hf_model
from mlxcel.plugins.tokenizers.protobuf import fields
from mlxcel.plugins.tokenizers.sentencepiece_file import read_model_file

PIECES: tuple[Piece, ...] = (*SPECIAL, ("▁", -1.0, NORMAL), ("x", -2.0, NORMAL))
COUNT = len(PIECES)
INFINITE = float("inf")


@attrs.frozen
class Metadata:
    """As much of a GGUF checkpoint as a tokenizer reads."""

    assets: Mapping[str, Any]
    path: Path = Path("model.gguf")


# --- GGUF metadata ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens must be a list of strings"),
        ({"tokens": ["a", 1]}, "tokens must be a list of strings"),
        ({"scores": None}, "5 tokens need as many scores in tokenizer.ggml.scores, found none"),
        ({"scores": [0.0]}, "found 1"),
        ({"scores": "12345"}, "found none"),
        ({"scores": [0.0, 0.0, 0.0, float("nan"), 0.0]}, "the score of token 3 is nan, a finite number is expected"),
        ({"scores": [0.0, 0.0, 0.0, 0.0, -INFINITE]}, "the score of token 4 is -inf"),
        ({"scores": [0.0, "high", 0.0, 0.0, 0.0]}, "the score of token 1 is 'high'"),
        ({"scores": [0.0, True, 0.0, 0.0, 0.0]}, "the score of token 1 is True"),
        ({"scores": [0.0, [], 0.0, 0.0, 0.0]}, "the score of token 1 is list"),
        ({"token_type": None}, "5 tokens need as many token types in tokenizer.ggml.token_type, found none"),
        ({"token_type": [1, 1, 1, 1, 7]}, "the type of token 4 is 7, known are 1 to 6"),
        ({"token_type": [0, 1, 1, 1, 1]}, "the type of token 0 is 0"),
        ({"token_type": [1, 1, True, 1, 1]}, "the type of token 2 is True"),
        ({"token_type": [1, 1, 1, 1.0, 1]}, "the type of token 3 is 1.0"),
        ({"token_type": [1, 1, 1, 1, 6]}, "token 4 is a byte and is spelled 'x', not as '<0x0A>'"),
        ({"tokens": ["a", "b", "c", "x", "x"], "token_type": [1] * 5}, "token 'x' occurs twice, as 3 and 4"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1, true or false is expected"),
        ({"remove_extra_whitespaces": "no"}, "remove_extra_whitespaces is 'no'"),
        ({"add_bos_token": []}, "add_bos_token is list"),
        ({"precompiled_charsmap": "abc"}, "precompiled_charsmap is no array of at most"),
        ({"precompiled_charsmap": [1, 2.0]}, "precompiled_charsmap is no array"),
        ({"precompiled_charsmap": [256]}, "holds numbers from 256 to 256, which are no bytes"),
        ({"precompiled_charsmap": [-129, 0]}, "holds numbers from -129 to 0"),
        ({"precompiled_charsmap": [1, 2, 3]}, "precompiled_charsmap cannot be read: 3 bytes hold no table"),
        ({"precompiled_charsmap": [255] * 12}, "a trie of 4294967295 bytes does not fit in 12 bytes"),
    ],
)
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_t21_damaged_metadata_are_named(model: str, changes: dict[str, Any], words: str) -> None:
    """T21."""
    with pytest.raises(CheckpointError) as caught:
        gguf_sentencepiece.from_metadata(gguf_metadata(PIECES, model=model, **changes), Path("model.gguf"))
    assert words in caught.value.message
    assert caught.value.message.startswith("model.gguf")


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_vocabularies_at_the_edge_of_sense_still_work(model: str) -> None:
    """Rows without a spelling, one token, no normal token at all: nothing to refuse, and nothing that raises."""
    for pieces in ([("", 0.0, kind)] * 2 for kind in range(1, 6)):
        tokenizer = gguf_sentencepiece.from_metadata(gguf_metadata(pieces, model=model), Path("model.gguf"))
        assert isinstance(tokenizer.encode("a b", add_special=True), list)
        assert tokenizer.decode([0, 1, 2], skip_special=False) == ""


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=8,
)
KEYS = (
    *("model", "pre", "tokens", "scores", "token_type", "merges", "precompiled_charsmap", "add_space_prefix"),
    *("add_bos_token", "add_eos_token", "remove_extra_whitespaces", "bos_token_id", "eos_token_id", "unknown_token_id"),
)


@pytest.mark.parametrize("model", ["llama", "t5", "gpt2"])
def test_any_metadata_are_an_error_or_a_tokenizer_that_works(model: str) -> None:
    """T6, T21: one or two keys hold anything, or one element of a list does."""

    @settings(max_examples=150, deadline=None)
    @given(
        st.dictionaries(
            st.sampled_from(KEYS), st.tuples(st.booleans(), st.integers(0, 4), ANYTHING), min_size=1, max_size=2
        )
    )
    def check(changes: dict[str, tuple[bool, int, Any]]) -> None:
        metadata = {**gguf_metadata((*PIECES, ("▁x", -3.0, NORMAL)), model=model), "tokenizer.ggml.merges": ["▁ x"]}
        for key, (whole, at, value) in changes.items():
            before = metadata.get(f"tokenizer.ggml.{key}")
            if isinstance(before, list) and not whole:
                value = [*before[:at], value, *before[at + 1 :]]
            metadata[f"tokenizer.ggml.{key}"] = value
        try:
            tokenizer = gguf_tokenizer.load(Metadata({"gguf": metadata}))  # type: ignore[arg-type]  # all that is read
        except CheckpointError:
            return
        ids = tokenizer.encode("a b<s>", add_special=True)
        assert isinstance(tokenizer.decode([*ids, *range(8)], skip_special=False), str)

    check()


# --- tokenizer.model --------------------------------------------------------------------------------------------------


def pieces_of(path: Path) -> dict[str, int]:
    model, _ = read_model_file(path)
    return model.pieces()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds no piece"),
        (b"IQ== 0\nIg== 1\n", "is no SentencePiece model"),  # the table of tiktoken, which has the same name
        (
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "field 1 at byte 0 claims 18446744073709551615 bytes, 0 are left",
        ),
        (b"\x0a\x05abc", "field 1 at byte 0 claims 5 bytes, 3 are left"),
        (b"\x0a" + b"\xff" * 11, "the number at byte 1 has more than 10 bytes"),
        (b"\x0a\x80", "the number at byte 1 is cut off"),
        (b"\x0b", "wire type 3 at byte 0"),
        (b"\x02\x00", "field number 0 at byte 0"),
        (number(1, 5), "a number (5) where bytes are expected"),
        (message(1, number(1, 5)), "a number (5) where bytes are expected"),
        (message(1, message(1, b"\xff")), "can't decode byte 0xff"),
        (message(1, message(2, b"\0" * 3)), "3 bytes where a float of 4 is expected"),
        (message(1, message(3, b"")), "0 bytes where a number is expected"),
        (message(1, message(1, b"x") + number(3, 9)), "the type of token 0 is 9, known are 1 to 6"),
        (piece_message(("x", float("nan"), 1)), "the score of token 0 is nan"),
        (piece_message(("x", 0.0, 6)), "token 0 is a byte and is spelled 'x'"),
        (piece_message(("x", 0.0, 1)) * 2, "token 'x' occurs twice, as 0 and 1"),
        (model_bytes(PIECES, model_type=3), "models of the type word are not read, only unigram and bpe"),
        (model_bytes(PIECES, model_type=4), "models of the type char"),
        (model_bytes(PIECES, model_type=-1), "models of the type -1"),
        (model_bytes(PIECES, trainer={24: 1}), "treat_whitespace_as_suffix"),
        (model_bytes(PIECES, normaliser={5: 0}), "escape_whitespaces"),
        (model_bytes(PIECES, charsmap=b"\x01\x02"), "2 bytes hold no table"),
        (model_bytes(PIECES) + message(5, message(2, b"table")), "a table of characters for decoding"),
    ],
)
def test_t21_a_damaged_model_file_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    """T21."""
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        pieces_of(tmp_path / "tokenizer.model")
    assert words in caught.value.message
    assert caught.value.message.startswith(str(tmp_path / "tokenizer.model"))


def test_a_model_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_model_file(tmp_path / "tokenizer.model")
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.truncate(1 << 28)
    with pytest.raises(CheckpointError, match="has 268435456 bytes, at most 134217728 are taken"):
        read_model_file(tmp_path / "tokenizer.model")


def test_defaults_of_the_message_definition(tmp_path: Path) -> None:
    """Fields that a file leaves out, and fields that nobody knows."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(
        b"".join(map(piece_message, PIECES)) + message(99, b"new") + number(98, 1) + varint(97 << 3 | 1) + b"8" * 8
    )
    model, roles = read_model_file(path)
    assert (model.unigram, model.space_prefix, model.remove_extra_spaces, model.charsmap) == (True, True, True, None)
    assert roles == {"unk": 0, "bos": 1, "eos": 2}
    path.write_bytes(model_bytes(PIECES, model_type=UNIGRAM, trainer={40: 3, 41: -1, 43: 1 << 40}, normaliser={3: 0}))
    model, roles = read_model_file(path)
    assert (roles, model.space_prefix, model.remove_extra_spaces) == ({"unk": 3, "eos": 2}, False, False)


def test_fields_are_read_as_written() -> None:
    data = number(1, 300) + message(2, b"ab") + varint(3 << 3 | 5) + struct.pack("<f", 0.5) + number(4, -1)
    assert list(fields(data)) == [(1, 300), (2, b"ab"), (3, struct.pack("<f", 0.5)), (4, (1 << 64) - 1)]


@pytest.mark.parametrize("name", ["bpe", "unigram"])
def test_any_damage_to_a_model_file_is_an_error_or_nothing(tmp_path: Path, name: str) -> None:
    """T6, T21: bytes changed, cut off, inserted. What still loads encodes and decodes."""
    whole = (FOLDER / f"{name}.model").read_bytes()
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").unlink()
    path = folder / "tokenizer.model"
    path.write_bytes(whole)
    checkpoint = SafetensorsCheckpoint(folder)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, len(whole) - 1), st.binary(max_size=3), st.integers(0, 3)), min_size=1, max_size=4
        )
    )
    def check(changes: list[tuple[int, bytes, int]]) -> None:
        data = bytearray(whole)
        for at, new, removed in changes:
            data[at : at + removed] = new
        path.write_bytes(data)
        try:
            tokenizer = hf_model.load(checkpoint)
        except CheckpointError:
            return
        ids = tokenizer.encode("The river é 日本 <s>", add_special=True)
        assert isinstance(tokenizer.decode([*ids, *range(0, tokenizer.size, 7)], skip_special=False), str)

    check()


# --- the settings beside it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ([], "added_tokens_decoder is list, an object is expected"),
        ({"x": {"content": "a"}}, "added_tokens_decoder['x'] is no token"),
        ({"-1": {"content": "a"}}, "added_tokens_decoder['-1'] is no token"),
        ({"9" * 5000: {"content": "a"}}, "is no token"),
        ({"5": {"content": None}}, "added_tokens_decoder['5'] is no token"),
        ({"5": "a"}, "added_tokens_decoder['5'] is no token"),
        (
            {"4000000": {"content": "a"}},
            "added token 'a' has the id 4000000, where 5 pieces and 1 added tokens leave room",
        ),
        ({"6": {"content": "a"}}, "has the id 6"),
    ],
)
def test_added_tokens_that_go_on_with_no_vocabulary_are_refused(tmp_path: Path, added: Any, words: str) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(model_bytes((*PIECES,)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(CheckpointError) as caught:
        hf_model.load(SafetensorsCheckpoint(tmp_path))
    assert words in caught.value.message
    assert "tokenizer_config.json" in caught.value.message


def test_byte_tokens_and_the_unknown_one_stay_what_they_are(tmp_path: Path) -> None:
    """A file that calls them special does not take them from the model."""
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(model_bytes((*SPECIAL, *BYTES)))
    added = {"0": {"content": "<unk>", "special": False}, "13": {"content": "<0x0A>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = hf_model.load(SafetensorsCheckpoint(tmp_path))
    assert (tokenizer.is_special(0), tokenizer.is_special(13), tokenizer.token_bytes(13)) == (True, False, b"\n")
