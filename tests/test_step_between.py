"""The launch between two steps of a run by its kernel's own body, one block after the other, without a GPU: it gives
what the formulas give, in whichever order the blocks come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from test_steps_at_once import between_by_formulas

from mlxcel.core.plan import CARRY
from mlxcel_jax_cuda.kernels import step_begin, step_between
from mlxcel_jax_cuda.kernels.step_begin import Buffer, Pages
from mlxcel_jax_cuda.kernels.step_between import Largest

ROWS, HIDDEN, VOCAB, SLOTS = 16, 128, 5000, 20
AT = Buffer(ROWS, token_ids=0, positions=16, seq_lens=32, slots=48, page_tables=64, pages=8, carry=CARRY)
DRAWS_AT, STRIDE, STEPS = 192, 288, 3
PAGES = Pages(count=41, page_size=64, kv_heads=2)


class Ref:
    """Memory of a device."""

    def __init__(self, values):
        self.values = values

    shape = property(lambda self: self.values.shape)
    T = property(lambda self: Ref(self.values.T))
    at = property(lambda self: self)

    def __getitem__(self, index):
        found = self.values[_plain(index)]
        return Ref(found) if isinstance(found, np.ndarray) and found.ndim else jnp.asarray(found)

    def __setitem__(self, index, value):
        self.values[_plain(index)] = np.asarray(value)


def _plain(index):
    return tuple(
        slice(int(each.start), int(each.start) + each.size) if isinstance(each, pl.Slice) else int(each)
        for each in (index if isinstance(index, tuple) else (index,))
    )


@pytest.fixture(params=[1, -1], ids=["in order", "the other way round"])
def by_hand(request, monkeypatch):
    now = {}

    def loop(begin, end, body, carry):
        for i in range(int(begin), int(end)):
            carry = body(i, carry)
        return carry

    def when(condition):
        return lambda body: body() if bool(condition) else None

    def put(ref, value):
        assert ref.shape == value.shape
        ref.values[...] = np.asarray(value)

    def launched(body, out, scratch, *operands, grid, **_):
        made = [Ref(np.full(each.shape, 99, each.dtype)) for each in out]
        given = [each if isinstance(each, Ref) else Ref(np.array(each)) for each in operands]
        for now["block"] in range(grid[0])[:: request.param]:
            embedded, _, found = scratch
            body(
                *given,
                *made,
                Ref(np.zeros(embedded.shape, embedded.dtype)),
                None,
                Ref(np.zeros(found.shape, found.dtype)),
            )
        return tuple(jnp.asarray(each.values) for each in made)

    monkeypatch.setattr(lax, "fori_loop", loop)
    monkeypatch.setattr(lax, "axis_index", lambda _: jnp.int32(now["block"]))
    monkeypatch.setattr(pl, "when", when)
    monkeypatch.setattr(pl, "multiple_of", lambda x, _: x)
    monkeypatch.setattr(jax, "new_ref", lambda x: Ref(np.array(x)))
    monkeypatch.setattr(jax, "freeze", lambda ref: jnp.asarray(ref.values))
    for name in ("commit_smem", "barrier_wait"):
        monkeypatch.setattr(mosaic_gpu, name, lambda *_: None)
    monkeypatch.setattr(mosaic_gpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(mosaic_gpu, "copy_gmem_to_smem", lambda source, to, _: put(to, source.values))
    monkeypatch.setattr(
        mosaic_gpu, "broadcasted_iota", lambda dtype, shape, axis, **_: lax.broadcasted_iota(dtype, shape, axis)
    )
    for module in (step_begin, step_between):
        monkeypatch.setattr(module, "launch", launched)
        monkeypatch.setattr(module, "load", lambda ref, *_: jnp.asarray(ref.values))
        monkeypatch.setattr(module, "store", put)
    monkeypatch.setattr(step_begin, "store_tokens", lambda ref, value: put(ref, value.T.astype(ref.values.dtype)))
    monkeypatch.setattr(step_between, "_between", step_between._between.__wrapped__)
    return step_between.between.__wrapped__


def given():
    rng = np.random.default_rng(7)
    buffer = np.zeros((STEPS, STRIDE), np.int32)
    buffer[:, :16] = rng.integers(0, VOCAB, (STEPS, ROWS))
    buffer[:, 0:12:2] = CARRY
    lengths = np.array([1, 64, 300, 400, 500, 7, 330, 0, 33, 490, 257, 270, 280, 0, 290, 0])
    slots = np.where(lengths > 0, rng.permutation(SLOTS)[:ROWS], SLOTS)
    for step, part in enumerate(buffer):
        own = np.where(lengths > 0, lengths + step, 0)
        part[16:32], part[32:48] = own - 1, own
        part[64:192] = rng.integers(0, PAGES.count, 128)
        part[48:64] = part[DRAWS_AT : DRAWS_AT + ROWS] = slots
    turns = tuple(jnp.asarray(rng.normal(size=(STEPS, 64, ROWS)), jnp.float32) for _ in range(2))
    logits = rng.normal(size=(79, ROWS)).round(1).astype(np.float32)
    logits[3, 2], logits[:, 5], logits[78, 9] = np.inf, -np.inf, 9
    logits[[10, 25], 1] = 9  # one lane looks at both, since the last 64 tiles begin at 15
    largest = Largest(jnp.asarray(logits), jnp.asarray(rng.integers(0, 64, (79, ROWS)), jnp.float32))
    last = jnp.asarray(rng.integers(0, VOCAB, SLOTS + 1), jnp.int32)
    embed = jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.bfloat16)
    return (
        jnp.asarray(buffer.reshape(-1)),
        turns,
        last,
        largest,
        embed,
        jnp.asarray(rng.normal(size=(5, HIDDEN)), jnp.float32),
    )


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_a_step_is_drawn_and_the_next_begins_by_whichever_block_comes_first(step, by_hand):
    buffer, turns, last, largest, embed, gains = given()
    turns, largest = None if step == STEPS else turns, largest if step else None
    same = {"stride": STRIDE, "packed": None, "at": AT, "draws_at": DRAWS_AT, "pages": PAGES, "sms": 132}
    wanted, other, words = between_by_formulas(step, buffer, turns, last, largest, embed, gains, **same)
    begins, tokens, found = by_hand(step, buffer, turns, last, largest, embed, gains, **same)
    assert (words is None) is (found is None) is (step == 0)
    if words is not None:
        np.testing.assert_array_equal(found, words)
        assert set(found[1].tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(tokens[:SLOTS], other[:SLOTS])
    assert (begins is None) is (step == STEPS)
    if begins is None:
        return
    np.testing.assert_array_equal(begins.begun.x, wanted.begun.x)
    np.testing.assert_array_equal(begins.begun.scaled, wanted.begun.scaled)
    np.testing.assert_allclose(begins.begun.squares, wanted.begun.squares, rtol=1e-6)
    for got, exact in zip(begins.turns, wanted.turns, strict=True):
        np.testing.assert_array_equal(got, exact)
    np.testing.assert_array_equal(begins.planned.page, wanted.planned.page)
    np.testing.assert_array_equal(begins.planned.place, wanted.planned.place)
    items = int(wanted.planned.schedule.rows.sum(axis=1).max())
    np.testing.assert_array_equal(begins.planned.schedule.work[:items], wanted.planned.schedule.work[:items])
    np.testing.assert_array_equal(begins.planned.schedule.rows, wanted.planned.schedule.rows)
    np.testing.assert_array_equal(begins.planned.schedule.tables, buffer.reshape(STEPS, STRIDE)[step])
    np.testing.assert_array_equal(begins.come, [0])
