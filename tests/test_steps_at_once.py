"""Runs of steps that are one kernel each, and what stands between them: the kernels' formulas in their place."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from mlxcel_jax_cuda.kernels.persistent_reference import largest
from mlxcel_jax_cuda.kernels.step_begin import Buffer, Pages
from mlxcel_jax_cuda.kernels.step_between import Begins, Largest, between
from mlxcel_jax_cuda.launch import aligned
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


@pytest.mark.parametrize("named", [VOCAB, NAMED], ids=["all ids", "some ids"])
def test_the_largest_of_row_tiles_draw_what_the_sampler_draws(named):
    """Ties, ids without a token, and rows that are not a number, infinite, or have nothing left: status and token."""
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
    sampling.params["ends"] = ends
    wanted = sampler.draw(np, logits, sampling, None)
    tokens, status = drawn_by_formulas(Largest(*largest(jnp.asarray(logits), named, jnp.asarray(ends.T))), 8)
    np.testing.assert_array_equal(tokens, wanted.tokens)
    np.testing.assert_array_equal(status, wanted.status)
    assert np.unique(status).tolist() == [0, 1, 2]


def model_of(name, **more):
    family, overrides = MODELS[name]
    overrides = {**overrides, **more}
    family, sizes = family(), {**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 192, "vocab_size": VOCAB}
    config = family.parse_config(random_checkpoint(family, {**sizes, **overrides, "vocab_size": VOCAB}))
    layout = KVLayout(
        spec=family.kv_spec(config), pages=41, page_size=64, paged=True, slots=SLOTS, context=192, chunk=64
    )
    block = fused_block(family, config, HOPPER, layout.context)
    return Model(family, config, BlockIndex.of(block), layout, HOPPER, block)


@pytest.mark.parametrize(("head_dim", "taken"), [(64, True), (128, False)])
def test_heads_that_fill_a_tile_keep_the_launches_of_each_step(head_dim, taken):
    model = model_of("llama", head_dim=head_dim)
    shape, _ = launch_of(model, np.random.default_rng(5), LENGTHS)
    sampler = ChainSampler(vocab=VOCAB)
    assert persistent_decode.persistent_step(model, shape) is not None
    step = steps_at_once.step_of_run(model, shape, DrawShape.of(sampler, sampler.stage_sets(8)[0], 8))
    assert (step is not None) is taken


@pytest.mark.parametrize("which", [0, 1], ids=["greedy", "usual"])
def test_a_run_of_kernels_draws_what_its_steps_draw(which, monkeypatch):
    """Three steps of eight rows, some of padding, the first of some fed by the carry: words, carry and KV."""
    monkeypatch.setattr(persistent_decode, "begin_step", begun_by_formulas)
    for module in (persistent_decode, steps_at_once):
        monkeypatch.setattr(module, "decode_step", by_formulas)
    monkeypatch.setattr(steps_at_once, "between", between_by_formulas)
    model, rng = model_of("llama"), np.random.default_rng(5)
    weights, pools = arrays_of(model, model.config.tied, rng)
    shape, buffer = launch_of(model, rng, LENGTHS)
    sampler = ChainSampler(vocab=VOCAB)
    slots = np.where(np.array(LENGTHS) > 0, shape.cut(buffer).slots, SLOTS).astype(np.int32)
    asked = Asked.of(sampler, sampler.stage_sets(8)[which], slots)
    assert steps_at_once.step_of_run(model, shape, asked.shape).named == (0 if which else VOCAB)
    parts = np.zeros((STEPS, aligned(shape.size + len(asked.buffer))), np.int32)
    for number, part in enumerate(parts):
        part[: shape.size], part[shape.size : shape.size + len(asked.buffer)] = buffer, asked.buffer
        fields, real = shape.cut(part), np.array(LENGTHS) > 0
        fields.positions[real, 0] += number
        fields.seq_lens[real] += number
        if number:
            fields.token_ids[real] = CARRY
    first = LastDrawn(jnp.asarray(rng.integers(0, VOCAB, SLOTS + 1), jnp.int32), jnp.zeros(SLOTS + 1))

    def copied():
        return jax.tree.map(jnp.copy, (pools, first))

    kv, last, words = forward_and_draw_run(model, shape, asked.shape, STEPS, weights, *copied(), parts.reshape(-1))
    (one_kv, one), found = copied(), []
    for part in parts:
        one_kv, one, told = forward_and_draw(model, shape, asked.shape, weights, one_kv, one, part)
        found.append(told.words)
    np.testing.assert_array_equal(words, np.stack(found))
    np.testing.assert_array_equal(last.tokens[:-1], one.tokens[:-1])
    for got, exact in zip(kv, one_kv, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(exact), atol=0.05)


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
