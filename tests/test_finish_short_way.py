"""Rows that nothing is looked for in pass the finish step by a short way: it ends where the long one does (5.1)."""

import random

import pytest
from finish_rows import finish_row

from mlxcel.testing.byte_tokenizer import BOS, EOS, TURN_END, ByteTokenizer

ROWS = (
    {},
    {"min_tokens": 3},
    {"ignore_eos": True},
    {"stop_token_ids": [97, 200]},
    {"skip_special_tokens": False},
    {"max_tokens": 5},
    {"ignore_eos": True, "max_tokens": 40, "min_tokens": 40},
)


class Never:
    """A finish step that ends nothing: with one in it, a row takes the long way."""

    def open(self, spec):
        return None

    def check(self, state, output, text):
        return None


def resolved(script, given, *, max_new, context, steps):
    finish, state = finish_row(ByteTokenizer(), eos_ids=frozenset({EOS, TURN_END}), steps=steps, **given)
    state.max_new, state.context = max_new, context
    state.budget_asked = "max_tokens" in given
    assert state.plain == (not steps)
    found = []
    for token in script:
        found.append(finish.resolve(state, token))
        if found[-1].ending is not None:
            return found, state.output, None
    return found, state.output, finish.flush(state)


@pytest.mark.parametrize("given", ROWS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_the_short_way_is_the_long_way(given, seed):
    """Token by token the same resolutions, with split characters, special tokens and all bounds of a length."""
    rng = random.Random(seed)
    text = "".join(rng.choice("aé€😀 \n") for _ in range(20)).encode()
    script = [rng.choice([BOS, 300, 255, 0x80]) if rng.random() < 0.15 else byte for byte in text]
    if rng.random() < 0.5:
        script.insert(rng.randrange(len(script)), rng.choice([EOS, TURN_END]))
    max_new = given.get("max_tokens", 10**6)
    context = rng.choice([10**6, rng.randint(2, 12)])
    short, long = (
        resolved(script, given, max_new=max_new, context=context, steps=steps) for steps in ({}, {"never": Never()})
    )
    assert short == long
    assert len(short[0]) > 0


class Breaks:
    """A detokeniser that fails at one token, and has text left."""

    def __init__(self, at):
        self._left = at

    def push(self, token_id):
        self._left -= 1
        if not self._left:
            raise RuntimeError("no text")
        return chr(token_id)

    def hidden(self, token_id):
        return ""

    def settle(self):
        return ""

    def flush(self):
        return "tail"


@pytest.mark.parametrize("steps", [{}, {"never": Never()}], ids=["short", "long"])
def test_a_token_that_fails_does_not_count(steps):
    """Spec F13: what was shown stands, the failed token and what the broken stream still holds do not."""
    finish, state = finish_row(ByteTokenizer(), steps=steps)
    state.text.stream = Breaks(3)
    assert [finish.resolve(state, token).released.text for token in b"ab"] == ["a", "b"]
    with pytest.raises(RuntimeError):
        finish.resolve(state, 99)
    assert state.output == list(b"ab")
    assert finish.flush(state).text == ""
