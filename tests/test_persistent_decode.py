"""A decode of up to 32 rows as one kernel, of 64 as two: what goes in and comes out, with formulas in its place."""

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_standard_block import MODELS, SMALL

from mlxcel.core.kv import KVLayout
from mlxcel.core.plan import CARRY
from mlxcel.core.source import NoProgress
from mlxcel.testing.random_checkpoint import random_checkpoint
from mlxcel_jax_cuda import backend as jax_backend
from mlxcel_jax_cuda import persistent_decode
from mlxcel_jax_cuda.block_arrays import BlockIndex, BlockWeights, Shapes
from mlxcel_jax_cuda.device import DeviceFacts
from mlxcel_jax_cuda.forward import forward
from mlxcel_jax_cuda.fused_decode import forward_block, fused_block
from mlxcel_jax_cuda.kernels.attention_schedule import make_schedule
from mlxcel_jax_cuda.kernels.persistent_reference import step_reference
from mlxcel_jax_cuda.kernels.row_products_weight import Weight, embedding_rows
from mlxcel_jax_cuda.kernels.step_begin import Begun, Buffer, Pages, Planned, begin_step, item_fields
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.persistent_decode import form, halves, persistent_step
from mlxcel_jax_cuda.standard_steps import begin

TOLERANCE = 1e-2
"""Relative, of norms: the same formulas in two programs, which round to bf16 at the same places from sums in another
order; two layers carry that on."""

PAGE_SIZE, PAGES, SLOTS = 64, 41, 67
LENGTHS = (1, 130, 64, 0, 65, 128, 0, 7)
"""Positions of each of eight rows with this token; 0 for padding."""

MANY = (*LENGTHS, *[2, 0, 66, 1, 64, 63, 9, 0] * 3)

MOST = (*MANY, *[0, 0, 63, 0] * 4, *[64, 0, 0, 1] * 2, *[0] * 8)


def model_of(name, numerics, **changes):
    family, overrides = MODELS[name]
    family = family()
    config = family.parse_config(
        random_checkpoint(family, {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 192, **overrides})
    )
    layout = KVLayout(
        spec=family.kv_spec(config), pages=PAGES, page_size=PAGE_SIZE, paged=True, slots=8, context=192, chunk=64
    )
    layout = attrs.evolve(layout, **changes)
    block = fused_block(family, config, numerics, layout.context)
    return Model(family, config, BlockIndex.of(block), layout, numerics, block)


HOPPER = Numerics("cuda", "bfloat16", "R0", hopper=132)
FORMULAS = Numerics("cuda", "bfloat16", "R0", formulas=True)


def arrays_of(model, tied, draws):
    block, shapes = model.block, Shapes.of(model.block)
    L, D, d = block.layers, block.hidden, block.head_dim

    def draw(*shape, dtype=jnp.bfloat16):
        scale = shape[-1] ** -0.5 if dtype == jnp.bfloat16 else 1
        return jnp.asarray(draws.normal(size=shape) * scale, dtype)

    weights = BlockWeights(
        draw(L * shapes.layer_rows, 64),
        draw(*shapes.unembed.packed_shape),
        draw(2 * L + 1, D, dtype=jnp.float32),
        None if tied else draw(block.vocab_size, D),
        draw(L, shapes.qkv.rows, dtype=jnp.float32) if block.qkv_bias else None,
        draw(L, 2, 2, d // 2, dtype=jnp.float32) if block.qk_norm else None,
    )
    pool = (L * PAGES, block.kv_heads, PAGE_SIZE, d)
    return weights, (draw(*pool), draw(*pool))


def launch_of(model, draws, lengths):
    """The shape and the buffer of a launch; some tokens are those that the device has drawn."""
    count = len(lengths)
    shape = Shape(rows=count, width=1, logits=count, pages=4)
    buffer = shape.padding(SLOTS)
    fields = shape.cut(buffer)
    tables = np.full((count, 4), -1, np.int32)  # of whole blocks of 128 positions
    numbers = iter(draws.permutation(model.layout.pages))
    for row, length in enumerate(lengths):
        for place in range(-(-length // PAGE_SIZE)):
            tables[row, place] = next(numbers)
    fields.token_ids[:, 0] = draws.integers(0, model.block.vocab_size, count)
    fields.token_ids[1:3] = CARRY
    fields.positions[:, 0], fields.seq_lens[:] = np.array(lengths) - 1, lengths
    fields.slots[:], fields.page_tables[:] = draws.permutation(SLOTS)[:count], tables
    fields.logits_rows[:] = range(count)
    return shape, buffer


def begun_by_formulas(buffer, last_tokens, embed, gains, *, packed, at, pages, sms):
    """`begin_step`, of what it alone is given."""
    count = at.rows

    def cut(first, *shape):
        return buffer[first : first + int(np.prod(shape))].reshape(shape)

    ids, positions, lengths = cut(at.token_ids, count), cut(at.positions, count), cut(at.seq_lens, count)
    ids = jnp.maximum(jnp.where(ids == at.carry, last_tokens[cut(at.slots, count)], ids), 0)
    tables = cut(at.page_tables, count, at.pages)
    rows = embed[ids] if packed is None else embedding_rows(embed, ids, packed)
    schedule = make_schedule(tables, lengths, num_pages=pages.count, page_size=pages.page_size, kv_heads=pages.kv_heads)
    place = jnp.maximum(positions, 0)
    page = jnp.take_along_axis(tables, place[:, None] // pages.page_size, axis=1)[:, 0]
    page = jnp.where(positions >= 0, page, -1)
    schedule = schedule._replace(tables=buffer)
    return Begun(*begin(rows, gains[0], jnp.bfloat16)), Planned(page, place % pages.page_size, schedule)


def by_formulas(step, stacked, tokens, keys, values, schedule, at):
    """`decode_step`, of what it alone is given: a row's length is in its items of the schedule."""
    first, count = schedule.rows[:, 0], schedule.rows[:, 1]
    lengths = jnp.where(count > 0, schedule.work[first, 3], 0)
    tables = schedule.tables[at.place(np.arange(step.rows)[:, None], np.arange(at.pages))]
    return step_reference(step, stacked, tokens, keys, values, jnp.maximum(tables, 0), lengths)


QUICK = ("llama, untied", "qwen2", "qwen3")


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *[(n, LENGTHS) if n in QUICK else pytest.param(n, LENGTHS, marks=pytest.mark.slow) for n in MODELS],
        ("llama", MANY),
        ("llama", MOST),
        pytest.param("qwen3", MANY[:16], marks=pytest.mark.slow),
        pytest.param("qwen3", MOST, marks=pytest.mark.slow),
    ],
    ids=lambda given: given if isinstance(given, str) else f"{len(given)} rows",
)
def test_a_step_as_one_kernel_gives_what_its_launches_give(name, lengths, monkeypatch):
    """Rows of one and three pages and of whole ones, some of padding; KV of both layers, and logits."""
    monkeypatch.setattr(persistent_decode, "begin_step", begun_by_formulas)
    monkeypatch.setattr(persistent_decode, "decode_step", by_formulas)
    whole, launches = model_of(name, HOPPER), model_of(name, FORMULAS)
    draws = np.random.default_rng(5)
    weights, pools = arrays_of(whole, whole.config.tied, draws)
    shape, buffer = launch_of(whole, draws, lengths)
    fields = shape.cut(buffer)
    assert persistent_step(whole, shape) is not None
    last = jnp.asarray(draws.integers(0, whole.block.vocab_size, SLOTS + 1), jnp.int32)

    def run(model):
        return forward(model, shape, weights, tuple(map(jnp.copy, pools)), last, buffer)

    (found_kv, found, _), (kv, logits, _) = run(whole), run(launches)
    real = np.array(lengths) > 0
    pairs = [(found[real], logits[real]), *zip(found_kv, kv, strict=True)]
    for got, exact in pairs:
        got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
        assert np.linalg.norm(got - exact) <= TOLERANCE * np.linalg.norm(exact)
    changed = np.any(np.asarray(found_kv[0] != pools[0]), axis=(1, 2, 3)).reshape(2, PAGES)
    newest = {int(fields.page_tables[row, (length - 1) // PAGE_SIZE]) for row, length in enumerate(lengths) if length}
    assert all(set(np.flatnonzero(layer)) == newest for layer in changed)


def test_the_form_of_a_decode_is_said(monkeypatch):
    """Other widths of a launch, other devices, what the kernel cannot do, and layers that somebody looks at."""
    whole, eight = model_of("llama", HOPPER), Shape(rows=8, width=1, logits=8, pages=4)
    assert persistent_step(whole, eight) is not None
    assert persistent_step(whole, attrs.evolve(eight, rows=32, logits=32)).rows == 32
    assert persistent_step(whole, attrs.evolve(eight, rows=40, logits=40)) is None
    assert persistent_step(whole, attrs.evolve(eight, rows=64, logits=64)).rows == 32
    assert persistent_step(whole, attrs.evolve(eight, rows=1, width=8)) is None
    assert "up to 32 rows by one kernel on 132 multiprocessors, up to 64 by it twice" in form(whole)
    with monkeypatch.context() as small:
        small.setattr(persistent_decode, "TWICE_BYTES", 10**5)
        assert not halves(whole)
        assert "up to 64" not in form(whole)
    assert persistent_step(model_of("llama", FORMULAS), eight) is None
    assert "formulas" in form(model_of("llama", FORMULAS))
    other = model_of("llama", HOPPER, page_size=32)
    assert persistent_step(other, eight) is None
    assert "page_size=32" in form(other)
    watched = model_of("llama", attrs.evolve(HOPPER, watched=True))
    assert persistent_step(watched, eight) is None
    assert form(watched) == "op by op"


@pytest.mark.parametrize(
    ("rows", "width", "wanted"), [(40, 1, 40), pytest.param(16, 1, 16, marks=pytest.mark.slow), (1, 72, 8)]
)
def test_every_launch_of_a_block_lowers_for_cuda(rows, width, wanted):
    """Without a GPU: rows that are too many for one kernel, and a piece, neither of them a multiple of what the kernels
    for many tokens take; KV is written in place."""
    model = model_of("qwen3", HOPPER)
    weights, pools = jax.eval_shape(lambda: arrays_of(model, model.config.tied, np.random.default_rng(0)))
    sizes = (rows, width), (rows, width), (rows,), (rows,), (rows,), (rows,), (wanted,), (rows, 4)
    fields = Fields(*(jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes))

    def run(pools, weights, fields):
        return forward_block(model, fields, fields.token_ids.reshape(-1), weights, pools)

    traced = jax.jit(run, donate_argnums=0).trace(pools, weights, fields)
    assert traced.out_info[1].shape == (wanted, model.block.vocab_size)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("tf.aliasing_output") == 2
    tiled = width > 1 or rows > 32
    assert text.count("custom_call @mosaic_gpu") >= (8 if tiled else 5)


@pytest.mark.parametrize(
    ("options", "watched", "block", "level"),
    [
        ({}, False, True, "R2"),
        ({"deterministic": True}, False, True, "R2"),
        ({}, True, True, "R0"),
        ({"deterministic": True}, True, True, "R1"),
        ({}, False, False, "R0"),
        ({"dtype": "float32"}, False, True, "R0"),
        ({"level": "R0"}, False, True, "R0"),
    ],
)
def test_the_level_rises_with_the_model_that_the_kernels_run(options, watched, block, level, monkeypatch):
    """P3, V15: as on Hopper; other models, other types and layers that somebody looks at stay where they are."""
    facts = DeviceFacts("cuda", "some GPU", "9.0", 132)
    monkeypatch.setattr(jax_backend, "device_facts", lambda device: facts)
    backend = jax_backend.JaxBackend(device="cpu", **options)
    if watched:
        backend.watch_numerics()
    family, overrides = MODELS["llama"]
    rows = {} if block else {"vocab_size": 390}
    checkpoint = random_checkpoint(family(), {**SMALL, "num_hidden_layers": 1, **overrides, **rows})
    before = backend.caps.level
    backend.load(family(), family().parse_config(checkpoint), checkpoint, NoProgress())
    assert (before, backend.caps.level) == ("R1" if options.get("deterministic") else "R0", level)
    assert bool(backend.caps.prefill_widths) == (level == "R0")
    assert backend.caps.mixed_steps == (level != "R1")
    other = jax_backend.JaxBackend(device="cpu", **options)
    if watched:
        other.watch_numerics()
    other.take_weights(backend)
    assert other.caps == backend.caps


@pytest.mark.parametrize(
    ("page_size", "count", "row_pages", "lengths"),
    [
        (64, 23, 8, (1, 130, 64, 0, 257, 512, 0, 256)),
        (128, 900, 66, (8448, 1, 0, 300, 256, 257, 8000, 4096)),
        (512, 8, 1, (512, 511, 257, 256, 1, 0, 0, 0)),
        (64, 23, 8, (0, 130, 0, 0, 0, 0, 0, 0)),
        (64, 23, 8, (0,) * 8),
        (128, 6, 8, (1024, 1024, 1024, 1000, 999, 513, 700, 1024)),  # rows that share pages: more blocks than items
    ],
)
def test_the_items_of_a_step_are_those_of_the_schedule(page_size, count, row_pages, lengths):
    """In the scalars that a kernel has, one item at a time; of more items than are used too. The first row has one, be
    it padding: a step has no order without."""
    tables = np.random.default_rng(4).integers(count, size=(8, row_pages)).astype(np.int32)
    lengths, pages = np.array(lengths, np.int32), Pages(count, page_size, 4)
    wanted = make_schedule(tables, real_first(lengths), num_pages=count, page_size=page_size, kv_heads=4)
    work, rows = items_of(tables, lengths, pages)
    np.testing.assert_array_equal(work, wanted.work)
    np.testing.assert_array_equal(rows, wanted.rows)


def real_first(lengths):
    return np.array([max(lengths[0], 1), *lengths[1:]], np.int32)


def items_of(tables, lengths, pages):
    given, held = list(map(jnp.int32, lengths)), jnp.asarray(tables)

    @jax.jit
    @jax.vmap
    def of_item(item):
        fields, rows = item_fields(item, given, lambda row, number: held[row, number], pages, tables.shape[1])
        return jnp.stack(fields), jnp.array(rows)

    work, rows = of_item(jnp.arange(pages.items(*tables.shape), dtype=jnp.int32))
    return np.asarray(work), np.asarray(rows[0])


@pytest.mark.parametrize(
    ("lengths", "whole"),
    [
        ((1024,) * 16, True),
        pytest.param((1024,) * 9 + (0,) * 7, True, marks=pytest.mark.slow),
        ((1000, 0, 700) + (900,) * 29, True),
        ((8192,) + (256,) * 15, False),
        pytest.param((0,) * 16, False, marks=pytest.mark.slow),
        pytest.param((4000, 100, 2500, 1, 0, 257, 8000, 300) * 4, False, marks=pytest.mark.slow),
    ],
)
def test_rows_of_about_the_same_length_are_an_item_each(lengths, whole):
    """There is an item for each multiprocessor without cutting a row; one row that is much longer than the others would
    be what all wait for."""
    tables = np.random.default_rng(4).integers(900, size=(len(lengths), 66)).astype(np.int32)
    lengths, pages = np.array(lengths, np.int32), Pages(900, 128, 8)
    most = len(lengths) if whole else None
    wanted = make_schedule(tables, real_first(lengths), num_pages=900, page_size=128, kv_heads=8, most_items=most)
    work, rows = items_of(tables, lengths, pages)
    used = int(wanted.rows[:, 1].sum())
    np.testing.assert_array_equal(work[:used], wanted.work[:used])
    np.testing.assert_array_equal(rows, wanted.rows)
    assert (rows[:, 1].max(initial=0) <= 1) == (whole or not used)


@pytest.mark.parametrize(
    ("packed", "rows"), [(Weight(512, 256), 8), (None, 32)], ids=["tiles, 8 rows", "matrix, 32 rows"]
)
def test_the_begin_of_a_step_lowers_for_cuda_as_one_kernel(packed, rows):
    at = Buffer(rows, token_ids=0, positions=64, seq_lens=128, slots=192, page_tables=448, pages=66, carry=CARRY)

    def run(buffer, last, embed, gains):
        return begin_step(buffer, last, embed, gains, packed=packed, at=at, pages=Pages(4096, 128, 8))

    int32 = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (448 + rows * 66, 12)]
    embed = jax.ShapeDtypeStruct((512, 256) if packed is None else packed.packed_shape, jnp.bfloat16)
    traced = jax.jit(run).trace(*int32, embed, jax.ShapeDtypeStruct((5, 256), jnp.float32))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 1
