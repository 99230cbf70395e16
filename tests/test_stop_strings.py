"""Spec 5.3: the matcher against definitions, for every cut of a text into tokens."""

import gc
import weakref

import pytest
from finish_rows import finish_row, reply
from hypothesis import example, given, settings
from hypothesis import strategies as st
from piece_tokenizer import PieceTokenizer
from test_detokeniser import KINDS, byte_id, id_lists, stream
from test_detokeniser import tokenizer as library_tokenizer

from mlxcel.plugins.finish.stop_strings import ROOT, StopMatcher, StopStrings, StopStringTable

QUICK = settings(deadline=None, max_examples=300)

ALPHABET = "ab é😀"
SPECIAL = "<b>"


def texts(alphabet=ALPHABET, **sizes):
    return st.text(alphabet, **sizes)


def stop_sets():
    """Short strings over few letters: overlapping, nested, with beginnings in common; some reach into specials."""
    return st.lists(texts(ALPHABET + "<b>", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)


@st.composite
def tokens_of_a_text(draw):
    """(pieces, specials among them): bytes of a random text, cut anywhere, a special token between some."""
    data = draw(texts(max_size=24)).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12, unique=True)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]
    marks = draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    said = []
    whole = b""
    for piece, mark in zip(pieces, marks, strict=True):
        said.append(piece)
        whole += piece
        if mark and is_text(whole):
            said.append(SPECIAL)
    return said


def is_text(data):
    """Whether no character is unfinished at the end."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def ids_for(said):
    """The tokens as ids of a tokenizer made for them."""
    pieces = [piece for piece in said if isinstance(piece, bytes)]
    tokenizer = PieceTokenizer(pieces, [SPECIAL])
    places = iter(range(len(pieces)))
    return tokenizer, [tokenizer.special(SPECIAL) if piece == SPECIAL else next(places) for piece in said]


def characters(said):
    """(character, number of the token that finishes it from 1 on, whether it is shown) of all of them."""
    found, waiting = [], b""
    for number, piece in enumerate(said, 1):
        if piece == SPECIAL:
            found += [(char, number, False) for char in SPECIAL]
            continue
        waiting += piece
        if is_text(waiting):
            found += [(char, number, True) for char in waiting.decode()]
            waiting = b""
        else:  # whole characters and the beginning of one
            whole = next(end for end in range(len(waiting), -1, -1) if is_text(waiting[:end]))
            found += [(char, number, True) for char in waiting[:whole].decode()]
            waiting = waiting[whole:]
    return found


def first_match(chars, stops, min_tokens):
    """(start, end, string) by the words of F10 and F6, looking everywhere, or None."""
    text = "".join(char for char, _, _ in chars)
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended and chars[end - 1][1] > min_tokens:
            longest = max(ended, key=len)
            return end - len(longest), end, longest
    return None


def held_back(text, stops):
    """F12 in its own words."""
    return max(
        (size for size in range(len(text) + 1) for stop in stops if size < len(stop) and text.endswith(stop[:size])),
        default=0,
    )


def shown(chars):
    return "".join(char for char, _, visible in chars if visible)


@QUICK
@given(tokens_of_a_text(), stop_sets(), st.integers(0, 4), st.booleans())
@example([b"ab", b"c de", b"fg"], ["defg"], 0, False)
@example([b"a", SPECIAL, b"b"], ["a<b>b"], 0, False)
@example([b"ababab"], ["ab", "bab"], 2, True)
def test_every_cut_gives_what_the_definition_gives(said, stops, min_tokens, include):
    """F6, F8 to F12, F14: text, tokens, the winner's name; and after each token exactly what F12 lets go."""
    tokenizer, ids = ids_for(said)
    chars = characters(said)
    found = first_match(chars, stops, min_tokens)
    got = reply(tokenizer, ids, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    if found is None:
        assert (got.cause, got.tokens, got.text) == (None, len(ids), shown(chars))
    else:
        start, end, string = found
        assert (got.cause, got.detail) == ("stop_string", string)
        assert got.tokens == chars[end - 1][1]
        assert got.text == shown(chars[: end if include else start])
    streamed = ""
    for number, (delta, _) in enumerate(got.deltas[: got.tokens - (found is not None)], 1):
        streamed += delta
        known = [entry for entry in chars if entry[1] <= number]
        text = "".join(char for char, _, _ in known)
        assert streamed == shown(known[: len(known) - held_back(text, stops)])


@QUICK
@given(texts(max_size=20), stop_sets(), st.data())
def test_the_cut_into_tokens_does_not_matter(text, stops, data):
    """F10."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8, unique=True)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = reply(PieceTokenizer([text]), [0], stop=stops)
    for cut in (pieces, list(text)):
        got = reply(PieceTokenizer(cut or [""]), range(len(cut)), stop=stops)
        assert (got.text, got.cause, got.detail) == (whole.text, whole.cause, whole.detail)


@QUICK
@given(st.lists(texts("ab", min_size=1, max_size=6), min_size=1, max_size=5), texts("abc", max_size=30))
def test_what_is_held_is_the_longest_beginning(stops, text):
    """F12, character by character, past matches that do not count (F6)."""
    matcher = StopMatcher(StopStrings(stops))
    for end in range(1, len(text) + 1):
        assert matcher.push(text[end - 1], armed=False) is None
        assert matcher.held == held_back(text[:end], stops)


def test_work_a_character_is_constant():
    """F8: steps and steps back of the worst automaton stay within two a character."""

    class Counting(dict):
        lookups = 0

        def get(self, key, default=None):
            Counting.lookups += 1
            return super().get(key, default)

    strings = StopStrings(["a" * n + "b" for n in range(1, 65)] + ["a" * 1000 + "c"])
    strings._next = Counting(strings._next)
    text = "a" * 999 + "x" + "a" * 3000 + "y"
    state = ROOT
    for char in text:
        state = strings.step(state, char)
    assert Counting.lookups <= 2 * len(text) + 1


def test_the_largest_set_is_taken():
    """F8: 64 strings of 1024 bytes, and the one that is there is found."""
    stops = [f"{n:02d}" + "x" * 1022 for n in range(64)]
    matcher = StopMatcher(StopStrings(stops))
    assert matcher.push("xx" + stops[63][:-1]) is None
    match = matcher.push("xyz")
    assert match is not None
    assert (match.string, match.end) == (stops[63], 1)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["ab", "b"], "xab", ("ab", "x")),  # both end there: the one that starts first
        (["b", "ab"], "xab", ("ab", "x")),  # not the order of the list
        (["abcd", "bc"], "xabcd", ("bc", "xa")),  # the one that ends first, though another started before
        (["abc", "x"], "abx", ("x", "ab")),
        (["aab"], "aaab", ("aab", "a")),
        (["\n\n"], "a\n\n\nb", ("\n\n", "a")),
    ],
)
def test_the_match_that_ends_first_then_the_one_that_starts_first(stops, text, expected):
    """F10."""
    for pieces in ([text], list(text)):
        got = reply(PieceTokenizer(pieces), range(len(pieces)), stop=stops)
        assert (got.detail, got.text) == expected


def test_h_b1_stop_string_is_held_back():
    """Nothing of DEFG is ever seen, and nothing else waits."""
    tokenizer = PieceTokenizer(["AB", "C DE", "FG", "HI"])
    got = reply(tokenizer, [0, 1, 2, 3], stop=["DEFG"])
    assert got.deltas == (("AB", ""), ("C ", ""), ("", ""))
    assert (got.cause, got.detail, got.tokens, got.text) == ("stop_string", "DEFG", 3, "ABC ")
    assert reply(tokenizer, [0, 1, 3], stop=["DEFG"]).deltas == (("AB", ""), ("C ", ""), ("DEHI", ""), ("", ""))


def test_h_b6_the_string_that_hit_is_named_and_may_be_kept():
    tokenizer = PieceTokenizer(["one ", "two", " three"])
    got = reply(tokenizer, [0, 1, 2], stop=["four", "two"])
    assert (got.text, got.detail, got.tokens) == ("one ", "two", 2)
    kept = reply(tokenizer, [0, 1, 2], stop=["four", "two"], include_stop_str_in_output=True)
    assert (kept.text, kept.detail, kept.tokens) == ("one two", "two", 2)
    across = reply(tokenizer, [0, 1, 2], stop=["o th"])
    assert (across.text, across.detail, across.tokens) == ("one tw", "o th", 3)
    assert reply(tokenizer, [1, 2], stop=["o t"], include_stop_str_in_output=True).text == "two t"


@pytest.mark.parametrize("skip", [True, False])
def test_a_hidden_special_token_is_matched_and_not_shown(skip):
    """T7, F14: also when what was held goes out after all."""
    tokenizer = PieceTokenizer(["say ", "hi", "!"], ["<|im_end|>"])
    end = tokenizer.special("<|im_end|>")
    stopped = reply(tokenizer, [0, 1, end, 2], stop=["<|im_end|>"], skip_special_tokens=skip)
    assert (stopped.text, stopped.detail, stopped.tokens) == ("say hi", "<|im_end|>", 3)
    let_go = reply(tokenizer, [0, 1, end, 2], stop=["hi<|im_end|>?"], skip_special_tokens=skip)
    assert let_go.cause is None
    assert let_go.text == ("say hi!" if skip else "say hi<|im_end|>!")
    kept = reply(tokenizer, [1, end], stop=["i<|im_end|>"], include_stop_str_in_output=True, skip_special_tokens=skip)
    assert kept.text == ("hi" if skip else "hi<|im_end|>")


def test_an_unfinished_character_before_a_special_stop_is_shown():
    """F11, T5: it is text before the match."""
    tokenizer = PieceTokenizer([b"a", b"\xf0\x9f"], ["<end>"])
    got = reply(tokenizer, [0, 1, tokenizer.special("<end>")], stop=["<end>"])
    assert (got.text, got.cause) == ("a�", "stop_string")


def test_a_special_token_inside_a_character_leaves_it_whole():
    """T2: the text is that of the ids that are shown."""
    tokenizer = PieceTokenizer([b"\xf0\x9f", b"\x98\x80"], ["<end>"])
    ids = [0, tokenizer.special("<end>"), 1]
    assert reply(tokenizer, ids, stop=["nothing"]).text == tokenizer.decode(ids, skip_special=True) == "😀"


def test_a_limit_lets_go_what_was_held():
    """F13: no new match counts in the tail."""
    tokenizer = PieceTokenizer(["ab", b"\xf0\x9f"])
    step, state = finish_row(tokenizer, stop=["b�", "abc"])
    assert step.resolve(state, 0).released.text == ""
    assert step.resolve(state, 1).ending is None
    assert step.flush(state).text == "ab�"


def test_a_match_within_min_tokens_is_ordinary_text():
    """F6: it is the last character's token that counts."""
    tokenizer = PieceTokenizer(["st", "op", " stop"])
    assert reply(tokenizer, [0, 1, 2], stop=["stop"], min_tokens=1).text == ""
    assert reply(tokenizer, [0, 1, 2], stop=["stop"], min_tokens=2).text == "stop "
    assert reply(tokenizer, [0, 1, 2], stop=["stop"], min_tokens=3).cause is None


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_kind_of_tokenizer(kind, data):
    """F9 to F11 over decoders that wait, put spaces in or rewrite: the text of the ids, up to the first match."""
    tok = library_tokenizer(kind)
    ids = [index for index in data.draw(id_lists(tok)) if not tok.is_special(index)]
    text = tok.decode(ids, skip_special=False)
    shown_before_the_end = "".join(stream(tok, ids)[:-1])
    near = st.integers(0, max(0, len(text) - 1)).flatmap(lambda at: st.just(text[at : at + 3]))
    stops = [stop for stop in data.draw(st.lists(near, min_size=1, max_size=3, unique=True)) if stop] or ["never"]
    assert text.startswith(shown_before_the_end)
    found = first_match([(char, 1, True) for char in shown_before_the_end], stops, 0)
    got = reply(tok, ids, stop=stops)
    if found is None:
        assert (got.cause, got.text) == (None, text)
    else:
        assert (got.detail, got.text) == (found[2], text[: found[0]])


@pytest.mark.parametrize("kind", ["byte-fallback", "llama-2", "metaspace, byte fallback", "two spaces"])
@pytest.mark.parametrize("before", ["", "\n", "😀\n"])
def test_a_special_stop_behind_byte_tokens(kind, before):
    """T7, F11: whole characters that wait for the end of their run stand before the special token, and are shown."""
    tok = library_tokenizer(kind)
    (special,) = [index for index in range(tok.size) if tok.is_special(index)]
    ids = [tok.encode("x", add_special=False)[-1], *(byte_id(tok, byte) for byte in "😀\n".encode()), special]
    got = reply(tok, ids, stop=[before + tok.token_text(special)])
    text = tok.decode(ids, skip_special=True).removesuffix(before)
    assert (got.text, got.cause, got.tokens) == (text, "stop_string", len(ids))


def test_the_choices_of_a_request_share_an_automaton_and_not_their_place_in_it():
    """Many long stop strings are read once for all choices; no row knows how far another one has come."""
    table, strings = StopStringTable(), ("abc" * 300, "bcd")
    shared = table.of(strings)
    assert table.of(("abc" * 300, "bcd")) is shared
    assert table.of(("bcd", "abc" * 300)) is not shared
    first, second = StopMatcher(shared), StopMatcher(shared)
    assert first.push("abcab") is None
    assert (first.held, second.held) == (5, 0)
    assert second.push("d") is None
    assert first.push("cd").string == "bcd"


def test_an_automaton_that_no_row_uses_is_not_kept():
    table = StopStringTable()
    shared = weakref.ref(table.of(("abc",)))
    gc.collect()
    assert shared() is None
