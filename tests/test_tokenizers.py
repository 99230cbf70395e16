"""Tokenizers from tokenizer.json and from GGUF metadata (engine specification 6.4)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import BOS, IM_END, tiny_tokenizer_json, tiny_vocabulary, write_tiny_gguf, write_tiny_llama
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import CheckpointError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import gguf_bpe, hf_json
from mlxcel.plugins.tokenizers.gguf_tokenizer import load as load_gguf

TEXTS = (
    "",
    " ",
    "The capital of France is Paris, isn't it? WE'LL SEE.",
    "def f(x):\n    return {'a': x[0] ** 2}  # naïve\n\n\n\tif x != None: pass\r\n",
    "Él está aquí — «déjà vu», coöperate, e\u0301 decomposed",
    "日本語の文章です。中文也一样，한국어도.",
    "🙂👩‍👩‍👧‍👦🇩🇪 emoji",
    "   leading,  double   triple \t tabs \n \n newlines   ",
    "1234567 3.14159 ½ ² ٣٤ 12:30",
    "<|im_start|>user\nhello<|im_end|>\n",
    "\u00a0\u2003\u3000 exotic spaces\u200b\ufeff",
    "a" * 2000,
)


def folder_tokenizer(folder: Path, settings: Mapping[str, Any] | None = None, **tiny: Any) -> Tokenizer:
    """Of a tiny folder, with fields of tokenizer_config.json put over."""
    write_tiny_llama(folder, **tiny)
    put_over(folder / "tokenizer_config.json", settings or {})
    return hf_json.load(SafetensorsCheckpoint(folder))


def put_over(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def json_tokenizer(folder: Path, content: str, settings: Mapping[str, Any] | None = None) -> Tokenizer:
    """Of a tiny folder with another tokenizer.json and tokenizer_config.json."""
    write_tiny_llama(folder)
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return hf_json.load(SafetensorsCheckpoint(folder))


def gguf_tokenizer(path: Path, **tiny: Any) -> Tokenizer:
    return load_gguf(GgufCheckpoint(write_tiny_gguf(path, **tiny)))


def metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of the tiny tokenizer; a change of None removes a key."""
    tokens, merges = tiny_vocabulary()
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [3] * 4 + [1] * (len(tokens) - 4),
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def from_metadata(**changes: Any) -> Tokenizer:
    return gguf_bpe.from_metadata(metadata(**changes), Path("model.gguf"))


@attrs.frozen
class Metadata:
    """As much of a GGUF checkpoint as a tokenizer reads."""

    assets: Mapping[str, Any]
    path: Path = Path("model.gguf")


@pytest.fixture(params=["tokenizer.json", "gguf"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """The tiny tokenizer from either source, without a BOS of its own."""
    return (
        folder_tokenizer(tmp_path / "m") if request.param == "tokenizer.json" else gguf_tokenizer(tmp_path / "m.gguf")
    )


# --- text to ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parse_special", [True, False])
def test_t23_both_sources_of_the_tiny_model_give_equal_ids(tmp_path: Path, parse_special: bool) -> None:
    """T23."""
    left, right = folder_tokenizer(tmp_path / "m"), gguf_tokenizer(tmp_path / "m.gguf")
    for text in TEXTS:
        ids = left.encode(text, add_special=True, parse_special=parse_special)
        assert ids == right.encode(text, add_special=True, parse_special=parse_special), text
        assert left.decode(ids, skip_special=False) == text


def test_t23_any_text_gives_equal_ids_and_comes_back() -> None:
    """T23."""
    left = tokenizers.Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    right = from_metadata()

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(max_size=60))
    def check(text: str) -> None:
        ids = right.encode(text, add_special=False)
        assert ids == left.encode(text, add_special_tokens=False).ids
        assert right.decode(ids, skip_special=False) == text

    check()


def smollm2_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json as SmolLM2's own repository has it, from the vocabulary in the GGUF metadata."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = tiny_tokenizer_json()
    content["added_tokens"] = [{"id": i, "content": tokens[i], **flags} for i, kind in enumerate(kinds) if kind == 3]
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    merges = [merge.split(" ") for merge in values["tokenizer.ggml.merges"]]
    content["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    return content


def test_t23_the_default_models_gguf_equals_its_tokenizer_json(tmp_path: Path, smollm2_path: Path) -> None:
    """T23, on prose, code, accents, CJK, emoji and white space with the real vocabulary."""
    checkpoint = GgufCheckpoint(smollm2_path)
    ours = load_gguf(checkpoint)
    content = json.dumps(smollm2_json(checkpoint.assets["gguf"]))
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    theirs = json_tokenizer(tmp_path, content, {**roles, "pad_token": "<|im_end|>"})
    for text in TEXTS:
        ids = ours.encode(text, add_special=True)
        assert ids == theirs.encode(text, add_special=True), text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special=False) == text
    assert (ours.size, ours.special_ids, ours.eos_ids) == (theirs.size, theirs.special_ids, theirs.eos_ids)
    assert ours.special_ids == {"bos": 1, "eos": 2, "eot": 2, "unk": 0, "pad": 2}
    assert ours.eos_ids == {0, 2}
    assert not ours.adds_bos


def test_the_golden_prompts_of_the_default_model(smollm2_path: Path) -> None:
    tokenizer = load_gguf(GgufCheckpoint(smollm2_path))
    golden = json.loads((Path(__file__).parent / "data/golden/smollm2-135m.json").read_text())
    raw = [case for case in golden["cases"] if "prompt" in case]
    assert len(raw) == 3
    for case in raw:
        assert tokenizer.encode(case["prompt"], add_special=True) == case["prompt_ids"], case["id"]
    for case in golden["cases"]:  # a rendered chat comes back from its text, control tokens included
        text = tokenizer.decode(case["prompt_ids"], skip_special=False)
        assert tokenizer.encode(text, add_special=False) == case["prompt_ids"], case["id"]


def test_qwen2_composes_accents_as_its_tokenizer_json_does() -> None:
    assert from_metadata(pre="qwen2").encode("e\u0301", add_special=False) == from_metadata().encode(
        "é", add_special=False
    )
    assert from_metadata().encode("e\u0301", add_special=False) != from_metadata().encode("é", add_special=False)


def test_llama_bpe_takes_a_word_that_is_a_token_whole_and_adds_a_bos() -> None:
    tokens, _ = tiny_vocabulary()
    types = [3] * 4 + [1] * (len(tokens) - 3)
    changes: dict[str, Any] = {"tokens": [*tokens, "xyz"], "token_type": types}
    assert from_metadata(pre="llama-bpe", **changes).encode("xyz", add_special=True) == [0, len(tokens)]
    assert len(from_metadata(pre="gpt-2", **changes).encode("xyz", add_special=True)) == 3
    assert not from_metadata(pre="llama-bpe", add_bos_token=False).adds_bos


def test_t24_special_spellings_are_parsed_only_when_asked(tiny: Tokenizer) -> None:
    """T24."""
    parsed = tiny.encode(f"a{IM_END}b", add_special=False)
    literal = tiny.encode(f"a{IM_END}b", add_special=False, parse_special=False)
    assert parsed.count(3) == 1
    assert len(parsed) == 3
    assert not any(tiny.is_special(index) for index in literal)
    assert tiny.decode(literal, skip_special=True) == f"a{IM_END}b"
    assert tiny.encode(f"a{IM_END}b", add_special=False) == parsed  # asking once leaves no trace


def test_a_lone_surrogate_is_no_crash(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b", add_special=False), skip_special=False) == "a\ufffdb"
    assert tiny.encode("\ud83d\ude42", add_special=False) == tiny.encode("🙂", add_special=False)


# --- beginning of sequence -------------------------------------------------------------------------------------------


@pytest.fixture(params=["template", "tokenizer_config", "gguf"])
def with_bos(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """The tiny tokenizer with a BOS, said in each of the places that can say it."""
    if request.param == "template":
        return folder_tokenizer(tmp_path / "m", add_bos=True)
    if request.param == "tokenizer_config":
        return folder_tokenizer(tmp_path / "m", {"add_bos_token": True})
    return gguf_tokenizer(tmp_path / "m.gguf", add_bos=True)


def test_h_d1_a_text_gets_one_bos_whoever_writes_it(with_bos: Tokenizer) -> None:
    """T14, T24."""
    assert with_bos.adds_bos
    bare = with_bos.encode("hello", add_special=False)
    assert with_bos.encode("hello", add_special=True) == [0, *bare]
    assert with_bos.encode(f"{BOS}hello", add_special=True) == [0, *bare]
    assert with_bos.encode(f"{BOS}hello", add_special=False) == [0, *bare]
    assert with_bos.encode(f"{BOS}{BOS}hello", add_special=True) == [0, 0, *bare]
    assert with_bos.encode("", add_special=True) == [0]
    spelled = with_bos.encode(f"{BOS}hello", add_special=True, parse_special=False)
    assert spelled[0] == 0
    assert with_bos.decode(spelled[1:], skip_special=True) == f"{BOS}hello"


def test_without_a_bos_nothing_is_added(tiny: Tokenizer) -> None:
    assert not tiny.adds_bos
    assert tiny.encode("hello", add_special=True) == tiny.encode("hello", add_special=False)
    assert tiny.encode(f"{BOS}hello", add_special=True)[0] == 0


def test_add_bos_token_false_takes_the_templates_bos_away(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path / "m", {"add_bos_token": False}, add_bos=True)
    assert not tokenizer.adds_bos
    assert tokenizer.encode("a", add_special=True) == tokenizer.encode("a", add_special=False)


def test_add_eos_is_obeyed(tmp_path: Path) -> None:
    """T22."""
    for tokenizer in (folder_tokenizer(tmp_path, {"add_eos_token": True}), from_metadata(add_eos_token=True)):
        assert tokenizer.encode("a", add_special=True) == [*tokenizer.encode("a", add_special=False), 1]


def test_a_bos_is_found_in_a_vocabulary_without_letters(tmp_path: Path) -> None:
    content = tiny_tokenizer_json(add_bos=True)
    content["model"] |= {
        "vocab": {token: i for i, token in enumerate([*tiny_vocabulary()[0][:4], "0", "1"])},
        "merges": [],
    }
    tokenizer = json_tokenizer(tmp_path, json.dumps(content), {"bos_token": BOS})
    assert tokenizer.adds_bos
    assert tokenizer.encode("10", add_special=True) == [0, 5, 4]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    library.enable_truncation(4)
    library.enable_padding(length=8)
    tokenizer = json_tokenizer(tmp_path, library.to_str())
    assert len(tokenizer.encode("a", add_special=True)) == 1
    assert tokenizer.decode(tokenizer.encode("x" * 50, add_special=True), skip_special=False) == "x" * 50
    assert len(tokenizer.encode("z" * 50, add_special=True, parse_special=False)) > 8


# --- ids to text ---------------------------------------------------------------------------------------------------


def test_t6_no_id_raises_and_ids_beyond_the_vocabulary_are_nothing(tiny: Tokenizer) -> None:
    """T6."""
    assert tiny.size == 300
    for index in (*range(300), 300, 319, 2**31, 2**63, 2**70, -1, -300):
        text = tiny.decode([index], skip_special=False)
        assert isinstance(tiny.token_text(index), str)
        assert tiny.token_bytes(index).decode("utf-8", "replace") == text
        if not 0 <= index < 300:
            assert (text, tiny.token_text(index), tiny.is_special(index)) == ("", "", False)
    assert tiny.decode([310, *tiny.encode("ab", add_special=False), -5, 2**40], skip_special=False) == "ab"


def test_decoding_equals_the_library_and_the_joined_bytes(tiny: Tokenizer) -> None:
    """T3: `byte_exact` means what it says, for ids in any order."""
    library = tokenizers.Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    assert tiny.byte_exact

    @settings(max_examples=300, deadline=None)
    @given(ids=st.lists(st.integers(0, 299), max_size=12), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        text = tiny.decode(ids, skip_special=skip)
        assert text == library.decode(ids, skip_special_tokens=skip)
        kept = [index for index in ids if not (skip and tiny.is_special(index))]
        assert text == b"".join(map(tiny.token_bytes, kept)).decode("utf-8", "replace")

    check()


def test_a_tokenizer_of_either_source_is_a_tokenizer(tmp_path: Path) -> None:
    """The type checker compares the classes with the protocols here."""
    checkpoints: list[Checkpoint] = [
        SafetensorsCheckpoint(write_tiny_llama(tmp_path / "m")),
        GgufCheckpoint(write_tiny_gguf(tmp_path / "m.gguf")),
    ]
    left: Tokenizer = hf_json.load(checkpoints[0])
    right: Tokenizer = load_gguf(checkpoints[1])
    assert (left.size, left.special_ids, left.eos_ids) == (right.size, right.special_ids, right.eos_ids)
    assert left.special_ids == {"bos": 0, "eos": 1, "eot": 3}


def test_special_tokens_are_skipped_only_when_asked(tiny: Tokenizer) -> None:
    ids = tiny.encode(f"{BOS}a b{IM_END}", add_special=False)
    assert tiny.decode(ids, skip_special=False) == f"{BOS}a b{IM_END}"
    assert tiny.decode(ids, skip_special=True) == "a b"
    assert [tiny.is_special(index) for index in range(5)] == [True] * 4 + [False]
    assert tiny.token_text(3) == IM_END
    assert tiny.token_bytes(3) == IM_END.encode()


def test_an_added_token_with_accents_is_spelled_as_it_is() -> None:
    """Its characters also stand for bytes in the byte alphabet; a token that was added is not spelled in it."""
    tokens, _ = tiny_vocabulary()
    tokenizer = from_metadata(tokens=[*tokens, "été", "[pad]"], token_type=[3] * 4 + [1] * (len(tokens) - 4) + [4, 5])
    ids = tokenizer.encode("un été", add_special=False, parse_special=False)
    assert ids[-1] == len(tokens)
    assert tokenizer.decode(ids, skip_special=True) == "un été"
    assert tokenizer.decode([len(tokens) + 1], skip_special=False) == ""  # unused: a row that pads the vocabulary
    assert tokenizer.size == len(tokens) + 2


# --- roles and ends --------------------------------------------------------------------------------------------------


def test_roles_from_the_folder(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, {"pad_token": {"content": "<|im_start|>"}, "unk_token": "not there"})
    assert tokenizer.special_ids == {"bos": 0, "eos": 1, "eot": 3, "pad": 2}
    assert tokenizer.eos_ids == {1, 3}


def test_special_tokens_map_fills_what_tokenizer_config_leaves_open(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "bos_token": null}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|eos|>", "bos_token": {"content": "<|bos|>"}}')
    tokenizer = hf_json.load(SafetensorsCheckpoint(tmp_path))
    assert (tokenizer.special_ids["bos"], tokenizer.special_ids["eos"]) == (0, 3)
    assert tokenizer.eos_ids == {3}


def test_generation_config_fills_roles_and_ends_nothing_by_itself(tmp_path: Path) -> None:
    """F6: `--generation-config none` must be able to leave these ends out."""
    write_tiny_llama(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    put_over(tmp_path / "generation_config.json", {"eos_token_id": [7, 1], "pad_token_id": 900})
    tokenizer = hf_json.load(SafetensorsCheckpoint(tmp_path))
    assert tokenizer.special_ids == {"bos": 0, "eos": 7, "eot": 3}
    assert tokenizer.eos_ids == {3}


def test_a_role_makes_a_plain_entry_special(tmp_path: Path) -> None:
    content = tiny_tokenizer_json()
    content["added_tokens"] = []
    tokenizer = json_tokenizer(tmp_path, json.dumps(content), {"eos_token": "<|eos|>"})
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(3)
    assert tokenizer.encode("a<|eos|>", add_special=False)[-1] == 1
    assert tokenizer.eos_ids == {1}  # "<|im_end|>" is ordinary text here, so it ends nothing


def test_t22_roles_from_gguf(caplog: pytest.LogCaptureFixture) -> None:
    """T22."""
    with caplog.at_level(logging.WARNING):
        tokenizer = from_metadata(eot_token_id=2, eom_token_id=9, unknown_token_id=4, padding_token_id=300)
    assert tokenizer.special_ids == {"bos": 0, "eos": 1, "eot": 2, "eom": 9, "unk": 4}
    assert tokenizer.eos_ids == {1, 2, 3, 9}
    assert "padding_token_id is 300, outside the 300 tokens" in caplog.text


@pytest.mark.parametrize(
    "spelling", ["<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<eos>", "</s>", "<|eom_id|>"]
)
@pytest.mark.parametrize(("kind", "ends"), [(3, True), (1, False), (4, False)])
def test_documented_ends_count_as_control_tokens_only(spelling: str, kind: int, ends: bool) -> None:
    """Engine specification 5.2."""
    tokens, _ = tiny_vocabulary()
    tokens[3] = spelling
    types = [3, 3, 3, kind] + [1] * (len(tokens) - 4)
    assert from_metadata(tokens=tokens, token_type=types).eos_ids == ({1, 3} if ends else {1})


# --- SentencePiece in tokenizer.json ---------------------------------------------------------------------------------


def sentencepiece_json(kind: str) -> str:
    """A small vocabulary with ▁ and byte fallback: as Llama 2 ("strip"), Gemma ("plain") or with Metaspace."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁x", "x", "y", "▁▁", "é"]
    vocabulary = {word: index for index, word in enumerate(words)}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "x"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True)
    )
    replace, fallback, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    if kind == "metaspace":
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        library.decoder = decoders.Sequence([fallback, decoders.Metaspace()])
    elif kind == "strip":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.decoder = decoders.Sequence([replace, fallback, fuse, decoders.Strip(" ", 1, 0)])
    else:
        library.normalizer = normalizers.Replace(" ", "▁")
        library.decoder = decoders.Sequence([replace, fallback, fuse])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library.to_str()


@pytest.mark.parametrize("kind", ["metaspace", "strip", "plain"])
def test_sentencepiece_vocabularies(tmp_path: Path, kind: str) -> None:
    """T3, T24."""
    tokenizer = json_tokenizer(tmp_path, sentencepiece_json(kind), {"eos_token": "</s>", "unk_token": "<unk>"})
    library = tokenizers.Tokenizer.from_str(sentencepiece_json(kind))
    assert tokenizer.byte_exact
    assert tokenizer.eos_ids == {2}
    for text in ("x y", "xx  x", "🙂 x", "é\nx", ""):
        ids = tokenizer.encode(text, add_special=True)
        assert ids == library.encode(text).ids
        assert tokenizer.decode(ids, skip_special=True) == text
    vocabulary = library.get_vocab()
    bare, spaced, emoji = (vocabulary[token] for token in ("x", "▁x", "<0xF0>"))
    assert tokenizer.token_bytes(bare) == b"x"
    assert tokenizer.token_bytes(spaced) == b" x"  # inside a text, whatever happens at its beginning
    assert tokenizer.token_bytes(emoji) == b"\xf0"
    assert tokenizer.token_bytes(2) == b"</s>"
    for index in range(-1, tokenizer.size + 3):
        assert isinstance(tokenizer.token_bytes(index), bytes)
        assert isinstance(tokenizer.decode([index, index], skip_special=False), str)


def test_h_a3_the_first_words_space_follows_the_tokenizers_own_rule(tmp_path: Path) -> None:
    """T2: Llama 2 drops one space at the beginning of a text, never two and never in the middle."""
    tokenizer = json_tokenizer(tmp_path, sentencepiece_json("strip"))
    space, spaced = (json.loads(sentencepiece_json("strip"))["model"]["vocab"][token] for token in ("▁", "▁x"))
    assert tokenizer.decode([spaced, spaced], skip_special=True) == "x x"
    assert tokenizer.decode([space, spaced], skip_special=True) == " x"


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "holds no tokenizer"),
        ({"model": "bert"}, "tokenizer model 'bert' is not known, known are 'gpt2'"),
        ({"model": "rwkv"}, "tokenizer model 'rwkv'"),
        ({"model": ["gpt2"]}, "tokenizer model list"),
        ({"pre": "superbpe"}, "pre-tokenizer 'superbpe' is not known, known are default, gpt-2, "),
        ({"pre": ["gpt-2"]}, "pre-tokenizer list is not known"),
        ({"tokens": None}, "tokens must be a list of strings"),
        ({"tokens": []}, "tokens must be a list of strings"),
        ({"merges": None}, "merges must be a list of strings"),
        ({"merges": [1, 2]}, "merges must be a list of strings"),
        ({"merges": ["abc"]}, "'abc' in tokenizer.ggml.merges is not two tokens"),
        ({"merges": ["a b c"]}, "'a b c' in tokenizer.ggml.merges is not two tokens"),
        ({"merges": ["q z"]}, "merge 'q' 'z' needs the token 'qz'"),
        ({"token_type": None}, "300 tokens need as many token types in tokenizer.ggml.token_type, found none"),
        ({"token_type": [1]}, "found 1"),
        ({"tokens": ["a"] * 300}, "token 'a' occurs twice, as 0 and 299"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
    ],
)
def test_t21_what_is_not_known_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    """T21."""
    with pytest.raises(CheckpointError) as caught:
        load_gguf(Metadata({"gguf": metadata(**changes)}))  # type: ignore[arg-type]  # all that is read
    assert words in caught.value.message
    assert caught.value.message.startswith("model.gguf")


def test_a_missing_name_is_the_default_pre_tokenizer() -> None:
    text = "it's 1234"
    ids = from_metadata(pre=None).encode(text, add_special=False)
    assert ids == from_metadata(pre="default").encode(text, add_special=False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Unknown"}}'])
def test_a_damaged_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        json_tokenizer(tmp_path, content)
