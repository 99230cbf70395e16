"""How text becomes pieces, against the definitions of both algorithms (engine specification, T21 and T23)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel.plugins.tokenizers.charsmap import CharsMap
from mlxcel.plugins.tokenizers.score_bpe import ScoreBpe
from mlxcel.plugins.tokenizers.spellings import Spellings
from mlxcel.plugins.tokenizers.unigram import UNKNOWN_PENALTY, Unigram

LETTERS = "ab▁"
STRINGS = ["".join(letters) for length in (1, 2, 3, 4) for letters in product(LETTERS, repeat=length)]
SCORES = st.sampled_from([-3.0, -2.0, -1.5, -1.0, 0.0])  # few, so that equal ones meet; sums of them are exact
VOCABULARIES = st.dictionaries(st.sampled_from(STRINGS), SCORES, min_size=1, max_size=25)
TEXTS = st.text(LETTERS + "c", max_size=14)


# --- byte pairs by score ---------------------------------------------------------------------------------------------


def merged(text: str, scores: Mapping[str, float], unused: frozenset[str]) -> list[str]:
    """The definition: as long as two neighbours join to a piece, the best-scored and of these the leftmost do."""
    parts, origins = list(text), dict[str, tuple[str, str]]()
    while True:
        for left, right in pairwise(parts):
            if left + right in unused:
                origins[left + right] = left, right
        found = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not found:
            break
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    while any(part in origins for part in parts):
        at = next(at for at, part in enumerate(parts) if part in origins)
        parts[at : at + 1] = origins[parts[at]]
    return parts


@settings(max_examples=500, deadline=None)
@given(VOCABULARIES, TEXTS)
def test_t23_merges_go_by_score_then_from_the_left(scores: dict[str, float], text: str) -> None:
    """T23, vocabularies with equal scores and several splits of one piece among them."""
    assert ScoreBpe(scores)(text) == merged(text, scores, frozenset())


@settings(max_examples=200, deadline=None)
@given(VOCABULARIES, st.text(LETTERS, max_size=8))
def test_unused_pieces_are_joined_through_and_taken_apart(scores: dict[str, float], text: str) -> None:
    """T21. Pieces of two characters: those have one split, and what is taken apart does not depend on the order."""
    unused = frozenset(piece for piece in scores if len(piece) == 2)
    parts = ScoreBpe(scores, unused)(text)
    assert parts == merged(text, scores, unused)
    assert not unused.intersection(parts)


def test_unused_pieces_of_unused_pieces_are_taken_apart() -> None:
    scores = {"ab": -1.0, "abc": -2.0, "abcd": -3.0}
    assert ScoreBpe(scores)("abcd") == ["abcd"]
    assert ScoreBpe(scores, ["abcd"])("abcd") == ["abc", "d"]
    assert ScoreBpe(scores, ["abcd", "abc"])("abcd") == ["ab", "c", "d"]
    assert ScoreBpe(scores, scores)("abcdabc") == list("abcdabc")


def test_of_equal_scores_the_leftmost_pair_goes_first() -> None:
    assert ScoreBpe({"ab": -1.0, "ba": -1.0})("aba") == ["ab", "a"]
    assert ScoreBpe({"ab": -2.0, "ba": -1.0})("aba") == ["a", "ba"]
    pieces = {"ab": -1.0, "bc": -2.0, "abx": -3.0, "xbc": -3.0, "x": -4.0}  # two splits, then one score for both
    assert ScoreBpe(pieces)("abxbc") == ["abx", "bc"]
    assert ScoreBpe({"aa": -1.0, "aaa": -2.0})("aaaaa") == ["aa", "aaa"]


def test_a_piece_that_reaches_across_a_space_is_found() -> None:
    """Words are cut in front of spaces where no piece reaches across; ">▁</" is one of Gemma's."""
    pieces = {"▁<": -1.0, "▁</": -2.0, ">▁</": -3.0, "▁a": -4.0}
    assert ScoreBpe(pieces)("b>▁</a▁a▁▁a") == ["b", ">▁</", "a", "▁a", "▁", "▁a"]
    assert ScoreBpe({"]▁": -1.0, "^▁": -1.0, "-▁": -1.0, "\\▁": -1.0})("a]▁^▁-▁\\▁b▁") == [
        "a",
        "]▁",
        "^▁",
        "-▁",
        "\\▁",
        "b",
        "▁",
    ]


class Counting(dict[str, float]):
    """Counts how often a piece was looked for, and in what length."""

    looked_up = 0

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]  # as dict's, counted
        self.looked_up += len(key)
        return super().get(key, default)


@pytest.mark.parametrize("unit", ["a", "ab", "▁a", "▁", "字"])
def test_t23_the_work_grows_with_the_text_alone(unit: str) -> None:
    """T23: twice the text is about twice the work, of one repeated letter too."""
    pieces = {unit * count: -float(count) for count in (1, 2, 4, 8, 16)} | {"ab": -0.5, "▁a": -0.5}
    for make in (ScoreBpe, Unigram):
        counts = []
        for length in (2000, 4000):
            counting = Counting(pieces)
            segment = make(counting)
            segment._scores = counting  # Unigram copies what it is given
            assert "".join(segment(unit * length)) == unit * length
            counts.append(counting.looked_up)
        assert 0 < counts[1] <= 2.1 * counts[0]


# --- best sums -------------------------------------------------------------------------------------------------------


def segmentations(text: str) -> Iterator[list[str]]:
    if not text:
        yield []
    for end in range(1, len(text) + 1):
        for rest in segmentations(text[end:]):
            yield [text[:end], *rest]


@settings(max_examples=200, deadline=None)
@given(VOCABULARIES, st.text(LETTERS + "c", max_size=9))
def test_t23_the_best_sum_of_all_segmentations_is_found(scores: dict[str, float], text: str) -> None:
    """T21, by trying every segmentation."""
    unknown = min(scores.values()) - UNKNOWN_PENALTY

    def total(parts: list[str]) -> float:
        costs = [scores.get(part, unknown if len(part) == 1 else float("-inf")) for part in parts]
        return sum(costs)

    parts = Unigram(scores)(text)
    assert "".join(parts) == text
    assert total(parts) == max(map(total, segmentations(text)))


def test_of_equal_sums_the_longest_last_piece_wins() -> None:
    assert Unigram({"a": -1.0, "aa": -1.0})("aaa") == ["a", "aa"]


def test_sums_are_those_of_float32() -> None:
    """As sentencepiece 0.2.3 answers for these very scores; in float64 the three lengths come in another order."""
    scores = {piece: single(score) for piece, score in (("a", -2.3), ("aa", -1.56), ("aaa", -1.91), ("aaaa", -2.2))}
    assert Unigram(scores)("a" * 11) == ["aaaa", "aaaa", "aaa"]


def single(value: float) -> float:
    """As a float of four bytes in a file."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def test_user_defined_pieces_are_nearly_always_on_the_best_path() -> None:
    """As sentencepiece 0.2.3 has it: a tenth for each byte but the first, and a better path around them wins."""
    scores = {"a": -1.0, "b": -1.0, "é": -1.0, "aba": -0.8, "aéa": -0.85}
    assert Unigram(scores)("abab") == ["aba", "b"]
    assert Unigram(scores, ["ab"])("abab") == ["ab", "ab"]
    assert Unigram(scores, ["ab"])("aba") == ["aba"]  # 0.1 - 1 against -0.8
    assert Unigram(scores, ["aé"])("aéa") == ["aé", "a"]  # 0.2 - 1 against -0.85


# --- spellings -------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sets(st.text("ab", max_size=4), max_size=8), st.text("abc", max_size=20))
def test_t24_spellings_are_found_from_the_left_and_the_longest_first(found: set[str], text: str) -> None:
    """T24, against a search at every place."""
    ids = {spelling: index for index, spelling in enumerate(sorted(found))}
    expected: list[str | int] = []
    at = 0
    while at < len(text):
        here = max((s for s in ids if s and text.startswith(s, at)), key=len, default=None)
        if here is not None:
            expected.append(ids[here])
        elif expected and isinstance(expected[-1], str):
            expected[-1] += text[at]
        else:
            expected.append(text[at])
        at += len(here) if here else 1
    assert list(Spellings(ids).split(text)) == expected


def test_white_space_beside_a_spelling_can_belong_to_it() -> None:
    ids = {"<l>": 0, "<r>": 1, "<b>": 2}
    spellings = Spellings(ids, strips_before={0, 2}, strips_after={1, 2})
    assert list(spellings.split(" a <l> a <r> \n<b>  <l> ")) == [" a", 0, " a ", 1, 2, 0, " "]
    assert list(spellings.split("  <b>  ")) == [2]


# --- tables of characters --------------------------------------------------------------------------------------------


def table(rules: Mapping[str, str]) -> bytes:
    """The blob of rules whose keys are one character below U+0080, by the layout that `CharsMap` documents."""
    units = [0] * 1024
    replacements = bytearray()
    units[0] = 256 << 10  # children of the root at 256 ^ byte
    for key, replacement in rules.items():
        byte = ord(key)
        value_at = 256 + 128 + byte  # an empty place for the value
        units[256 ^ byte] = (256 ^ byte ^ value_at) << 10 | 1 << 8 | byte
        units[value_at] = 1 << 31 | len(replacements)
        replacements += replacement.encode() + b"\0"
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + bytes(replacements)


def test_characters_are_replaced_and_others_kept() -> None:
    charsmap = CharsMap(table({"A": "a", "\t": " ", "#": "", "!": "日本"}))
    assert charsmap("A\té😀#x!\U0010ffff") == "a é😀x日本\U0010ffff"
    assert charsmap("") == ""


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.text(max_size=10))
def test_a_damaged_table_is_refused_or_harmless(blob: bytes, text: str) -> None:
    for data in (blob, struct.pack("<I", len(blob) // 8 * 4) + blob):
        try:
            charsmap = CharsMap(data)
        except ValueError:
            continue
        assert isinstance(charsmap(text), str)


def test_a_best_path_by_hand() -> None:
    """Ties with an unknown character, the bonus of a user-defined piece, and sums that float32 rounds."""
    assert Unigram({"a": 10.0, "ab": -1.0})("ab") == ["ab"]  # a and an unknown b: 10 - 11, as much as ab
    assert Unigram({"x": 0.08, "y": 0.04}, ["xy"])("xy") == ["x", "y"]  # xy counts 0.1 * (2 - 1)
    assert Unigram({"x": 0.06, "y": 0.03}, ["xy"])("xy") == ["xy"]
    assert Unigram({"a": 2.0**24, "b": 1.0, "ab": 2.0**24})("ab") == ["ab"]  # 2**24 + 1 is 2**24
