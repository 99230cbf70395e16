"""Bias, repetition, DRY, frequency and presence, masks, in their order, against docs/spec/engine.md 4.3 to 4.5."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_reference import last, processed
from logit_rows import LIBRARIES, assert_same_bits, opened, params, run, stages

from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.history import History
from mlxcel.plugins.sampling.pairs import closed_width

SIZES = [1, 2, 7, 317, 49152]

LOGITS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e4, -1e4, -np.inf, 3e38, -3e38, 1e-40]), st.floats(-20, 20, width=32)
)

VALUES = {
    "repetition_penalty": st.sampled_from([1.0, 1.1, 0.5, 10.0, 2.0**-126]),
    "repeat_last_n": st.sampled_from([-1, 0, 1, 2, 3, 64]),
    "frequency_penalty": st.sampled_from([0.0, 0.3, 2.0, -2.0]),
    "presence_penalty": st.sampled_from([0.0, 0.7, -2.0]),
    "window_frequency_penalty": st.sampled_from([0.0, 0.1, -1.5]),
    "window_presence_penalty": st.sampled_from([0.0, 1.9, -0.3]),
    "dry_multiplier": st.sampled_from([0.0, 0.8, 1e9]),
    "dry_base": st.sampled_from([1.0, 1.000001, 1.75, 1e9]),
    "dry_allowed_length": st.sampled_from([1, 2, 3]),
    "dry_penalty_last_n": st.sampled_from([-1, 0, 1, 5, 64]),
    "ignore_eos": st.booleans(),
    "min_tokens": st.sampled_from([0, 1, 3]),
    "samplers": st.sampled_from([None, ("penalties",), ("dry",), ("penalties", "dry"), ()]),
}
CLOSED = [name for name in VALUES if not name.startswith("dry")]


def token_ids(vocab):
    """Ids that repeat themselves."""
    return st.integers(0, min(vocab, 4) - 1) if vocab > 4 else st.integers(0, vocab - 1)


@st.composite
def rows(draw, vocab, fields=tuple(VALUES)):
    """(parameters, prompt, output, end ids) of a row."""
    given_fields = draw(st.sets(st.sampled_from(fields), max_size=5))
    chosen = {name: draw(VALUES[name]) for name in sorted(given_fields)}
    ids = st.integers(0, vocab - 1)
    if draw(st.booleans()):
        amounts = st.one_of(st.just(False), st.sampled_from([100.0, -100.0, 0.1, 0.0]))
        chosen["logit_bias"] = draw(st.lists(st.tuples(ids, amounts), max_size=3))
    if draw(st.booleans()):
        chosen["allowed_token_ids"] = draw(st.lists(ids, min_size=1, max_size=5))
    chosen["stop_token_ids"] = draw(st.lists(ids, max_size=2))
    prompt = draw(st.lists(token_ids(vocab), min_size=1, max_size=12))
    output = draw(st.lists(token_ids(vocab), max_size=12))
    chosen["dry_sequence_breakers"] = []
    return params(**chosen), prompt, output, draw(st.frozensets(ids, max_size=3))


def logits_of(draw, count, vocab):
    """float32 [R, V]: a few drawn values, the rest of a fixed pattern."""
    z = np.resize(np.linspace(-7, 7, 1031, dtype=np.float32), (count, vocab)).copy()
    some = draw(st.lists(LOGITS, min_size=1, max_size=8))
    z[:, : min(vocab, 8)] = np.resize(np.array(some, np.float32), (count, min(vocab, 8)))
    return z


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_stages_are_their_formulas(library, vocab):
    """Spec 4.1 (1 to 6), 4.4, S11 to S16, S3: every row of a mixed step, to the bit; a row beside others is what it is
    alone; a stage that nobody uses changes nothing."""
    xp, chain = LIBRARIES[library], stages(vocab)

    @settings(max_examples=8 if vocab > 1000 or library == "jax" else 60, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        drawn = [data.draw(rows(vocab)) for _ in range(3)]
        z = logits_of(data.draw, 3, vocab)
        states = [opened(chain, row, prompt, output, ends) for row, prompt, output, ends in drawn]
        found = run(xp, chain, z, states, every=True)
        expected = [processed(z[i], *row[:3], eos_ids=row[3]) for i, row in enumerate(drawn)]
        assert_same_bits(found, np.stack(expected), "formula")
        if library == "numpy":
            for place, state in enumerate(states):
                alone = run(xp, chain, z[place : place + 1], [state])
                assert_same_bits(alone, found[place : place + 1], "alone")

    check()


@pytest.mark.parametrize("vocab", [1, 7, 317])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_draw_in_flight_changes_no_bit(library, vocab):
    """Spec C51, E12: the newest id known to the device alone gives what it gives once the host knows it."""
    xp, chain = LIBRARIES[library], stages(vocab)

    @settings(max_examples=12 if library == "jax" else 80, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        drawn = [data.draw(rows(vocab, CLOSED)) for _ in range(3)]
        newest = [data.draw(st.none() | token_ids(vocab)) for _ in drawn]
        z = logits_of(data.draw, 3, vocab)
        known = [
            opened(chain, row, prompt, [*output, *([] if token is None else [token])], ends)
            for (row, prompt, output, ends), token in zip(drawn, newest, strict=True)
        ]
        ahead = [opened(chain, row, prompt, output, ends) for row, prompt, output, ends in drawn]
        for state in ahead:
            assert all(stage.closed(state.prepared[stage.name]) for stage in chain if stage.name in state.prepared)
        found = run(xp, chain, z, ahead, newest=newest, every=True)
        assert_same_bits(found, run(xp, chain, z, known, every=True), "ahead")

    check()


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=60), st.integers(0, 30))
def test_counts_kept_token_by_token_equal_a_recount(prompt, output, asked_after):
    """Spec S11, S12, S13."""
    history = History(np.array(prompt, np.int32))
    windows = (-1, 0, 1, 2, 7, 64)
    for place, token in enumerate([*output, 0]):
        if place >= asked_after:
            for window in windows:
                counted, ids = history.window_counts(window), last([*prompt, *output[:place]], window)
                assert dict(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True)) == recount(ids)
                assert history.last(window).tolist() == ids
                assert history.leaving(window) == (ids[0] if len(ids) == window > 0 else None)
            counted = history.output_counts()
            assert dict(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True)) == recount(output[:place])
        history.append(token)


def recount(ids):
    return {token: ids.count(token) for token in set(ids)}


def one(library, row, z, prompt=(0,), output=(), ends=()):
    """A lone row of `row`'s parameters: float32 [V]."""
    chain = stages(len(z))
    state = opened(chain, params(**row), prompt, output, ends)
    return run(LIBRARIES[library], chain, np.array([z], np.float32), [state])[0].tolist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_h_e1_presence_counts_output_and_repetition_counts_the_prompt(library):
    """Spec S12, S13: a prompt full of token 5, nothing generated."""
    z, prompt = [1.0] * 8, [5] * 9
    assert one(library, {"presence_penalty": 2}, z, prompt) == z
    assert one(library, {"frequency_penalty": 2}, z, prompt) == z
    moved = lambda value: [*z[:5], value, *z[6:]]  # noqa: E731
    assert one(library, {"repetition_penalty": 2}, z, prompt) == moved(0.5)
    assert one(library, {"window_presence_penalty": 2}, z, prompt) == moved(-1.0)
    assert one(library, {"window_frequency_penalty": 0.5}, z, prompt) == moved(-3.5)
    assert one(library, {"presence_penalty": 2}, z, prompt, output=[5]) == moved(-1.0)
    assert one(library, {"frequency_penalty": 0.5}, z, prompt, output=[5, 5]) == moved(0.0)


EXTREMES = {
    "repetition_penalty": (0.1, 10),
    "repeat_last_n": (0, -1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "window_presence_penalty": (-2, 2),
    "window_frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 5),
    "dry_base": (1, 50),
    "dry_allowed_length": (1, 9),
    "dry_penalty_last_n": (0, -1),
    "logit_bias": ([[3, -100]], [[3, 100]]),
    "allowed_token_ids": ([1], [2, 3]),
    "ignore_eos": (False, True),
    "min_tokens": (0, 100),
    "samplers": ([], ["penalties", "dry"]),
    "stop_token_ids": ([], [6]),
}
BESIDE = {
    "repeat_last_n": {"repetition_penalty": 1.5},
    "samplers": {"repetition_penalty": 1.5, "dry_multiplier": 1},
    "stop_token_ids": {"min_tokens": 99},
    **{field: {"dry_multiplier": 1} for field in ("dry_base", "dry_allowed_length", "dry_penalty_last_n")},
}


@pytest.mark.parametrize("field", EXTREMES)
def test_h_e3_every_field_of_these_stages_acts(field):
    """Two extreme values on fixed logits give different logits."""
    z, prompt, output = np.linspace(-3, 3, 8).tolist(), [1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3]
    fixed = {"dry_sequence_breakers": [], **BESIDE.get(field, {})}
    low, high = (one("numpy", {**fixed, field: value}, z, prompt, output, ends={7}) for value in EXTREMES[field])
    assert low != high


@pytest.mark.parametrize("window", [0, 1, 2, 3, 5, 63, 64, 65, -1])
@pytest.mark.parametrize("field", ["repeat_last_n", "dry_penalty_last_n"])
def test_h_e5_windows_mean_what_their_sentinels_say(field, window):
    """Spec S11: 0 is off, -1 everything, n the newest n; against the slow reference, over more than 64 ids."""
    output = [*range(5)] * 16
    row = params(
        repetition_penalty=1.3, window_frequency_penalty=0.5, dry_multiplier=0.8, dry_sequence_breakers=[],
        **{field: window},
    )  # fmt: skip
    chain, z = stages(17), np.linspace(-2, 2, 17, dtype=np.float32)
    found = run(np, chain, z[None], [opened(chain, row, [9, 9, 16], output)])
    assert_same_bits(found[0], processed(z, row, [9, 9, 16], output))
    off, everything = (
        run(np, chain, z[None], [opened(chain, row.clone(**{field: value}), [9, 9, 16], output)]) for value in (0, -1)
    )
    acts_from = {"repeat_last_n": 1, "dry_penalty_last_n": 6}[field]  # the output has a period of 5
    assert (found.tobytes() == off.tobytes()) == (0 <= window < acts_from)
    assert off.tobytes() != everything.tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_rows_that_use_no_stage_pass_bit_for_bit(library):
    """Spec S3: -0.0, -inf and NaN included, beside a row that uses all."""
    busy = params(
        logit_bias=[[0, 1.5], [1, False]], repetition_penalty=1.2, frequency_penalty=1, window_presence_penalty=1,
        dry_multiplier=1, dry_sequence_breakers=[], allowed_token_ids=[0, 2],
    )  # fmt: skip
    chain = stages(7)
    z = np.array([[-0.0, 0.0, -np.inf, np.nan, 1e-42, 3e38, -1]] * 3, np.float32)
    states = [opened(chain, row, [0, 1, 0, 1], [0, 1, 0]) for row in (params(), busy, params(temperature=0))]
    found = run(LIBRARIES[library], chain, z, states)
    assert found[0].tobytes() == found[2].tobytes() == z[0].tobytes()
    assert found[1].tobytes() != z[1].tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_more_ids_than_the_least_width(library):
    """Spec S43, S44: thousands of distinct ids, and 1024 biases; a row of few beside it stays what it is alone."""
    vocab = 49152
    chain, rng = stages(vocab), np.random.default_rng(5)
    many = rng.permutation(vocab)[:5000].tolist()
    bias = [[token, float(value)] for token, value in zip(many[-1024:], rng.uniform(-100, 100, 1024), strict=True)]
    wide = params(
        repetition_penalty=1.3, repeat_last_n=-1, frequency_penalty=0.2, window_presence_penalty=0.1, logit_bias=bias
    )
    few = params(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias=[[7, 1.0]])
    z = rng.standard_normal((2, vocab)).astype(np.float32)
    states = [opened(chain, wide, many[:3000], many[2500:]), opened(chain, few, [3], [7, 7])]
    found = run(LIBRARIES[library], chain, z, states)
    history = [*many[:3000], *many[2500:]]
    expected = [as_if_dense(z[0], wide, history, many[2500:]), processed(z[1], few, [3], [7, 7])]
    assert_same_bits(found, np.stack(expected))
    assert_same_bits(found[1:], run(LIBRARIES[library], chain, z[1:], states[1:]))


def as_if_dense(row, chosen, history, output):
    """The formulas over whole rows of counts."""
    row = row.copy()
    for token, amount in chosen.logit_bias:
        row[token] += np.float32(amount)
    counts, in_output = (np.bincount(ids, minlength=len(row)).astype(np.float32) for ids in (history, output))
    penalty = np.float32(chosen.repetition_penalty)
    row = np.where(counts > 0, np.where(row > 0, row / penalty, row * penalty), row)
    row = row - np.float32(chosen.frequency_penalty) * in_output
    return row - np.float32(chosen.window_presence_penalty) * (counts > 0)


def test_widths_are_few():
    """Spec S44: from a closed set, never beyond what the vocabulary needs."""
    assert {closed_width(n, 49152) for n in range(49153)} == {64, 512, 4096, 32768, 49152}
    assert {closed_width(n, 7) for n in range(8)} == {7}
    assert all(closed_width(n, vocab) >= n for vocab in (1, 7, 64, 317) for n in range(1000))


def test_changing_values_choose_no_shapes():
    """Spec S44: names, shapes and dtypes of a step's arrays are the same whatever the values are."""
    chain = stages(317)
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(50):
        row = params(
            logit_bias=[[int(token), 1.0] for token in rng.choice(317, rng.integers(1, 8), replace=False)],
            repetition_penalty=float(rng.uniform(1.1, 2)),
            repeat_last_n=int(rng.integers(1, 64)),
            frequency_penalty=float(rng.uniform(0.1, 2)),
            window_presence_penalty=float(rng.uniform(0.1, 2)),
            dry_multiplier=float(rng.uniform(0.1, 2)),
            dry_sequence_breakers=[],
            allowed_token_ids=rng.integers(0, 317, 9).tolist(),
        )
        state = opened(chain, row, rng.integers(0, 9, 40).tolist(), rng.integers(0, 9, rng.integers(0, 30)).tolist())
        coming = bool(rng.integers(2))
        packed = {}
        for stage in chain:
            packed |= stage.pack([state], [coming])
        seen.add(tuple((name, array.shape, array.dtype.str) for name, array in packed.items()))
    assert len(seen) == 1


@pytest.mark.parametrize("bias", [{"999999": 5}, [[317, 1]], [["text", 1]]], ids=str)
def test_h_i14_a_bias_outside_the_vocabulary_is_refused(bias):
    """A request that reached a sampler without `bind_params` is refused by it, not an IndexError of the step."""
    with pytest.raises(RequestError, match="logit_bias") as caught:
        opened(stages(317), params(logit_bias=bias))
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_penalty_that_overflows_stays_finite(library):
    """A quotient beyond float32 is its largest number, so that the least penalty is not a fault."""
    found = one(library, {"repetition_penalty": 2.0**-126}, [5.0, -5.0, 0.0], prompt=[0, 1, 2])
    assert found[0] == float(np.finfo(np.float32).max)
    assert found[1:] == [-5.0 * 2.0**-126, 0.0]
    steep = {"dry_multiplier": 1e9, "dry_base": 1e9, "dry_sequence_breakers": []}
    assert one(library, steep, [1.0] * 3, [0, 1] * 40) == [-float(np.finfo(np.float32).max), 1.0, 1.0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_order_shows_in_the_rounding(library):
    """Spec 4.1: bias, repetition, DRY, then frequency and the window pair: other orders round to other numbers."""
    repeats = {"prompt": [1, 2, 3], "output": [1, 2]}  # DRY sees 3 again, where frequency sees nothing
    dry = {"dry_sequence_breakers": [], "dry_multiplier": 1e8, "dry_allowed_length": 1, "dry_base": 1.0}
    big, z = np.float32(1e8), [1.0, 1.0, 1.0, 1e8]
    assert one(library, {"logit_bias": [[3, 4]], "repetition_penalty": 2}, [0, 0, 0, 4], **repeats)[3] == 4
    assert one(library, {**dry, "repetition_penalty": 2}, z, **repeats)[3] == big / 2 - big
    assert one(library, {**dry, "frequency_penalty": 1}, z, prompt=[1, 2], output=[3, 1, 2])[3] == -1
    assert one(library, {**dry, "window_presence_penalty": 1}, z, **repeats)[3] == -1
    both = {"frequency_penalty": 2, "presence_penalty": -2, "window_presence_penalty": 1}
    assert one(library, both, [1, 1, 1, 1], prompt=[3], output=[3])[3] == 0
