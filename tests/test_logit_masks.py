"""Masks that come with the chain: docs/spec/engine.md S14 to S17, in the stage and through the engine."""

import numpy as np
import pytest
from engine_rows import TOKENIZER, run_to_end, scripted
from engine_rows import opened as open_row
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_reference import removed
from logit_rows import LIBRARIES, opened, params, run, stages

from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.bits import allowed_words, unpacked, words_of_ids
from mlxcel.testing.byte_tokenizer import EOS, TURN_END, ByteTokenizer

A, B, C = b"abc"
VOCAB = 300
BYTES = ByteTokenizer()


def masked(library, row, output=(), ends=(), vocab=VOCAB, newest=None):
    """Ids that the stage removes."""
    chain = stages(vocab, BYTES)
    state = opened(chain, params(**row), output=output, eos_ids=ends)
    z = np.zeros((1, vocab), np.float32)
    found = run(LIBRARIES[library], chain, z, [state], newest=None if newest is None else [newest])[0]
    assert set(found.tolist()) <= {0.0, -np.inf}
    return set(np.flatnonzero(np.isneginf(found)).tolist())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 64, 317, 49152])
def test_bits_are_the_set(library, vocab):
    xp = LIBRARIES[library]
    allowed = np.random.default_rng(vocab).random((3, vocab)) < 0.5
    words = np.stack([allowed_words(row) for row in allowed])
    assert words.dtype == np.uint32
    assert words.shape == (3, (vocab + 31) // 32)
    assert np.array_equal(np.asarray(unpacked(xp, xp.asarray(words), vocab)), allowed)
    some = np.flatnonzero(allowed[0]).tolist()
    assert np.array_equal(words_of_ids([*some, vocab, -1], vocab), words[0])
    assert np.array_equal(words_of_ids(some, vocab, without=True), allowed_words(~allowed[0]))


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_field_removes_what_it_says(library):
    """Spec S15, S16: E without U for ignore_eos; E and U before min_tokens are there."""
    ends = {EOS, TURN_END}
    assert masked(library, {"allowed_token_ids": [3, 5]}) == set(range(VOCAB)) - {3, 5}
    assert masked(library, {"logit_bias": [[7, False], [8, 0.0]], "allowed_token_ids": [7, 8]}) == (
        set(range(VOCAB)) - {8}
    )
    assert masked(library, {"ignore_eos": True, "stop_token_ids": [EOS, 9]}, ends=ends) == {TURN_END}
    early = {"min_tokens": 2, "stop_token_ids": [9]}
    assert masked(library, early, ends=ends) == masked(library, early, output=[1], ends=ends) == {EOS, TURN_END, 9}
    assert masked(library, early, output=[1, 1], ends=ends) == set()
    assert masked(library, early, output=[1], ends=ends, newest=1) == set()  # the one in flight counts
    assert masked(library, early, ends=ends, newest=1) == {EOS, TURN_END, 9}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("words", "output", "gone"),
    [
        (["a"], b"", {A}),
        (["a", "a"], b"xyz", {A}),
        (["ab"], b"", set()),
        (["ab"], b"a", {B}),
        (["ab"], b" a", {B}),
        (["ab"], b"ax", set()),
        (["abc", "bc"], b"ab", {C}),
        (["abc"], b"b", set()),
        (["aab"], b"aaa", {B}),
        ([" a"], b" ", {A}),
        ([" a"], b"  ", {A}),
        (["€"], "€".encode()[:2], {0xAC}),
    ],
)
def test_bad_words_end_nowhere(library, words, output, gone):
    """Spec S17: encode(w) and encode(" " + w); the last id goes where the output ends with the others."""
    expected = gone | ({A} if words == ["a"] else set())
    assert masked(library, {"bad_words": words}, output=output) == expected


def test_bad_words_look_at_the_output_alone():
    """Spec S17: `output`, not the prompt."""
    chain = stages(VOCAB, BYTES)
    state = opened(chain, params(bad_words=["ab"]), prompt=b"a")
    assert np.isfinite(run(np, chain, np.zeros((1, VOCAB), np.float32), [state])).all()


def test_only_bad_words_of_one_id_allow_a_draw_in_flight():
    """Spec C51."""
    chain = stages(VOCAB, BYTES)
    masks = chain[-1]

    def closed(**row):
        return masks.closed(opened(chain, params(**row), eos_ids={EOS}).prepared["masks"])

    assert closed(min_tokens=4, ignore_eos=True, allowed_token_ids=[1], logit_bias=[[3, False]])
    assert not closed(bad_words=["a"])  # " a" has two ids here
    single = stages(VOCAB, _NoSpaces())
    assert single[-1].closed(opened(single, params(bad_words=["a"])).prepared["masks"])
    assert not single[-1].closed(opened(single, params(bad_words=["a", "bc"])).prepared["masks"])


class _NoSpaces(ByteTokenizer):
    def encode(self, text, *, add_special, parse_special=True):
        return super().encode(text.lstrip(" "), add_special=add_special, parse_special=parse_special)


def test_bad_words_need_a_tokenizer():
    with pytest.raises(RequestError, match="bad_words cannot be found without a tokenizer"):
        opened(stages(VOCAB), params(bad_words=["a"]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_masks_together_are_the_intersection(data):
    """Spec S15: everything at once against the slow reference."""
    ids = st.integers(0, 6)
    words = data.draw(st.lists(st.text("\0\1\2\3", min_size=1, max_size=3), max_size=3))
    row = params(
        allowed_token_ids=data.draw(st.none() | st.lists(ids, min_size=1)),
        logit_bias=data.draw(st.lists(st.tuples(ids, st.just(False)), max_size=2)),
        stop_token_ids=data.draw(st.lists(ids, max_size=2)),
        ignore_eos=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 3)),
        bad_words=words,
    )
    output, ends = data.draw(st.lists(st.integers(0, 3), max_size=6)), data.draw(st.frozensets(ids, max_size=3))
    chain = stages(VOCAB, BYTES)
    found = run(np, chain, np.zeros((1, VOCAB), np.float32), [opened(chain, row, output=output, eos_ids=ends)])[0]
    sequences = [[*text.encode()] for word in words for text in (word, f" {word}")]
    expected = removed(row, VOCAB, output, ends, sequences)
    assert set(np.flatnonzero(np.isneginf(found)).tolist()) == expected


# --- through the engine ----------------------------------------------------------------------------------------------


def test_h_c3_ignore_eos_goes_on_to_max_tokens():
    """An end at step 3 of the script, max_tokens 10: ten tokens; a stop of the user's own still ends the row."""
    script = [*b"ab", EOS, *b"cdefghijkl"]
    it = scripted({"r": script})
    output, _, outcome = run_to_end(it.engine, *open_row(it.engine, "r", ignore_eos=True, max_tokens=10))
    assert (len(output), outcome.cause) == (10, "max_tokens")
    assert EOS not in output
    _, _, outcome = run_to_end(it.engine, *open_row(it.engine, "r", ignore_eos=True, stop_token_ids=[EOS]))
    assert (outcome.cause, outcome.detail) == ("stop_token", EOS)


def test_h_c7_ignore_eos_covers_every_end():
    """Three ends, each with the highest logit in turn: all of them are masked."""
    three = {EOS, TURN_END, 65}
    chain = stages(TOKENIZER.size, TOKENIZER)
    state = opened(chain, params(ignore_eos=True), eos_ids=three)
    z = np.zeros((1, TOKENIZER.size), np.float32)
    for token in three:
        z[0, token] = 1000
    found = run(np, chain, z, [state])[0]
    assert set(np.flatnonzero(np.isneginf(found)).tolist()) == three


def test_min_tokens_holds_an_end_back():
    """Spec S16, F6: an end that the script wants at once comes where min_tokens lets it."""
    it = scripted({"r": [EOS] * 9})
    output, _, outcome = run_to_end(it.engine, *open_row(it.engine, "r", min_tokens=4))
    assert (len(output), outcome.cause) == (4, "eos")


def test_masks_that_leave_nothing_fail_their_row_alone():
    """Spec S45: status 2 for the row, and its neighbour goes on."""
    it = scripted({"r": [A] * 9, "s": [B] * 3})
    lost, plan = open_row(it.engine, "r", allowed_token_ids=[EOS], min_tokens=4)
    outcome = it.engine.prefill(lost, plan)
    assert type(outcome.error).__name__ == "NoTokenAllowed"
    assert "every token is masked" in outcome.error.message
    kept, plan = open_row(it.engine, "s", max_tokens=3)
    assert run_to_end(it.engine, kept, plan)[0] == (B, B, B)
