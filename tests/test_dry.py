"""DRY: docs/spec/engine.md 4.5 against a search that tries every place and length, breakers against a slow scan."""

import gc
import math
import random
import sys
import weakref

import numpy as np
import pytest
from engine_rows import opened as open_row
from engine_rows import run_to_end, scripted
from logit_reference import dry, dry_matches
from logit_rows import LIBRARIES, assert_same_bits, opened, params, run, stages

from mlxcel.errors import RequestError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.sampling.dry import longest_matches
from mlxcel.plugins.sampling.dry_breakers import KEPT_STRINGS, LONGEST_TAIL, Breakers, BreakerTable
from mlxcel.plugins.tokenizers import gguf_tokenizer
from mlxcel.testing.byte_tokenizer import ByteTokenizer

DEFAULTS = ("\n", ":", '"', "*")


def breakers_of(heads, vocab):
    """A table written by hand: id -> tails."""
    is_head, whole = np.zeros(vocab, bool), np.zeros(vocab, bool)
    is_head[list(heads)] = True
    whole[[head for head, tails in heads.items() if [] in tails]] = True
    longest_first = {
        head: sorted(map(tuple, filter(None, tails)), key=len, reverse=True) for head, tails in heads.items()
    }
    return Breakers(is_head, whole, {head: tuple(tails) for head, tails in longest_first.items()})


def matches(history, window, allowed, heads, vocab=16):
    """As `dry_matches`, by the stage's own parts."""
    newest = np.array(history, np.int32)[-window or len(history) :] if window > 0 else np.array(history, np.int32)
    if window == 0 or len(newest) <= allowed:
        return {}
    limit = breakers_of(heads, vocab).limit(newest[::-1], newest)
    return longest_matches(newest, limit, allowed)


# --- worked examples -------------------------------------------------------------------------------------------------

WORKED = [
    ([7, 1, 2, 3, 9, 4, 1, 2, 3], {}, {9: 3}, {9: 1.4}),
    ([7, 1, 2, 3, 9, 4, 1, 2, 3], {2: [[]]}, {}, {}),
    ([1, 2, 1, 2, 1, 2], {}, {1: 4}, {1: 2.45}),
    ([1, 2, 3, 9, 1, 2], {1: [[2]]}, {}, {}),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("history", "heads", "lengths", "losses"), WORKED)
def test_worked_examples(library, history, heads, lengths, losses):
    """Spec 4.5: allowed 2, multiplier 0.8, base 1.75, window -1."""
    row = params(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=2, dry_penalty_last_n=-1)
    assert matches(history, -1, 2, heads) == dry_matches(history, -1, 2, heads) == lengths
    assert dry(row, history, heads) == {token: np.float32(lost) for token, lost in losses.items()}
    text = {token: bytes([64 + token]) for token in range(16)}
    written = ["".join(chr(64 + token) for token in (head, *tail)) for head, found in heads.items() for tail in found]
    chain = stages(16, Named(text))
    z = np.ones((1, 16), np.float32)
    found = run(LIBRARIES[library], chain, z, [opened(chain, row.clone(dry_sequence_breakers=written), history)])
    expected = np.ones(16, np.float32)
    for token, lost in losses.items():
        expected[token] = np.float32(1) - np.float32(lost)
    assert_same_bits(found[0], expected)


class Named:
    """A tokenizer whose ids have the bytes given; a text is cut from the left into the longest of them."""

    def __init__(self, words, special=()):
        self.words, self.special, self.size = words, special, len(words)
        self.asked = 0

    def token_bytes(self, token_id, *, first=False):
        self.asked += 1
        return self.words[token_id]

    def is_special(self, token_id):
        return token_id in self.special

    def encode(self, text, *, add_special, parse_special=True):
        assert not add_special
        assert not parse_special
        rest, ids = text.encode(), []
        while rest:
            word = max((w for w in self.words.values() if w and rest.startswith(w)), key=len)
            ids.append(next(token for token, w in self.words.items() if w == word))
            rest = rest[len(word) :]
        return ids


# --- repetitions -----------------------------------------------------------------------------------------------------


def compare(count, seed, longest):
    rng = random.Random(seed)
    hits = 0
    for _ in range(count):
        ids = range(rng.choice([1, 2, 3, 8]))
        history = [rng.choice(ids) for _ in range(rng.randint(1, longest))]
        if rng.random() < 0.5:
            history += history[-rng.randint(1, 12) :] * rng.randint(1, 4)
        heads = {}
        for _ in range(rng.choice([0, 0, 1, 2])):
            tail = [rng.choice(ids) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
            heads.setdefault(rng.choice(ids), []).append(tail)
        window, allowed = rng.choice([-1, 0, 1, 2, 5, 64]), rng.choice([1, 2, 3, 7])
        expected = dry_matches(history, window, allowed, heads)
        assert matches(history, window, allowed, heads) == expected, (history, window, allowed, heads)
        hits += bool(expected)
    assert hits > count / 10


def test_linear_search_equals_brute_force():
    """Spec 4.5: random histories of few ids, with heads and tails."""
    compare(500, seed=1, longest=40)


@pytest.mark.slow
def test_linear_search_equals_brute_force_20000_times():
    compare(20_000, seed=2, longest=80)


def fibonacci(length):
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


@pytest.mark.parametrize("limit", [None, 1, 7])
@pytest.mark.parametrize(
    "history",
    [[3] * 4000, [1, 2] * 2000, fibonacci(4000), [*range(2000)] * 2, ([1] * 31 + [2]) * 125],
    ids=["one", "two", "fibonacci", "halves", "runs"],
)
def test_s18_the_search_is_linear(history, limit):
    """Counted, not timed: lines of Python that ran, on histories where comparing place by place is quadratic."""
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if frame.f_code is not longest_matches.__code__:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        found = longest_matches(np.array(history, np.int32), limit or len(history), 1)
    finally:
        sys.settrace(before)
    assert found
    assert lines < 10 * len(history)


@pytest.mark.parametrize("base", [1.0, 1.000001, 1.0000011, 1.75, 50.0, 1e9])
@pytest.mark.parametrize("multiplier", [1e-9, 0.8, 1e9])
def test_losses_are_finite_and_bounded_as_written(base, multiplier):
    """Spec 4.5, step 5: the exponent is cut where float32 ends; a history of one id that is repeated 400 times."""
    row = params(
        dry_multiplier=multiplier, dry_base=base, dry_allowed_length=1, dry_penalty_last_n=-1, dry_sequence_breakers=[]
    )
    history = [3] * 400
    chain = stages(7)
    found = run(np, chain, np.zeros((1, 7), np.float32), [opened(chain, row, history)])[0]
    exponent = 398 if base <= 1.000001 else min(398, math.floor(88.72283 / math.log(base)))
    assert found[3] == -np.float32(min(multiplier * base**exponent, float(np.finfo(np.float32).max)))
    assert np.isfinite(found).all()


def test_off_when_nothing_can_repeat():
    """Spec 4.5, step 1: no multiplier, no window, a stage left out, or a history not longer than allowed."""
    chain = stages(7)
    for off in ({"dry_multiplier": 0}, {"dry_penalty_last_n": 0}, {"samplers": ["penalties"]}):
        row = params(**{"dry_multiplier": 1.0, "dry_sequence_breakers": [], **off})
        assert "dry" not in opened(chain, row).prepared
    row = params(dry_multiplier=1.0, dry_sequence_breakers=[], dry_allowed_length=2, dry_penalty_last_n=-1)
    z = np.ones((1, 7), np.float32)
    assert (run(np, chain, z, [opened(chain, row, [1, 1])]) == z).all()
    assert (run(np, chain, z, [opened(chain, row, [1, 1, 1])]) != z).any()


def test_dry_is_not_closed():
    """Spec C51: no draw may be in flight."""
    chain = stages(7)
    state = opened(chain, params(dry_multiplier=1.0, dry_sequence_breakers=[]))
    assert not next(stage for stage in chain if stage.name == "dry").closed(state.prepared["dry"])


# --- breakers --------------------------------------------------------------------------------------------------------

WORDS = {
    0: b"<eos>", 1: b"a", 2: b"b", 3: b"ab", 4: b"c", 5: b"bc", 6: b"xab", 7: b"aba", 8: b"", 9: b"\xe2", 10: b"\x82",
    11: b"\xac", 12: b"\xe2\x82", 13: b"z\xe2\x82", 14: b"x", 15: b"z", 16: b"\x82\xac",
}  # fmt: skip


def by_slow_scan(tokenizer, string, vocab):
    """Spec 4.5, step 2, and its note: every token, every suffix; tails where the rest is text."""
    b, heads = string.encode(), {}
    for token in range(min(tokenizer.size, vocab)):
        w = tokenizer.token_bytes(token)
        if tokenizer.is_special(token):
            continue
        if b in w:
            heads[token] = {()}
            continue
        for length in range(1, min(len(w), len(b) - 1) + 1):
            if w.endswith(b[:length]):
                tail = tokenizer.encode(b[length:].decode(), add_special=False, parse_special=False)
                heads.setdefault(token, set()).add(tuple(tail[:LONGEST_TAIL]))
    return heads


def as_sets(table, strings):
    """id -> tails, the empty one included."""
    found = table.breakers(strings)
    return {
        token: {*found.tails.get(token, ()), *([()] if found.whole[token] else [])}
        for token in np.flatnonzero(found.is_head).tolist()
    }


@pytest.mark.parametrize("string", ["a", "ab", "abc", "bca", "aab", "zab", "x", "<eos>", "q", "cab" * 13])
def test_heads_and_tails_of_a_string(string):
    tokenizer = Named(WORDS, special={0})
    found = as_sets(BreakerTable(tokenizer, 99), [string])
    assert found == (by_slow_scan(tokenizer, string, 99) if set(string) <= set("abcxz") else {})


def test_a_token_that_is_the_beginning_of_a_string_breaks_with_its_tail():
    """A string is found however it is cut into tokens, also where each of them is a part of it (ADR 0010)."""
    table = BreakerTable(Named(WORDS, special={0}), 17)
    found = as_sets(table, ["ab"])
    assert found == {1: {(2,)}, 3: {()}, 6: {()}, 7: {()}}
    letters = BreakerTable(ByteTokenizer(), 259)
    history = np.array([*b"say User: hi there, User"], np.int32)
    assert letters.breakers(["User:"]).limit(history[::-1], history) == len(" hi there, User")


def test_strings_cut_inside_a_character():
    """The rest of a character is single tokens, or what the whole string's ids have behind that border."""
    table = BreakerTable(Named(WORDS, special={0}), 17)
    assert as_sets(table, ["€"]) == {9: {(10, 11)}, 12: {(11,)}, 13: {(11,)}}
    assert as_sets(table, ["z€"]) == {13: {(11,)}, 15: {(12, 11)}}
    unspelt = BreakerTable(Named({**WORDS, 10: b"q"}, special={0}), 17)
    assert as_sets(unspelt, ["€"]) == {12: {(11,)}, 13: {(11,)}}


class _SpaceInFront(Named):
    """As SentencePiece: a space before every text, which no token in the middle of one has."""

    def encode(self, text, *, add_special, parse_special=True):
        return super().encode(f" {text}", add_special=add_special, parse_special=parse_special)


def test_a_tail_stands_inside_a_text():
    """A tokenizer that puts a space before a text does not put one before the rest of a breaker."""
    words = dict(enumerate([b"a", b"b", b" ", b" b", b"\n", b" \n"]))
    assert as_sets(BreakerTable(_SpaceInFront(words), 6), ["ab"]) == {0: {(1,)}}


def test_the_longest_matching_tail_sets_the_limit():
    """Spec 4.5, step 3."""
    history = np.array([1, 2, 3, 4, 5], np.int32)
    for tails, limit in (([[]], 4), ([[2]], 3), ([[2], [2, 3]], 2), ([[], [2, 3, 4, 5]], 0), ([[3]], 5), ([[2, 9]], 5)):
        assert breakers_of({1: tails}, 8).limit(history[::-1], history) == limit
    assert breakers_of({5: [[]], 1: [[]]}, 8).limit(history[::-1], history) == 0
    assert breakers_of({5: [[6]], 1: [[]]}, 8).limit(history[::-1], history) == 4


def test_a_table_tries_the_longest_tail_of_a_head_first():
    """Step 3. After "abc" the string "abc" leaves one id behind its tail, "ab" would leave two."""
    table = BreakerTable(ByteTokenizer(), ByteTokenizer().size)
    history = np.frombuffer(b"xxabcx", np.uint8).astype(np.int32)
    for strings in (["ab", "abc"], ["abc", "ab"]):
        assert table.breakers(strings).limit(history[::-1], history) == 1
    assert table.breakers(["ab"]).limit(history[::-1], history) == 2


def test_a_vocabulary_is_read_once_and_strings_are_kept_to_a_bound():
    tokenizer = Named(WORDS, special={0})
    table = BreakerTable(tokenizer, 17)
    assert tokenizer.asked == 0
    first = table.heads("ab")
    read = tokenizer.asked
    assert table.heads("ab") is first
    assert tokenizer.asked == read
    for place in range(KEPT_STRINGS):
        table.heads(f"a{'abcxz'[place % 5]}{'abcxz'[place // 5 % 5]}{'abcxz'[place // 25 % 5]}{'ab'[place // 125]}")
    assert table.heads("ab") is not first
    assert tokenizer.asked - read < 10 * KEPT_STRINGS * len(WORDS)


def test_breakers_without_a_tokenizer_are_refused():
    with pytest.raises(RequestError, match="dry_sequence_breakers cannot be found without a tokenizer") as caught:
        opened(stages(7), params(dry_multiplier=1.0))
    assert caught.value.field == "dry_sequence_breakers"


@pytest.mark.network
def test_default_breakers_on_the_default_models_tokenizer(smollm2_path):
    """The four defaults against a scan of all 49152 tokens: heads without tails, and no control token among them."""
    tokenizer = gguf_tokenizer.load(GgufCheckpoint(smollm2_path))
    table = BreakerTable(tokenizer, tokenizer.size)
    words = [b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in range(tokenizer.size)]
    for string in DEFAULTS:
        heads = table.heads(string)
        assert heads.whole.tolist() == [token for token, word in enumerate(words) if string.encode() in word]
        assert len(heads.whole) > 10
        assert heads.tailed == ()
    found = table.breakers(["User:", "\n\n", "€"])
    for text in ("x User: y", "ab\n\ncd", "5€ and"):
        history = np.array(tokenizer.encode(text, add_special=False), np.int32)
        assert found.limit(history[::-1], history) < len(history), text


# --- in a reply ------------------------------------------------------------------------------------------------------

REPEATED = b"the cat sat:the cat"


@pytest.mark.parametrize("row", [{"temperature": 0}, {"temperature": 1e-4, "seed": 3}], ids=["greedy", "sampled"])
def test_h_e11_a_breaker_between_two_repeats_stops_dry(row):
    """S19, S20: the script would go on with what came before. DRY forbids it, unless a breaker stands between."""
    script = [*b" sat"]

    def reply(breakers):
        it = scripted({"r": script})
        asked = {"dry_multiplier": 1000.0, "dry_allowed_length": 4, "dry_sequence_breakers": breakers, "max_tokens": 4}
        return run_to_end(it.engine, *open_row(it.engine, "r", REPEATED, **asked, **row))[1]

    assert reply([]) != " sat"
    assert reply(["q"]) != " sat"
    assert reply(["cat"]) == " sat"
    assert reply(["t"]) == " sat"


def test_the_choices_of_a_request_share_their_breakers_and_nobody_else_keeps_them():
    table = BreakerTable(ByteTokenizer(), 259)
    shared = table.breakers(["ab", ":"])
    assert table.breakers(("ab", ":")) is shared
    assert table.breakers(("ab",)) is not shared
    watched = weakref.ref(shared)
    del shared
    gc.collect()
    assert watched() is None
