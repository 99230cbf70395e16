"""Layers with a window of positions, in rings (docs/spec/engine.md 2.4): the formulas, and row invariance in bits."""

import numpy as np
import pytest
from company import PATIENT, check_company, company
from disturbed_rows import DisturbedRows, interrupted
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_family import Layered, layered_checkpoint, layered_logits
from real_engine import assert_same_bits, real_engine
from tested_backends import loaded_family

from mlxcel.core.kv import BLOCK, SlidingKV
from mlxcel.core.plan import Piece
from mlxcel.errors import BatchShapeError
from mlxcel.testing.family_run import Feed, pieces_of
from mlxcel_reference_numpy.attention import attend_token, attend_window

WINDOWS = (1, 16, 100, 128, 130)

TOLERANCE = 2e-6
"""Of a float32 sum of up to 130 values near 1 against float64."""

LOGITS_TOLERANCE = 1e-5
"""Of the largest logit: float32 sums in three layers of this small model come within 1e-6 of float64."""


def ids_of(length, seed=0, vocab=61):
    return np.random.default_rng(seed).integers(0, vocab, length)


def fed(loaded, ids, chunk, context=512):
    """Logits [T, V] of a prompt in pieces of `chunk`, over rings that are made for such pieces."""
    steps = [[feed] for feed in pieces_of(0, len(ids), list(range(chunk, len(ids), chunk)))]
    return loaded.run([ids], steps, context=context, chunk=chunk, held=np.nan)[0]


# --- the formulas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [*WINDOWS, 512])
def test_attention_in_a_window_is_the_formula(window, softcap):
    """Spec V10: a query at q sees max(0, q - w + 1) to q. All else in the ring is NaN, or of another time."""
    rng = np.random.default_rng(window)
    kv_heads, group, dim, value_dim, count = (1, 4, 256, 256, 1300) if window == 512 else (2, 3, 8, 4, 700)
    keys = rng.standard_normal((kv_heads, count, dim), np.float32)
    values = rng.standard_normal((kv_heads, count, value_dim), np.float32)
    q = rng.standard_normal((kv_heads, group, dim), np.float32)
    scale = 1.2 * dim**-0.5
    size = SlidingKV(kv_heads, dim, value_dim, window).ring(context=2048, chunk=1)
    rings = [np.full((kv_heads, size, width), np.nan, np.float32) for width in (dim, value_dim)]
    for position in range(count):
        for ring, wholes in zip(rings, (keys, values), strict=True):
            ring[:, position % size] = wholes[:, position]
        if position % 37 and position % BLOCK not in (0, 1, 127):
            continue
        seen = slice(max(0, position - window + 1), position + 1)
        scores = np.einsum("kgd,kpd->kgp", q.astype(np.float64), keys[:, seen]) * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        expected = np.einsum("kgp,kpd->kgd", weights / weights.sum(axis=-1, keepdims=True), values[:, seen])
        ours = attend_window(q, *rings, window, position, scale, softcap)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE, err_msg=f"position {position}")


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("window", [130, 128, 100, 16, 1])
@pytest.mark.parametrize("length", [40, 290])
def test_h_l11_a_prompt_longer_than_the_window(backend, window, length):
    """Spec V9, V10: one pass and chunks, against the full masked computation; every row sees at least itself."""
    checkpoint = layered_checkpoint(f"window {window}", f"window {window}", "full", softcap=2.0)
    loaded, ids = loaded_family(Layered(), checkpoint), ids_of(length)
    whole = loaded.logits(ids, context=512)
    expected = layered_logits(checkpoint, ids)
    assert np.abs(whole - expected).max() <= LOGITS_TOLERANCE * np.abs(expected).max()
    for chunk in (1, 7, 64):
        assert_same_bits(whole, fed(loaded, ids, chunk), f"chunk {chunk}")


def test_a_window_as_long_as_the_context_is_full_attention():
    """In bits, whether a layer keeps a ring or pages: the blocks are the same."""
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 1, 2, 384, 8), np.float32)
    q = rng.standard_normal((2, 1, 8), np.float32)
    for position in (0, 5, 127, 128, 300):
        full = attend_token(q, keys, values, np.array([0]), position, 0.3)
        assert_same_bits(full[0], attend_window(q, keys[0], values[0], 384, position, 0.3)[0])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
@pytest.mark.parametrize("context", [3, 128, 129, 4096])
def test_a_ring_holds_window_piece_and_unwinding_in_whole_blocks(window, chunk, context):
    """Spec V9."""
    ring = SlidingKV(1, 1, 1, window).ring(context=context, chunk=chunk)
    assert ring % BLOCK == 0
    needed = min(window + chunk - 1 + 16, context)
    assert needed <= ring < needed + BLOCK


# --- the future ------------------------------------------------------------------------------------------------------


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("chunk", [7, 1, 2048])
@pytest.mark.parametrize("window", [100, 128, 130, 16, 1])
def test_h_l13_logits_do_not_move_when_later_tokens_change(backend, window, chunk):
    """Where pieces go round the ring, what a piece writes must not be seen by its earlier tokens."""
    loaded = loaded_family(Layered(), layered_checkpoint(f"window {window}", "full"))
    ids = ids_of(300)
    usual = fed(loaded, ids, chunk)
    for kept in (130, 257):
        changed = np.concatenate([ids[:kept], ids_of(300, seed=9)[kept:]])
        got = fed(loaded, changed, chunk)
        assert_same_bits(usual[:kept], got[:kept], f"{kept} tokens kept")
        assert not np.array_equal(usual[kept:], got[kept:])


# --- row invariance --------------------------------------------------------------------------------------------------

FAMILIES = [
    ("window 1", "window 16", "full"),
    ("window 100", "window 128+experts"),
    ("window 130", "window 16", "state"),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=" ".join)
def engines(backend, request):
    """One whose pieces are at most 64 tokens, so that its rings wrap, and one whose rings hold all of a row."""
    checkpoint = layered_checkpoint(*request.param)
    return [real_engine(checkpoint, Layered(), slots=6, chunk=chunk) for chunk in (64, 2048)]


def drawn(engines, data, **bounds):
    small, large = engines
    real = data.draw(st.sampled_from([small, large]))
    chunks = (1, 7, 64) if real is small else (1, 7, 64, 2048)
    case = data.draw(company(real.vocab, chunks=chunks, **bounds))
    check_company(real, case, alone=large)


@pytest.mark.on_jax(most=0)
@settings(max_examples=5, **PATIENT)
@given(data=st.data())
def test_rows_with_windows_do_not_know_their_company(engines, data):
    """Batches, shuffled places, chunks, joining and leaving; windows crossed up to several times, rings wrapped."""
    drawn(engines, data, rows=4, lengths=(1, 2, 9, 40, 131, 270))


@pytest.mark.slow
@settings(max_examples=150, **PATIENT)
@given(data=st.data())
def test_rows_with_windows_do_not_know_their_company_at_length(engines, data):
    drawn(engines, data, rows=6, lengths=(1, 2, 9, 16, 17, 40, 127, 128, 131, 270, 400))


@pytest.mark.on_jax(most=1)
def test_rows_that_decode_round_their_ring(engines):
    """Decoding wraps the ring too: 300 steps beside a row that prefills."""
    small, large = engines
    ids, steps = ids_of(3), 300
    crowd = small.together([ids, ids_of(200, seed=2)], [steps, 3], [1, 7], [[0, 1]] * (steps + 30))
    logits, output = large.alone(ids, steps)
    assert_same_bits(logits, crowd[0][0])
    assert output == crowd[0][1]


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("layers", [("full",), ("window 16", "state"), ("window 1", "full+experts")], ids=" ".join)
def test_h_l25_short_and_long_rows_beside_each_other(backend, layers):
    """Lengths 2 and 9: no NaN anywhere, and rows are what they are alone, whatever the arrays held before."""
    loaded = loaded_family(Layered(), layered_checkpoint(*layers))
    rows, bounds = [ids_of(2), ids_of(9, seed=3)], {"context": 64, "chunk": 16}
    whole = [Feed(0, 0, 2), Feed(1, 0, 9)]
    mixed = [[Feed(1, 0, 4), Feed(0, 0, 1)], [Feed(0, 1, 2), Feed(1, 4, 9)]]
    alone = [loaded.logits(ids, **bounds) for ids in rows]
    for steps in ([whole], [whole[::-1]], mixed):
        for expected, logits in zip(alone, loaded.run(rows, steps, held=np.nan, **bounds), strict=True):
            assert np.isfinite(logits).all()
            assert_same_bits(expected, logits)


# --- steps that must not count ---------------------------------------------------------------------------------------


@pytest.mark.on_jax(most=1)
@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("ahead", ["in flight", "never was"])
def test_a_void_piece_with_another_ahead_leaves_no_hole_in_the_ring(backend, monkeypatch, before, ahead):
    """Together they are longer than the slack of the ring, and what the row still sees is written over. So too where
    the second one was interrupted itself."""
    checkpoint = layered_checkpoint("window 16", "full")
    prompt = ids_of(270)
    expected = [real_engine(checkpoint, Layered(), slots=1, chunk=64).alone(prompt, 2, 64)]
    rows = DisturbedRows(real_engine(checkpoint, Layered(), slots=1, chunk=64), [prompt], 2, chunk=64)
    for _ in range(before):
        rows.turn(rows.going)
    with monkeypatch.context() as patch:
        interrupted(patch, rows.real.backend, "read")
        if ahead == "never was":
            interrupted(patch, rows.real.backend, "submit", nth=2)
        with pytest.raises(KeyboardInterrupt):
            rows.turn(rows.going, rows.going)
    rows.to_end()
    rows.check(expected)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "refused"), [(("window 16", "full"), True), (("full", "state"), False)])
def test_a_piece_longer_than_the_chunk_is_refused(layers, refused):
    """Spec V10: before a forward, and the row goes on with pieces that fit. Where no layer has a window it is taken."""
    real = real_engine(layered_checkpoint(*layers), Layered(), slots=1, chunk=8)
    ids = ids_of(20)
    row = real.open(ids)
    plan = real.plan(ids, 9)
    if refused:
        with pytest.raises(BatchShapeError, match=r"a piece of 9 tokens, and this model's window .* for 8"):
            real.engine.reserve([Piece(row, plan, 0)])
        assert real.engine.view(row).stored == 0
        real.engine.prefill(row, real.plan(ids, 8))
    else:
        real.engine.prefill(row, plan)
    assert_same_bits(real.close(row)[0], real.alone(ids, 0, 8)[0])


# --- huge weights ----------------------------------------------------------------------------------------------------


class Huge:
    """A checkpoint with some tensors multiplied, and one token's embedding at infinity, as an overflow leaves it."""

    POISON = 60

    def __init__(self, checkpoint, factor):
        self._checkpoint = checkpoint
        self._factor = np.float32(factor)

    def __getattr__(self, name):
        return getattr(self._checkpoint, name)

    def read(self, name, out=None):
        values = self._checkpoint.read(name, out)
        if name.split(".")[0] in ("q", "k"):
            values *= self._factor
        if name == "embed":
            values[self.POISON] = np.inf
        return values


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("layers", [("full",), ("window 16", "full"), ("state", "window 16", "full+experts")])
def test_h_l24_a_row_of_huge_weights_ends_and_the_next_one_works(backend, layers):
    """Softcap in float32: scores far beyond half precision are capped and finite. A row whose numbers are gone fails
    alone, leaves nothing in its slot, and the pool is empty behind it."""
    checkpoint = Huge(layered_checkpoint(*layers, softcap=30.0), 1e4)
    good = ids_of(20)
    good[good == Huge.POISON] = 0
    bad = np.concatenate([good[:5], [Huge.POISON], good[5:]])
    expected = layered_logits(checkpoint, good)
    got = loaded_family(Layered(), checkpoint).logits(good)
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() <= 1e-3 * np.abs(expected).max()  # a score's float32 error grows with it
    fresh, output = real_engine(checkpoint, Layered(), slots=2, chunk=64).alone(good, 4)
    assert Huge.POISON not in output
    real = real_engine(checkpoint, Layered(), slots=2, chunk=64)
    for _ in range(2):
        rows = [real.open(bad), real.open(good)]
        parts = [Piece(row, real.plan(ids), 0) for row, ids in zip(rows, (bad, good), strict=True)]
        real.engine.reserve(parts)
        outcomes = real.engine.collect(real.engine.submit(parts))
        assert "NaN or +inf in its logits" in str(outcomes[0].error)
        assert real.engine.close(rows[0])
        for _ in range(4):
            assert real.engine.step([rows[1]])[0].error is None
        assert_same_bits(fresh, real.close(rows[1])[0])
        assert real.engine.kv_stats.owned == 0
        assert_same_bits(fresh, real.alone(good, 4)[0])
