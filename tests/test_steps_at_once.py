"""Runs of steps that are one kernel each, and what stands between them: the kernels' formulas in their place."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from test_persistent_decode import HOPPER, LENGTHS, MODELS, SLOTS, arrays_of, begun_by_formulas, by_formulas, launch_of
from test_standard_block import SMALL

from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import CARRY
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import persistent_decode, steps_at_once
from mlxcel_jax_cuda.block_arrays import BlockIndex
from mlxcel_jax_cuda.decode_run import forward_and_draw_run
from mlxcel_jax_cuda.drawing import Asked, DrawShape, LastDrawn
from mlxcel_jax_cuda.forward import forward_and_draw
from mlxcel_jax_cuda.fused_decode import fused_block
from mlxcel_jax_cuda.kernels import persistent_products, step_between
from mlxcel_jax_cuda.kernels.persistent_reference import largest
from mlxcel_jax_cuda.kernels.persistent_step import Removed
from mlxcel_jax_cuda.kernels.step_begin import Buffer, Pages
from mlxcel_jax_cuda.kernels.step_between import Begins, Largest, between
from mlxcel_jax_cuda.launch import Shape, aligned
from mlxcel_jax_cuda.model import Model

VOCAB, STEPS = 4224, 3
NAMED = 4100
"""Ids of a tokenizer that has not all: in the middle of a row tile."""


def drawn_by_formulas(kept, N):
    """The draw of `between`: ids and status [N] from what each row tile's largest logit is."""
    most, at = kept
    tile = jnp.argmax(most, axis=0)
    total, token = most.max(axis=0), tile * 64 + at[tile, jnp.arange(N)].astype(jnp.int32)
    status = jnp.where(total == jnp.inf, 1, jnp.where(total == -jnp.inf, 2, 0)).astype(jnp.int32)
    return jnp.where(status == 0, token, -1).astype(jnp.int32), status


def between_by_formulas(
    step, buffer, turns, last_tokens, kept, embed, gains, *, stride, packed, at, draws_at, pages, sms
):
    N, words, parts = at.rows, None, buffer.reshape(-1, stride)
    if kept is not None:
        words = jnp.stack(drawn_by_formulas(kept, N))
        last_tokens = last_tokens.at[parts[step - 1, draws_at : draws_at + N]].set(words[0])
    if turns is None:
        return None, last_tokens, words
    own = parts[step]
    begun, planned = begun_by_formulas(own, last_tokens, embed, gains, packed=packed, at=at, pages=pages, sms=sms)
    tables = tuple(table[step] for table in turns)
    return Begins(begun, planned, tables, jnp.zeros(1, jnp.int32)), last_tokens, words


class Named:
    """Of a tokenizer what a sampler asks for."""

    size = NAMED


@pytest.fixture(params=[VOCAB, NAMED], ids=["all ids", "some ids"])
def greedy(request):
    """(named, logits [8, V], ends [8, 8], what the sampler draws): ties, ids without a token, ends beyond the logits,
    and rows that are not a number, infinite, or have nothing left."""
    named = request.param
    logits = np.random.default_rng(3).normal(size=(8, VOCAB)).astype(np.float32).round(1)
    logits[1, 77], logits[2, VOCAB - 1], logits[3, 4000] = np.nan, np.nan, np.inf
    logits[4], logits[5, :], logits[5, 9:11] = -np.inf, -0.0, 0.0
    logits[6, 4099], logits[6, 4100], logits[7, [63, 64, 4159]] = 9, 10, 8
    sampler = ChainSampler(vocab=VOCAB, tokenizer=None if named == VOCAB else Named())
    sampling = sampler.stage_sets(8)[0]
    shape = DrawShape.of(sampler, sampling, 8)
    assert shape.largest_of == named
    ends = np.full((8, 8), -1, np.int32)
    ends[0, :3], ends[1, 0], ends[6, 0], ends[7, 5:7] = logits[0].argsort()[-3:], 77, 4099, (63, 4159)
    ends[3, 0], ends[5, :2] = 4000, (0, VOCAB + 64)
    return named, logits, ends, sampler.draw(jnp, jnp.asarray(logits), with_ends(sampling, ends), None)


def with_ends(sampling, ends):
    return attrs.evolve(sampling, params={**sampling.params, "ends": jnp.asarray(ends)})


def test_the_largest_of_row_tiles_draw_what_the_sampler_draws(greedy):
    """The formulas: status and token."""
    named, logits, ends, wanted = greedy
    tokens, status = drawn_by_formulas(Largest(*largest(jnp.asarray(logits), named, jnp.asarray(ends.T))), 8)
    np.testing.assert_array_equal(tokens, wanted.tokens)
    np.testing.assert_array_equal(status, wanted.status)
    assert np.unique(status).tolist() == [0, 1, 2]


def test_what_the_kernels_do_draws_what_the_sampler_draws(greedy, monkeypatch):
    """The end of the head and the beginning of `between`, themselves, without the layouts of a GPU."""
    named, logits, ends, wanted = greedy
    for module in (persistent_products, step_between):
        monkeypatch.setattr(module, "load", lambda ref, *_: ref[...])
        monkeypatch.setattr(module, "store", _put)
    monkeypatch.setattr(persistent_products, "store_tokens", lambda ref, value: _put(ref, value.T))
    monkeypatch.setattr(mosaic_gpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(mosaic_gpu, "commit_smem", lambda: None)
    monkeypatch.setattr(
        mosaic_gpu, "broadcasted_iota", lambda dtype, shape, axis, **_: lax.broadcasted_iota(dtype, shape, axis)
    )
    shape = Shape(rows=8, width=1, logits=8, pages=4)
    step = attrs.evolve(steps_at_once.step_of_run(model_of("llama"), shape, draw_of(0)), named=named)
    T = VOCAB // 64
    removed = steps_at_once._removed(draw_of(0), jnp.concatenate([jnp.zeros(8, jnp.int32), jnp.asarray(ends).ravel()]))

    def kernel(logits_g, ids_g, tiles_g, told_g, most_g, places_g, drawn_g, found_s):
        unused = dict.fromkeys(field.name for field in attrs.fields(persistent_products.Ends))
        own = {"step": step, "logits": told_g, "best": (most_g, places_g)}
        head = persistent_products.Ends(**{**unused, **own, "removed": Removed(ids_g, tiles_g)}).logit()

        def tile(n, carry):
            head.end([logits_g[pl.ds(n * 64, 64)]], n, head.begin(n), [])
            return carry

        lax.fori_loop(0, T, tile, 0)
        for row, (token, status) in enumerate(step_between._found(most_g, places_g, 0, found_s)):
            drawn_g[0, row], drawn_g[1, row] = token, status

    out = [((8, VOCAB), jnp.float32), ((T, 8), jnp.float32), ((T, 8), jnp.float32), ((2, 8), jnp.int32)]
    told, *kept, drawn = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*each) for each in out],
        scratch_shapes=[pl.MemorySpace.ANY((2, 8), jnp.float32)],
        interpret=True,
    )(jnp.asarray(logits.T), *removed)
    np.testing.assert_array_equal(told, logits)
    np.testing.assert_array_equal(drawn, np.stack([wanted.tokens, wanted.status]))
    for got, exact in zip(kept, largest(jnp.asarray(logits), named, jnp.asarray(ends.T)), strict=True):
        np.testing.assert_array_equal(got, exact)


def _put(ref, value):
    ref[...] = value


def model_of(name, **more):
    family, overrides = MODELS[name]
    overrides = {"vocab_size": VOCAB, **overrides, **more}
    family, sizes = family(), {**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 192}
    config = family.parse_config(random_checkpoint(family, {**sizes, **overrides}))
    layout = KVLayout(
        spec=family.kv_spec(config), pages=41, page_size=64, paged=True, slots=SLOTS, context=192, chunk=64
    )
    block = fused_block(family, config, HOPPER, layout.context)
    return Model(family, config, BlockIndex.of(block), layout, HOPPER, block)


@pytest.mark.parametrize(("head_dim", "taken"), [(64, True), (128, False)])
def test_heads_that_fill_a_tile_keep_the_launches_of_each_step(head_dim, taken):
    model = model_of("llama", head_dim=head_dim)
    shape, _ = launch_of(model, np.random.default_rng(5), LENGTHS)
    assert persistent_decode.persistent_step(model, shape) is not None
    assert (steps_at_once.step_of_run(model, shape, draw_of(0)) is not None) is taken


@pytest.mark.parametrize("which", [0, 1], ids=["greedy", "usual"])
def test_a_run_of_kernels_draws_what_its_steps_draw(which, monkeypatch):
    """Three steps of eight rows, some of padding, the first of some fed by the carry: words, carry and KV. Then again
    by rows that ignore what they have drawn as ends (spec S16)."""
    monkeypatch.setattr(persistent_decode, "begin_step", begun_by_formulas)
    for module in (persistent_decode, steps_at_once):
        monkeypatch.setattr(module, "decode_step", by_formulas)
    monkeypatch.setattr(steps_at_once, "between", between_by_formulas)
    model, rng = model_of("llama"), np.random.default_rng(5)
    weights, pools = arrays_of(model, model.config.tied, rng)
    shape, buffer = launch_of(model, rng, LENGTHS)
    sampler = ChainSampler(vocab=VOCAB)
    slots = np.where(np.array(LENGTHS) > 0, shape.cut(buffer).slots, SLOTS).astype(np.int32)
    first = LastDrawn(jnp.asarray(rng.integers(0, VOCAB, SLOTS + 1), jnp.int32), jnp.zeros(SLOTS + 1))

    def copied():
        return jax.tree.map(jnp.copy, (pools, first))

    def words_of(ends):
        sampling = sampler.stage_sets(8)[which]
        asked = Asked.of(sampler, attrs.evolve(sampling, params={**sampling.params, "ends": ends}), slots)
        assert steps_at_once.step_of_run(model, shape, asked.shape).named == (0 if which else VOCAB)
        parts = np.zeros((STEPS, aligned(shape.size + len(asked.buffer))), np.int32)
        for number, part in enumerate(parts):
            part[: shape.size], part[shape.size : shape.size + len(asked.buffer)] = buffer, asked.buffer
            fields, real = shape.cut(part), np.array(LENGTHS) > 0
            fields.positions[real, 0] += number
            fields.seq_lens[real] += number
            if number:
                fields.token_ids[real] = CARRY
        kv, last, words = forward_and_draw_run(model, shape, asked.shape, STEPS, weights, *copied(), parts.reshape(-1))
        (one_kv, one), found = copied(), []
        for part in parts:
            one_kv, one, told = forward_and_draw(model, shape, asked.shape, weights, one_kv, one, part)
            found.append(told.words)
        np.testing.assert_array_equal(words, np.stack(found))
        np.testing.assert_array_equal(last.tokens[:-1], one.tokens[:-1])
        for got, exact in zip(kv, one_kv, strict=True):
            np.testing.assert_allclose(np.float32(got), np.float32(exact), atol=0.05)
        return np.asarray(words)

    ends = np.full((8, 8), -1, np.int32)
    drawn = words_of(ends)
    ends[::2, :STEPS] = drawn[:, 0, ::2].T
    other = words_of(ends)
    assert (other[0, 0, ::2] != drawn[0, 0, ::2]).all()
    np.testing.assert_array_equal(other[0, 0, 1::2], drawn[0, 0, 1::2])
    assert not (other[:, 0, ::2, None] == ends[::2]).any()


def draw_of(which, rows=8, **changes):
    sampler = ChainSampler(vocab=VOCAB)
    sampling = sampler.stage_sets(rows)[which]
    return attrs.evolve(DrawShape.of(sampler, sampling, rows), **changes)


def test_which_launches_and_draws_are_a_run_of_kernels():
    model, small = model_of("llama"), model_of("llama", vocab_size=384)
    for rows in (8, 32):
        shape = Shape(rows=rows, width=1, logits=rows, pages=4)
        assert steps_at_once.step_of_run(model, shape, draw_of(0, rows)).named == VOCAB
        assert steps_at_once.step_of_run(model, shape, draw_of(1, rows)).named == 0
        assert steps_at_once.step_of_run(small, shape, draw_of(0, rows)).named == 0
    for shape in (Shape(64, 1, 64, 4), Shape(128, 1, 128, 4), Shape(8, 1, 64, 4), Shape(8, 64, 8, 4)):
        assert steps_at_once.step_of_run(model, shape, draw_of(0, shape.logits)) is None


class Listed(ChainSampler):
    """Changes more of its draw than it says."""

    def draw(self, xp, logits, sampling, carry):
        raise NotImplementedError


class Told(Listed):
    def draw_goes_by(self, stages):
        return super().draw_goes_by(stages)


class Hosted(ChainSampler):
    def stage_sets(self, rows):
        return super().stage_sets(rows)[:1]


def test_draws_that_are_the_largest_logit():
    """Those of greedy rows, whose arrays are the few ends alone; of no sampler that draws in another way."""
    assert draw_of(0).largest_of == draw_of(0, sampler=Hosted(vocab=VOCAB)).largest_of == VOCAB
    assert draw_of(0, stages=(), params=()).largest_of == VOCAB
    others = (draw_of(place) for place in range(1, len(ChainSampler(vocab=VOCAB).stage_sets(8))))
    assert {shape.largest_of for shape in others} == {None}
    for sampler in (Listed(vocab=VOCAB), Told(vocab=VOCAB)):
        assert draw_of(0, sampler=sampler).largest_of is None
    for params in ((("ends", "<i4", (3,)),), (("ends", "<f4", (8,)),), (("bias", "<i4", (8,)),)):
        assert draw_of(0, params=params).largest_of is None
    assert draw_of(0, top_logprobs=0).largest_of is None


def test_a_run_of_greedy_steps_lowers_for_cuda_as_four_kernels():
    """The step, and what stands before, between and behind; whatever their number."""
    model, shape, drawing = model_of("llama"), Shape(rows=8, width=1, logits=8, pages=4), draw_of(0)
    weights, pools = jax.eval_shape(lambda: arrays_of(model, model.config.tied, np.random.default_rng(5)))
    last = LastDrawn(*(jax.ShapeDtypeStruct((SLOTS + 1,), dtype) for dtype in (jnp.int32, jnp.float32)))
    buffer = jax.ShapeDtypeStruct((4 * aligned(shape.size + drawing.size),), jnp.int32)
    traced = forward_and_draw_run.trace(model, shape, drawing, 4, weights, pools, last, buffer)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 4
    assert text.count("call @decode_step") == 4
    assert text.count("call @_between") == 5


@pytest.mark.parametrize(("rows", "kind"), [(8, "first"), (32, "between"), (16, "last")])
def test_what_stands_between_steps_lowers_for_cuda_as_one_kernel(rows, kind):
    at = Buffer(rows, token_ids=0, positions=64, seq_lens=128, slots=192, page_tables=448, pages=66, carry=CARRY)
    stride = aligned(448 + rows * 67)
    table = jax.ShapeDtypeStruct((4, 64, rows), jnp.float32)
    kept = jax.ShapeDtypeStruct((70, rows), jnp.float32)

    def run(buffer, last, embed, gains, turns, kept):
        draws_at = stride - aligned(rows)
        return between(
            2, buffer, turns, last, kept, embed, gains,
            stride=stride, packed=None, at=at, draws_at=draws_at, pages=Pages(4096, 128, 8),
        )  # fmt: skip

    int32 = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (4 * stride, 12)]
    floats = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((5, 256), jnp.float32)
    given = (None if kind == "last" else (table, table)), (None if kind == "first" else Largest(kept, kept))
    text = jax.jit(run).trace(*int32, *floats, *given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_what_cannot_stand_between_steps_is_refused():
    at = Buffer(8, token_ids=0, positions=64, seq_lens=128, slots=192, page_tables=448, pages=4, carry=CARRY)
    buffer, last, small = jnp.zeros(1024, jnp.int32), jnp.zeros(4, jnp.int32), jnp.zeros((70, 8))
    embed, gains = jnp.zeros((512, 256), jnp.bfloat16), jnp.zeros((5, 256))

    def refused(words, *, turns=None, kept=None, stride=512, rows=8):
        with pytest.raises(ValueError, match=words):
            between(
                0, buffer, turns, last, kept, embed, gains, stride=stride, packed=None,
                at=attrs.evolve(at, rows=rows), draws_at=480, pages=Pages(9, 64, 2),
            )  # fmt: skip

    refused("nothing begins")
    refused("whole steps", kept=Largest(small, small), stride=500)
    refused("multiple of 8", kept=Largest(small, small), rows=9)
    refused("row tiles", kept=Largest(small[:8], small[:8]))
    refused("turns are", turns=(jnp.zeros((2, 32, 8)),) * 2)
