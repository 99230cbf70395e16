"""Row products of the JAX backend: how weights are packed and cut, what is refused, and that kernels lower for CUDA.

What the kernels compute is compared in bits and with formulas on a GPU: benchmarks/kernels/row_products_check.py.
"""

import functools
import re

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel_jax_cuda.kernels.row_products import columns_for, gated_product, row_product
from mlxcel_jax_cuda.kernels.row_products_ends import Gate, Heads, Residual, Store
from mlxcel_jax_cuda.kernels.row_products_gated import gated
from mlxcel_jax_cuda.kernels.row_products_stream import FEWEST_SLOTS, ring, stream
from mlxcel_jax_cuda.kernels.row_products_tiled import BAND, band_of, tiled
from mlxcel_jax_cuda.kernels.row_products_weight import (
    Stacked,
    Weight,
    embedding_rows,
    fits,
    natural_columns,
    natural_rows,
    pack,
    paired_rows,
    product_reference,
    unpack,
)
from mlxcel_jax_cuda.standard_tiled import ended_columns

TOLERANCE = 1e-5
"""Relative: float32 sums of 256 values in another order."""

SHAPES = [(256, 128, 0), (256, 256, 128), (384, 256, 32), (512, 128, 64), (256, 128, 16)]
"""Rows, depth, facing: a plain weight, a gate, and heads of 64, 128 and 32 dims."""


def matrix(rows, depth, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, depth)).astype(np.float32)


@pytest.mark.parametrize(("rows", "depth", "facing"), SHAPES)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_tiles_hold_the_rows_that_face_each_other(rows, depth, facing, array):
    """Tile t of a plain weight is rows 64 t … of it; of a paired one, a pair holds 64 rows and then those they face."""
    weight, w = Weight(rows, depth, facing=facing), matrix(rows, depth)
    tiles = np.asarray(pack(array(w), weight)).reshape(rows // 64, depth // 64, 64, 64)
    if not facing:
        order = list(range(rows))
    else:
        firsts = [row for row in range(rows) if row % (2 * facing) < facing]
        pairs = [firsts[start : start + 64] for start in range(0, len(firsts), 64)]
        order = [row for pair in pairs for row in (*pair, *(first + facing for first in pair))]
    for tile in range(rows // 64):
        for step in range(depth // 64):
            wanted = w[order[tile * 64 : tile * 64 + 64], step * 64 : step * 64 + 64]
            np.testing.assert_array_equal(tiles[tile, step], wanted)


@pytest.mark.parametrize(("rows", "depth", "facing"), SHAPES)
def test_unpacking_and_natural_orders_are_inverses(rows, depth, facing):
    weight, w = Weight(rows, depth, facing=facing), matrix(rows, depth)
    np.testing.assert_array_equal(unpack(pack(w, weight), weight), w)
    np.testing.assert_array_equal(natural_rows(paired_rows(w, weight), weight), w)
    y = jnp.asarray(w.T)
    np.testing.assert_array_equal(natural_columns(jnp.asarray(paired_rows(w, weight).T), weight), y)


@pytest.mark.parametrize(("rows", "depth", "facing"), SHAPES)
def test_the_reference_is_the_product_of_the_rows_as_they_came(rows, depth, facing):
    weight, w, x = Weight(rows, depth, facing=facing), matrix(rows, depth), matrix(5, depth, 1)
    y = product_reference(jnp.asarray(pack(w, weight)), jnp.asarray(x), weight)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.linalg.norm(y - exact) < TOLERANCE * np.linalg.norm(exact)


def test_each_layer_finds_its_own_tiles_among_those_of_all():
    """Two weights a layer behind one another, by the formulas: of the second, what it gives alone."""
    other, weight = Weight(256, 128), Weight(256, 128, facing=128)
    at = Stacked(other.packed_shape[0], other.packed_shape[0] + weight.packed_shape[0])
    layers = [matrix(256, 128, seed) for seed in range(3)]
    tiles = jnp.concatenate([pack(w, kind) for w in map(jnp.asarray, layers) for kind in (other, weight)])
    x = jnp.asarray(matrix(5, 128, 9))
    for layer, w in enumerate(layers):
        alone = jnp.asarray(pack(w, weight))
        for product in (row_product, gated_product):
            found = product(tiles, x, weight, layer=layer, at=at, sms=0)
            np.testing.assert_array_equal(found, product(alone, x, weight, sms=0))


def test_rows_of_a_packed_embedding_are_its_rows():
    weight, w, ids = Weight(256, 128), matrix(256, 128), np.array([0, 63, 64, 255, 64])
    np.testing.assert_array_equal(embedding_rows(jnp.asarray(pack(w, weight)), jnp.asarray(ids), weight), w[ids])
    with pytest.raises(ValueError, match="paired"):
        embedding_rows(jnp.asarray(pack(w, weight)), jnp.asarray(ids), Weight(256, 128, facing=128))


@pytest.mark.parametrize(
    ("rows", "depth", "facing", "split"),
    [
        (2048, 2048, 0, 4),  # 32 row tiles
        (3072, 2048, 0, 2),  # 48
        (3072, 2048, 32, 4),  # 24 pairs
        (4096, 2048, 64, 4),  # 32 pairs
        (12288, 2048, 6144, 1),  # 96 pairs
        (1024, 3072, 0, 8),  # 16
        (128256, 2048, 0, 1),
        (4096, 14336, 0, 4),  # 64, and two parts would be too deep for their tokens
        (3584, 18944, 0, 4),  # 56, and eight parts cannot share it
        (2048, 128, 0, 1),  # two parts cannot share it
        (2048, 384, 0, 1),
    ],
)
def test_the_split_follows_from_the_shape_alone(rows, depth, facing, split):
    weight = Weight.of(rows, depth, facing=facing)
    assert weight.split == split
    assert fits(rows, depth, facing=facing)
    assert weight.packed_shape == (rows * depth // 64, 64)


@pytest.mark.parametrize(
    ("rows", "depth", "split", "facing", "words"),
    [
        (192, 128, 1, 0, "rows must be a multiple of 128"),
        (0, 128, 1, 0, "rows must be a multiple of 128"),
        (-128, 128, 1, 0, "rows must be a multiple of 128"),
        (128, 64, 1, 0, "depth must be a multiple of 128"),
        (128, 0, 1, 0, "depth must be a multiple of 128"),
        (128, 128, 2, 0, "128 x split 2"),
        (128, 128, 0, 0, "split 0"),
        (256, 128, 1, 96, "facing 96"),
        (256, 128, 1, 40, "facing 40"),
        (256, 128, 1, 256, "facing 256"),
        (256, 128, 1, -64, "facing -64"),
    ],
)
def test_a_weight_without_a_packed_form_is_refused_by_its_numbers(rows, depth, split, facing, words):
    with pytest.raises(ValueError, match=words):
        Weight(rows, depth, split, facing)
    if split == 1:
        assert not fits(rows, depth, facing=facing)


def test_arrays_of_another_shape_are_refused():
    weight = Weight(256, 128)
    with pytest.raises(ValueError, match=r"w is \(128, 256\)"):
        pack(matrix(128, 256), weight)
    with pytest.raises(ValueError, match=r"tiles are \(256, 128\)"):
        unpack(matrix(256, 128), weight)


@pytest.mark.parametrize(
    ("tokens", "split", "columns"),
    [
        (1, 1, 8),
        (8, 1, 8),
        (9, 1, 16),
        (32, 2, 32),
        (33, 1, 64),
        (64, 1, 64),
        (129, 1, 256),
        (129, 2, 128),
        (5000, 1, 256),
    ],
)
def test_the_fewest_columns_that_hold_the_tokens_are_taken(tokens, split, columns):
    assert columns_for(tokens, Weight(256, 256, split)) == columns


@pytest.mark.parametrize("depth", [128, 2048, 8192, 28672])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("facing", [0, 128])
@pytest.mark.parametrize("columns", [8, 16, 32])
def test_a_ring_has_room_for_any_depth(depth, split, facing, columns):
    """Tokens that do not fit beside the ring stream through it."""
    if depth % (128 * split):
        return
    slots, _ = ring(Weight(256, depth, split, facing), columns)
    assert slots >= FEWEST_SLOTS


def bf16(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


def test_tokens_of_another_shape_or_type_are_refused():
    weight, gate = Weight(256, 128), Weight(256, 128, facing=128)
    tiles = bf16(*weight.packed_shape)
    with pytest.raises(ValueError, match=r"x is float32\[3, 128\]"):
        row_product(tiles, jnp.zeros((3, 128)), weight)
    with pytest.raises(ValueError, match=r"bfloat16 \[T, 128\]"):
        row_product(tiles, bf16(3, 64), weight)
    with pytest.raises(ValueError, match="must face their ups"):
        gated_product(tiles, bf16(8, 128), weight)
    with pytest.raises(ValueError, match="8, 16 or 32"):
        stream(tiles, bf16(9, 128), weight=weight, end=Store())
    with pytest.raises(ValueError, match="3 parts"):
        stream(bf16(1536, 64), bf16(8, 384), weight=Weight(256, 384, 3), end=Store())
    with pytest.raises(ValueError, match="multiple of columns=64"):
        tiled(tiles, bf16(65, 128), weight=weight, columns=64)
    with pytest.raises(ValueError, match=r"of this weight they are \(512, 64\)"):
        row_product(bf16(513, 64), bf16(8, 128), weight)
    at, pair = Stacked(64, 640), bf16(1280, 64)
    with pytest.raises(ValueError, match=r"\(1280, 64\): no layers of 560 rows"):
        row_product(pair, bf16(8, 128), weight, layer=0, at=Stacked(64, 560))
    with pytest.raises(ValueError, match=r"no layers of 640 rows, with \(512, 64\) at 192"):
        row_product(pair, bf16(64, 128), weight, layer=0, at=Stacked(192, 640))
    with pytest.raises(ValueError, match="both, or neither"):
        row_product(pair, bf16(64, 128), weight, at=at)
    with pytest.raises(ValueError, match="multiple of columns=96"):
        tiled(tiles, bf16(96, 128), weight=weight, columns=96)
    with pytest.raises(ValueError, match="128 at most"):
        tiled(bf16(512, 64), bf16(256, 256), weight=Weight(128, 256, 2), columns=256)
    scale = jnp.ones(256)
    with pytest.raises(ValueError, match="with a scale"):
        tiled(bf16(512, 64), bf16(256, 256), None, scale, weight=Weight(128, 256, 2), columns=256, end=Store())
    with pytest.raises(ValueError, match="of a paired weight"):
        tiled(bf16(1024, 64), bf16(256, 256), weight=Weight(256, 256, 2, 128), columns=256, end=Gate())
    with pytest.raises(ValueError, match="multiple of columns=64"):
        gated(tiles, bf16(65, 128), weight=gate, columns=64)
    with pytest.raises(ValueError, match="128 at most"):
        gated(bf16(1024, 64), bf16(256, 256), weight=Weight(256, 256, 2, 128), columns=256)
    with pytest.raises(ValueError, match="their ups"):
        gated(tiles, bf16(64, 128), weight=Weight(256, 128, facing=64), columns=64)
    with pytest.raises(ValueError, match="must begin at a multiple of 128"):
        gated(pair, bf16(64, 128), jnp.zeros(1, jnp.int32), weight=gate, columns=64, at=at)


def shape(*size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(size, dtype)


def lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


LAYERS = 3
HEADS = Heads(4, 2, 64, bias=True, layers=LAYERS)
NORMED = Heads(2, 1, 128, normed=True, eps=1e-6, layers=LAYERS)


def extra_of(end, columns):
    float32, int32 = {"dtype": jnp.float32}, {"dtype": jnp.int32}
    if isinstance(end, Residual):
        return shape(512, columns, **float32), shape(2 * LAYERS + 1, 512, **float32)
    if not isinstance(end, Heads):
        return ()
    small = shape(LAYERS, 512, **float32) if end.bias else shape(LAYERS, 2, 2, 64, **float32)
    turns, rows = shape(64, columns, **float32), shape(columns, **int32)
    pages = shape(LAYERS * 9, end.kv_heads, 16, 2, end.head_dim // 2)
    return small, turns, turns, rows, rows, pages, pages


@pytest.mark.parametrize(
    ("end", "weight", "columns"),
    [
        (Store(), Weight(512, 256), 8),
        (Store(jnp.float32), Weight(512, 256, 2, 32), 16),
        (Gate(), Weight(512, 256, facing=256), 32),
        (Gate(), Weight(512, 256, 2, 256), 8),
        (Residual(1), Weight(512, 256), 8),
        (Residual(2), Weight(512, 8192, 2), 32),
        (Residual(2), Weight(512, 8192, 4), 8),
        (Gate(), Weight(512, 1024, 8, 256), 16),
        (HEADS, Weight(512, 256, 2, 32), 8),
        (NORMED, Weight(512, 256, 1, 64), 8),
    ],
    ids=repr,
)
def test_every_end_of_a_launch_lowers_for_cuda_as_one_kernel(end, weight, columns):
    """Without a GPU: shapes, layouts and transfers are checked by Mosaic, what is computed is not."""
    squares = shape(weight.depth // 64, columns, dtype=jnp.float32)
    in_layers = isinstance(end, Heads | Residual)
    at = Stacked(384, weight.packed_shape[0] + 512) if in_layers else None
    text = lowered(
        lambda tiles, x, squares, extra, layer: stream(
            tiles, x, squares, extra, layer, weight=weight, end=end, eps=1e-5, at=at
        ),
        shape(LAYERS * at.stride, 64) if in_layers else shape(*weight.packed_shape),
        shape(columns, weight.depth),
        None if isinstance(end, Residual) else squares,
        extra_of(end, columns),
        shape(1, dtype=jnp.int32) if in_layers else None,
    )
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("product", "weight", "tokens", "dtype"),
    [
        (row_product, Weight(256, 256), 100, jnp.bfloat16),
        (row_product, Weight(256, 256, 2), 300, jnp.bfloat16),
        (row_product, Weight(256, 512, 4), 300, jnp.bfloat16),
        (row_product, Weight(256, 256), 64, jnp.float32),
        (gated_product, Weight(256, 256, facing=128), 130, jnp.bfloat16),
        (gated_product, Weight(256, 256, 2, 128), 40, jnp.bfloat16),
    ],
)
def test_many_tokens_lower_for_cuda_as_one_kernel(product, weight, tokens, dtype):
    options = {"dtype": dtype} if product is row_product else {}
    arguments = shape(*weight.packed_shape), shape(tokens, weight.depth)
    result = jax.eval_shape(lambda tiles, x: product(tiles, x, weight, **options), *arguments)
    assert (result.shape, result.dtype) == ((tokens, weight.rows // (2 if product is gated_product else 1)), dtype)
    text = lowered(lambda tiles, x: product(tiles, x, weight, **options), *arguments)
    assert text.count("custom_call @mosaic_gpu") == 1


def ended_tokens(end, weight, tokens, columns):
    """Of the second of three layers, by `tiled`: a function, and what it is called with."""
    at = Stacked(384, weight.packed_shape[0] + 512)
    scale = None if isinstance(end, Residual) else shape(tokens, dtype=jnp.float32)

    def call(tiles, x, layer, scale, extra):
        return tiled(tiles, x, layer, scale, extra, weight=weight, columns=columns, end=end, at=at)

    tiles, x = shape(LAYERS * at.stride, 64), shape(tokens, weight.depth)
    return call, (tiles, x, shape(1, dtype=jnp.int32), scale, extra_of(end, tokens))


ENDED = [
    (Residual(2), Weight(512, 512, 4), 256, 128),
    (Residual(2), Weight(512, 512, 4), 512, 256),  # the parts beside 256 columns
    (Residual(1), Weight(512, 256), 64, 64),
    (HEADS, Weight(512, 256, 2, 32), 128, 128),
    (attrs.evolve(HEADS, runs=True), Weight(512, 256, 2, 32), 128, 128),
    (attrs.evolve(NORMED, runs=True), Weight(512, 256, 1, 64), 64, 64),
]


@pytest.mark.parametrize(("end", "weight", "tokens", "columns"), ENDED, ids=repr)
def test_many_tokens_end_in_the_launch_that_multiplies(end, weight, tokens, columns):
    """What `stream` gives of as many columns, by one kernel."""
    call, arguments = ended_tokens(end, weight, tokens, columns)
    made = jax.eval_shape(call, *arguments)
    given = [*end.out(weight, tokens), *arguments[-1][len(arguments[-1]) - end.in_place :]]
    assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in given]
    assert lowered(call, *arguments).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(("end", "weight", "tokens", "columns"), ENDED, ids=repr)
def test_warpgroups_that_end_side_by_side_add_in_places_of_their_own(end, weight, tokens, columns):
    """Mosaic adds over rows in one place of shared memory for all warpgroups of a block, behind a barrier of one."""
    call, arguments = ended_tokens(end, weight, tokens, columns)
    assert "reduce_sum" not in str(jax.make_jaxpr(call)(*arguments))


@pytest.mark.parametrize(
    ("tokens", "weight", "columns"),
    [
        (512, Weight(2048, 8192, 4), 128),  # 64 blocks and not 32
        (1024, Weight(2048, 8192, 4), 128),
        (2048, Weight(2048, 8192, 4), 256),  # one round and not two
        (8192, Weight(2048, 2048, 4), 256),
        (2176, Weight(2048, 8192, 4), 128),
        (2048, Weight(4096, 2048, 4, 64), 128),  # pairs
        (64, Weight(2048, 8192, 4), 64),
    ],
)
def test_ended_products_take_the_columns_whose_rounds_fetch_the_least(tokens, weight, columns):
    assert ended_columns(tokens, weight, 132) == columns


@pytest.mark.parametrize(
    ("depth", "tokens", "launches"),
    [(256, 256, 1), (256, 64, 2), (4096, 128, 2)],
    ids=["beside the sums", "too few tokens a warpgroup", "too deep for registers"],
)
@pytest.mark.parametrize("kind", ["gate", "heads", "head"])
def test_norms_are_worked_out_beside_the_sums_where_registers_allow(kind, depth, tokens, launches):
    """From sums of squares, which the products before them leave; else by a launch of their own."""
    columns = min(tokens, 128)
    if kind == "gate":
        weight = Weight(256, depth, facing=128)
        call = functools.partial(gated, weight=weight, columns=columns, eps=1e-5)
    else:
        weight, end = Weight(512, depth, 1, 32), attrs.evolve(HEADS, runs=True) if kind == "heads" else None
        dtype = jnp.bfloat16 if end else jnp.float32
        call = functools.partial(tiled, weight=weight, columns=columns, end=end, dtype=dtype, eps=1e-5)
    squares = shape(depth // 64, tokens, dtype=jnp.float32)
    arguments = shape(*weight.packed_shape), shape(tokens, depth), squares, extra_of(HEADS, tokens)

    def run(tiles, x, squares, extra):
        return call(tiles, x, None, squares, *([extra] if kind == "heads" else []))

    assert lowered(run, *arguments).count("custom_call @mosaic_gpu") == launches


@pytest.mark.parametrize(("tokens", "columns"), [(64, 64), (2048, 256), (2176, 128), (8192, 256)])
def test_tokens_come_in_bands_that_the_l2_holds(tokens, columns):
    assert band_of(tokens, columns) * columns <= BAND
    assert tokens % (band_of(tokens, columns) * columns) == 0


@pytest.mark.parametrize("product", [row_product, gated_product])
@pytest.mark.parametrize("tokens", [8, 64])
def test_all_layers_run_one_kernel_over_the_whole_array(product, tokens):
    """A kernel is lowered once, and what it is given is not cut: a slice of so many weights would be a copy."""
    weight, at = Weight(256, 256, facing=128), Stacked(256, 1280)

    def layers(tiles, x):
        return [product(tiles, x, weight, layer=layer, at=at) for layer in range(LAYERS)]

    text = lowered(layers, shape(LAYERS * at.stride, 64), shape(tokens, 256))
    assert text.count("custom_call @mosaic_gpu") == 1
    cut = re.findall(r"stablehlo\.(?:dynamic_)?slice.*", text)
    assert not [line for line in cut if f"{LAYERS * at.stride}x64x" in line]
