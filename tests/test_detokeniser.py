"""The incremental detokeniser against the decode of the whole list, with tokenizers of every kind of decoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import byte_alphabet, tiny_tokenizer_json
from tokenizers import AddedToken, Tokenizer, decoders, models

from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.tokenizers import gguf_bpe
from mlxcel.plugins.tokenizers.hf_json import surrounding_ids
from mlxcel.plugins.tokenizers.library import LibraryTokenizer, spellings_by_id
from mlxcel.plugins.tokenizers.pieces import decoder_table
from mlxcel.plugins.tokenizers.sentencepiece import SentencePieceTokenizer
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.token_kinds import NORMAL, UNKNOWN, UNUSED
from mlxcel.text.decode_window import MAX_CONTEXT, MAX_RUN, MAX_WAIT
from mlxcel.text.detokeniser import Detokeniser

SPECIAL = "<|end|>"
WORDS = ("▁", "▁▁", "▁x", "▁hello", "x", ",", "é", "字", "▁字", "\ufffd", "n't", "don", "lo</w>")
DECODERS: dict[str, Any] = {
    "byte-fallback": lambda: [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    "llama-2": lambda: [
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(content=" ", left=1, right=0),
    ],
    "metaspace, byte fallback": lambda: [decoders.ByteFallback(), decoders.Metaspace()],
    "metaspace, never, byte fallback": lambda: [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")],
    "two spaces": lambda: [
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(content=" ", left=2, right=0),
    ],
    "metaspace": lambda: [decoders.Metaspace()],
    "metaspace, never": lambda: [decoders.Metaspace(prepend_scheme="never")],
    "wordpiece": lambda: [decoders.WordPiece()],
    "bpe suffix": lambda: [decoders.BPEDecoder(suffix="</w>")],
}


@cache
def tokenizer(kind: str) -> LibraryTokenizer:
    """A tokenizer with one special token, words with and without a space, and the 256 byte tokens."""
    if kind == "byte-level":
        library = Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    else:
        tokens = ["<unk>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
        library = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True))
        library.decoder = decoders.Sequence(DECODERS[kind]())
        library.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return adapted(library)


def adapted(library: Tokenizer) -> LibraryTokenizer:
    tokens, added = spellings_by_id(library), library.get_added_tokens_decoder()
    prefix, suffix = surrounding_ids(library)
    return LibraryTokenizer(
        library,
        tokens=tokens,
        special={index for index, token in added.items() if token.special},
        special_ids={},
        eos_ids=frozenset(),
        prefix=prefix,
        suffix=suffix,
        table=decoder_table(library.decoder.__getstate__(), tokens, added),
    )


KINDS = ("byte-level", *DECODERS)
EXACT = ("byte-level", "byte-fallback", "llama-2", "metaspace, byte fallback", "metaspace, never, byte fallback")


@cache
def byte_ids(tok: LibraryTokenizer) -> dict[int, int]:
    """Byte to the id of the token that is this byte alone."""
    spelled = {f"<0x{byte:02X}>": byte for byte in range(256)} | {c: b for b, c in enumerate(byte_alphabet())}
    wanted = range(len(WORDS) + 1, tok.size) if tok.token_text(0) == "<unk>" else range(4, 260)
    return {spelled[tok.token_text(index)]: index for index in wanted if tok.token_text(index) in spelled}


def byte_id(tok: LibraryTokenizer, byte: int) -> int:
    return byte_ids(tok)[byte]


def stream(tok: LibraryTokenizer, ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
    """What each push returned, and the flush."""
    detokeniser = Detokeniser(tok, skip_special=skip_special)
    return [*(detokeniser.push(index) for index in ids), detokeniser.flush()]


def assert_law(tok: LibraryTokenizer, ids: Sequence[int]) -> None:
    for skip in (True, False):
        assert "".join(stream(tok, ids, skip_special=skip)) == tok.decode(ids, skip_special=skip)


@st.composite
def id_lists(draw: st.DrawFn, tok: LibraryTokenizer) -> list[int]:
    """Ids of the whole vocabulary and beyond it: any, those of words and specials, and the bytes of real text."""
    size = tok.size
    anything = st.lists(st.integers(0, size + 20), max_size=50)
    common = st.lists(st.one_of(st.integers(0, 20), st.integers(size - 3, size + 1)), max_size=12)
    spelled = st.text("a é€😀\n", max_size=6).map(lambda text: [byte_id(tok, byte) for byte in text.encode()])
    parts = draw(st.lists(st.one_of(common, anything, spelled), max_size=4))
    return [index for part in parts for index in part]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pushes_are_the_decode_of_the_whole_list(kind: str) -> None:
    """T2, with T3 (byte-exact kinds) and T4 (the others)."""
    tok = tokenizer(kind)

    @settings(max_examples=100, deadline=None, database=None, derandomize=True)
    @given(id_lists(tok))
    def law(ids: list[int]) -> None:
        assert_law(tok, ids)

    law()


def test_the_kinds_use_both_ways_of_decoding() -> None:
    assert {kind for kind in KINDS if tokenizer(kind).byte_exact} == set(EXACT)


@pytest.mark.parametrize("skip", [True, False])
def test_a_byte_level_tail_is_written_as_the_library_writes_it(skip: bool) -> None:
    """T2 and T5 against the `tokenizers` library itself: as many U+FFFD, whatever the bytes are."""
    library = Tokenizer.from_str(json.dumps(tiny_tokenizer_json()))
    tok = tokenizer("byte-level")
    pieces = [0xF0, 0x9F, 0x98, 0x80, 0xE2, 0x82, 0xC3, 0xED, 0xA0, 0xFF, 0x41]
    for data in product(pieces, repeat=3):
        ids = [0, *(byte_id(tok, byte) for byte in data)]
        ids.insert(2, 1)  # a special token between the bytes
        assert "".join(stream(tok, ids, skip_special=skip)) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", [0, 1, 2, 3])
@pytest.mark.parametrize("before", ["", "ok", "é", "😀"])
def test_h_a5_a_limit_inside_a_character_has_one_rule(kind: str, tail: int, before: str) -> None:
    """T5: the cut character appears as the whole decode has it."""
    tok = tokenizer(kind)
    data = f"{before}😀".encode()
    assert_law(tok, [byte_id(tok, byte) for byte in data[: len(data) - tail]])


@pytest.mark.parametrize("kind", [*EXACT, "two spaces"])
@pytest.mark.parametrize("hidden_at", [None, 1, 2, 3])
def test_h_a1_an_emoji_in_pieces_is_one_character(kind: str, hidden_at: int | None) -> None:
    """T3: in a batch of three, whatever the turns, and also where a hidden special token stands inside it."""
    tok = tokenizer(kind)
    special = next(i for i in range(tok.size) if tok.is_special(i))
    ids = [byte_id(tok, byte) for byte in "😀".encode()]
    if hidden_at is not None:
        ids.insert(hidden_at, special)
    rows = [Detokeniser(tok) for _ in range(3)]
    texts = ["", "", ""]
    for turn in range(len(ids) + 2):
        for row, detokeniser in enumerate(rows):
            if 0 <= turn - row < len(ids):
                texts[row] += detokeniser.push(ids[turn - row])
    assert [text + row.flush() for text, row in zip(texts, rows, strict=True)] == ["😀"] * 3


@pytest.mark.parametrize("kind", EXACT)
def test_byte_exact_text_waits_for_nothing_but_its_character(kind: str) -> None:
    """T3: emitted at the token that completes it."""
    tok = tokenizer(kind)
    ids = [byte_id(tok, byte) for byte in "\né€😀".encode()]
    assert stream(tok, ids) == ["\n", "", "é", "", "", "€", "", "", "", "😀", ""]


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd"]),  # a limit inside a character
        (b"\xf0\x9fA", ["", "", "\ufffdA", ""]),
        (b"\xc3\xa9\xff\xc3\xa9", ["", "é", "\ufffd", "", "é", ""]),  # what is right stays right
        (b"\xe2\x82\xe2\x82\xac", ["", "", "\ufffd", "", "€", ""]),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),  # a surrogate is no character
    ],
)
def test_broken_bytes_have_one_rule(kind: str, data: bytes, pieces: list[str]) -> None:
    """T3 and T5: each longest beginning of a character, and each byte that begins none, is one U+FFFD, at once."""
    tok = tokenizer(kind)
    ids = [byte_id(tok, byte) for byte in data]
    assert stream(tok, ids) == pieces
    assert tok.decode(ids, skip_special=True) == "".join(pieces) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("kind", "words", "text"),
    [
        ("byte-fallback", ["▁x", "▁x"], " x x"),
        ("llama-2", ["▁x", "▁x"], "x x"),
        ("llama-2", ["▁▁", "▁x"], "  x"),
        ("llama-2", ["▁", "▁x"], " x"),
        ("llama-2", ["x", "▁x"], "x x"),
        ("metaspace, byte fallback", ["▁▁", "▁x"], " x"),
        ("metaspace, byte fallback", ["▁x", "▁x"], "x x"),
        ("metaspace, never, byte fallback", ["▁x", "▁x"], " x x"),
    ],
)
def test_h_a3_a_space_in_front_is_dropped_as_the_decoder_says(kind: str, words: list[str], text: str) -> None:
    """T2 against the `tokenizers` library, and behind a hidden special token."""
    tok, special = tokenizer(kind), tokenizer(kind).size - 1
    ids = [special, *(WORDS.index(word) + 1 for word in words)]
    assert "".join(stream(tok, ids)) == text == tok.decode(ids, skip_special=True)
    library = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]))
    library.decoder = decoders.Sequence(DECODERS[kind]())
    assert library.decode([WORDS.index(word) for word in words]) == text


@pytest.mark.parametrize("kind", KINDS[1:])
def test_h_a3_leading_spaces_are_neither_lost_nor_trimmed_twice(kind: str) -> None:
    """T2: ids of "▁" and "▁x" at the beginning, in every order."""
    tok = tokenizer(kind)
    for length in range(1, 5):
        for ids in product(range(1, 5), repeat=length):
            assert_law(tok, ids)


@pytest.mark.parametrize("kind", ["llama-2", "metaspace", "metaspace, byte fallback"])
def test_h_a4_words_keep_their_spaces(kind: str) -> None:
    """T3, T4: twenty scripted ids; a word appears with its token, and its space with it."""
    tok = tokenizer(kind)
    hello, comma = WORDS.index("▁hello") + 1, WORDS.index(",") + 1
    pieces = stream(tok, [hello, comma] * 10)
    assert pieces == ["hello", ",", *[" hello", ","] * 9, ""]


def test_a_run_of_byte_tokens_that_is_no_text_becomes_one_replacement_a_byte() -> None:
    """T4 and T5, with a decoder that only the library knows: as it writes it, and in front of a word that follows."""
    tok = tokenizer("two spaces")
    ids = [byte_id(tok, byte) for byte in "é".encode() + b"\xff"]
    assert "".join(stream(tok, [*ids, 3])) == "\ufffd\ufffd\ufffd x" == tok.decode([*ids, 3], skip_special=True)


@pytest.mark.parametrize(
    "data", [b"\xff" * 200, b"\x80A" * 100, ("€" * 9).encode() + b"\xe2A" * 180, "€".encode() * 300]
)
def test_long_runs_of_byte_tokens_are_shown_in_between(data: bytes) -> None:
    """T4: broken text waits at most 32 tokens, a run that is still UTF-8 at most 256; the text is that of the whole."""
    tok = tokenizer("two spaces")
    ids = [3, *(byte_id(tok, byte) for byte in data), 3]
    pieces = stream(tok, ids)
    assert "".join(pieces) == tok.decode(ids, skip_special=True)
    wait = MAX_RUN if b"\xe2\x82\xac" in data else MAX_WAIT
    assert all(any(pieces[i : i + wait]) for i in range(1, len(ids) - wait))


class CountingTokenizer:
    """A tokenizer that notes how many ids each decode was given."""

    def __init__(self, inner: LibraryTokenizer) -> None:
        self._inner = inner
        self.decoded: list[int] = []

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        self.decoded.append(len(ids))
        return self._inner.decode(ids, skip_special=skip_special)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["words", "spaces", "specials", "bytes", "no text"])
def test_the_cost_of_a_token_does_not_grow_with_the_reply(kind: str, pattern: str) -> None:
    """T6: the window of a decode stays bounded."""
    tok = CountingTokenizer(tokenizer(kind))
    size = tok.size
    once = {
        "words": [3, 4, 7, 9],
        "spaces": [1],
        "specials": [size - 1, 3],
        "bytes": [byte_id(tokenizer(kind), byte) for byte in b"\xe2\x82A"],
        "no text": [size, size + 5],
    }[pattern]
    detokeniser = Detokeniser(tok, skip_special=False)
    for index in once * 300:
        detokeniser.push(index)
    assert max(tok.decoded, default=0) <= MAX_CONTEXT + MAX_RUN


def test_tokens_without_text_do_not_fill_the_window() -> None:
    """T6: a vocabulary's "" is a token too, and the word before it still decides about the next space."""
    library = Tokenizer(models.BPE(vocab={"": 0, "▁x": 1}, merges=[]))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok = CountingTokenizer(adapted(library))
    detokeniser = Detokeniser(tok)
    text = "".join(detokeniser.push(index) for index in [1, *[0] * 1000, 1, 0, 1]) + detokeniser.flush()
    assert text == "x x x"
    assert max(tok.decoded) <= MAX_CONTEXT + MAX_RUN


class Unfinished:
    """A tokenizer whose text ends in U+FFFD as long as it has no "." in it, and then is rewritten."""

    size, byte_exact = 10, False

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return "".join("a." if index else "b\ufffd" for index in ids)

    def is_special(self, token_id: int) -> bool:
        return False

    def token_text(self, token_id: int) -> str:
        return str(token_id)


def test_text_that_ends_unfinished_waits_at_most_32_tokens() -> None:
    """T4, for any decoder."""
    detokeniser = Detokeniser(Unfinished())  # type: ignore[arg-type]  # what decoding needs, no more
    assert [detokeniser.push(0) for _ in range(MAX_WAIT)] == [*[""] * (MAX_WAIT - 1), "b\ufffd" * MAX_WAIT]
    assert detokeniser.push(0) == ""
    assert detokeniser.push(1) == "b\ufffda."
    assert detokeniser.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_h_l9_every_id_decodes_without_raising(kind: str) -> None:
    """T6: each id of the vocabulary alone; ids beyond it, and below 0, are ""."""
    tok = tokenizer(kind)
    for index in range(tok.size):
        assert_law(tok, [index])
    for index in (tok.size, tok.size + 19, 2**31, -1):
        assert stream(tok, [index]) == ["", ""]


def test_the_default_model_keeps_the_space_of_its_first_word(smollm2_path: Path) -> None:
    """H-A3 on a real vocabulary; T2 over all of its ids."""
    tok = gguf_bpe.from_metadata(GgufCheckpoint(smollm2_path).assets["gguf"], smollm2_path)
    assert "".join(stream(tok, tok.encode(" Paris is 😀", add_special=False))) == " Paris is 😀"
    assert_law(tok, range(tok.size + 8))


@pytest.mark.parametrize("removes_spaces", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_token_without_text_does_not_begin_the_text(prefix: bool, removes_spaces: bool) -> None:
    """T2: the space that is dropped is that of the first token which has any text; an unused row has none. It is
    dropped where a model adds one, and where it takes spaces away from the ends of a text."""
    spelled = ["<unk>", "<unused0>", "▁x"]
    model = SentencePieceModel(
        "a test", spelled, [0.0, 0.0, -1.0], [UNKNOWN, UNUSED, NORMAL], False, prefix, removes_spaces, charsmap=None
    )
    words = SentencePieceTokenizer(model, special_ids={}, eos_ids=frozenset(), prefix=[], suffix=[])
    stream = Detokeniser(words)
    first = "x" if prefix or removes_spaces else " x"
    assert [stream.push(token) for token in (1, 1, 2, 1, 2)] == ["", "", first, "", " x"]
    assert words.decode([1, 1, 2, 1, 2], skip_special=True) == f"{first} x"


class _Rewriting:
    """Of a decoder that changes what stood before: "ab" becomes "c!"."""

    byte_exact = False
    size = 3

    def is_special(self, token_id: int) -> bool:
        return False

    def token_text(self, token_id: int) -> str:
        return "abd"[token_id]

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return "".join(map(self.token_text, ids)).replace("ab", "c!")


def test_a_text_that_no_longer_begins_as_shown_waits() -> None:
    """T4: what was shown is final, and what does not follow from it is not shown before the end."""
    rewriting: Any = _Rewriting()
    stream = Detokeniser(rewriting)
    assert [stream.push(token) for token in (2, 0, 1, 2)] == ["d", "a", "", ""]
    assert stream.flush() == "!d"
