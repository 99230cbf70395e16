"""The persistent decode step: who does what, what it refuses, its formulas, and that it lowers for CUDA as one kernel.

What the kernel computes is compared in bits and with these formulas on a GPU: benchmarks/kernels/persistent_check.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import BlockWeights, Shapes
from mlxcel_jax_cuda.kernels.attention_schedule import make_schedule
from mlxcel_jax_cuda.kernels.decode_attention import decode_reference
from mlxcel_jax_cuda.kernels.persistent_reference import step_reference, tokens_of
from mlxcel_jax_cuda.kernels.persistent_shape import Step, weight_for
from mlxcel_jax_cuda.kernels.persistent_step import Made, Stacked, decode_step
from mlxcel_jax_cuda.kernels.persistent_stream import of_pieces
from mlxcel_jax_cuda.kernels.row_products_weight import Weight
from mlxcel_jax_cuda.standard_block import decode
from mlxcel_jax_cuda.standard_steps import PlainSteps

TOLERANCE = 5e-3
"""Relative, of norms: the same formulas in two programs, which round to bf16 at the same places from sums in another
order."""


def step_of(D=256, H=8, K=4, d=64, ffn=512, V=512, **changes):
    sizes = {
        "layers": 2,
        "qkv": weight_for((H + 2 * K) * d, D, d // 2),
        "o": weight_for(D, H * d),
        "gate_up": weight_for(2 * ffn, D, ffn),
        "down": weight_for(D, ffn),
        "head": Weight(V, D),
        "heads": H,
        "kv_heads": K,
        "head_dim": d,
        "pages": 17,
        "page_size": 64,
        "scale": d**-0.5,
        "eps": 1e-5,
        "normed": d == 128,
    }
    return Step(**{**sizes, **changes})


LLAMA_1B = {"D": 2048, "H": 32, "K": 8, "ffn": 8192, "V": 128256}
QWEN_17B = {"D": 2048, "H": 16, "K": 8, "d": 128, "ffn": 6144, "V": 151936}
LLAMA_8B = {"D": 4096, "H": 32, "K": 8, "d": 128, "ffn": 14336, "V": 128256, "normed": False}


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [(LLAMA_1B, (4, 4, 1, 4)), (QWEN_17B, (4, 4, 1, 4)), (LLAMA_8B, (2, 2, 1, 4))],
    ids=["llama-3.2-1b", "qwen3-1.7b", "llama-3.1-8b"],
)
def test_the_parts_of_a_weight_follow_from_its_shape(sizes, splits):
    D, H, K, d = sizes["D"], sizes["H"], sizes["K"], sizes.get("d", 64)
    weights = [weight_for((H + 2 * K) * d, D, d // 2), weight_for(D, H * d)]
    weights += [weight_for(2 * sizes["ffn"], D, sizes["ffn"]), weight_for(D, sizes["ffn"])]
    assert tuple(weight.split for weight in weights) == splits
    assert all(weight.items * weight.split >= 96 for weight in weights)


@pytest.mark.parametrize(
    ("sizes", "slots"),
    [
        *((LLAMA_1B, 12), (QWEN_17B, 12), (LLAMA_8B, 10), ({}, 13)),
        *(({**LLAMA_1B, "rows": 16}, 12), ({**QWEN_17B, "rows": 32}, 12), ({**LLAMA_8B, "rows": 32}, 12)),
    ],
    ids=["1b", "qwen3-1.7b", "8b", "small", "1b, 16 rows", "qwen3-1.7b, 32 rows", "8b, 32 rows"],
)
def test_the_ring_has_what_a_multiprocessor_has_left(sizes, slots):
    """227 KiB, of which the tokens' buffer, the newest key and value (1 KiB), sums over rows (1 KiB) and two barriers a
    slot are not the ring's. Attention's weights, for 256 keys, and its queries are in the tokens' buffer."""
    step = step_of(**sizes)
    assert step.slots == slots
    assert step.token_room >= max(step.token_depth, 256 + step.head_dim)
    assert slots * (128 * 64 * 2 + 16) + step.rows * step.token_room * 2 + 2048 <= 227 * 1024


@pytest.mark.parametrize("sms", [9, 132])
@pytest.mark.parametrize(
    "sizes", [{}, LLAMA_1B, QWEN_17B, {**LLAMA_1B, "rows": 32}], ids=["small", "llama-3.2-1b", "qwen3-1.7b", "32 rows"]
)
def test_every_part_has_one_block_and_no_owner_is_before_a_part(sizes, sms):
    """An owner waits for the parts of others: were one of those behind an owner in its block, two could wait for each
    other without an end."""
    for name, units in step_of(**sizes, sms=sms).product_phases.items():
        numbers = np.arange(units.count)
        done = []
        for block in range(sms):
            count = int(units.count_of(block))
            of_block = [tuple(map(int, units.unit(block, n))) for n in range(min(count, 40))] if count else []
            parts = [part for _, part in of_block]
            assert parts == sorted(parts, reverse=True), name
            done += of_block
            assert count == len(numbers[(numbers + units.shift) % sms == block])
        if len(done) == units.count:
            every = {(item, part) for item in range(units.weight.items) for part in range(units.weight.split)}
            assert set(done) == every


def test_the_tiles_of_a_layer_lie_behind_one_another():
    """The order of `BlockWeights.tiles`: of each layer qkv, o, gate_up, down; of a pair the two tiles."""
    step = step_of()
    units = step.product_phases["down"]
    before = sum(w.packed_shape[0] for w in (step.qkv, step.o, step.gate_up))
    assert units.first_row == before
    assert step.layer_rows == before + step.down.packed_shape[0]
    pair = step.product_phases["qkv"]
    assert [pair.row(3, part) for part in range(pair.weight.split)] == [
        6 * 256 + part * 256 // pair.weight.split for part in range(pair.weight.split)
    ]


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ({**LLAMA_1B, "rows": 16}, {"qkv": 1, "o": 1, "gate_up": 2, "down": 2}),
        ({**LLAMA_1B, "rows": 32}, {"qkv": 1, "o": 1, "gate_up": 4, "down": 4}),
        ({**QWEN_17B, "rows": 32}, {"qkv": 1, "o": 1, "gate_up": 4, "down": 3}),
        ({**LLAMA_8B, "rows": 16}, {"qkv": 2, "o": 2, "gate_up": 4, "down": 7}),
    ],
    ids=["llama, 16", "llama, 32", "qwen3, 32", "llama-3.1-8b, 16"],
)
def test_weights_come_in_the_order_of_the_pieces_of_their_tokens(sizes, pieces):
    """Of a piece the steps of one row tile, then those of the other; each tile's are all of its part, in order."""
    step = step_of(**sizes)
    units = step.product_phases
    assert {name: phase.pieces for name, phase in units.items()} == pieces
    assert max(phase.piece for phase in units.values()) == step.token_depth
    assert step.rows * step.token_depth * 2 <= 32 * 1024
    assert step.head_units.tiles == 2
    for phase in [*units.values(), step.head_units]:
        if phase.tiles == 1:
            continue
        k = jnp.arange(phase.steps, dtype=jnp.int32)
        rows = np.asarray(of_pieces(k, phase.piece_steps, phase.weight.depth)).reshape(phase.pieces, 2, -1)
        assert rows.shape[2] == phase.piece_steps
        for tile in (0, 1):
            chain = tile * phase.weight.depth + 128 * np.arange(phase.part_steps)
            np.testing.assert_array_equal(rows[:, tile].reshape(-1), chain)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d": 32}, "32 dims"),
        ({"K": 4, "H": 6}, "up to 8 heads"),
        ({"H": 64, "K": 4}, "up to 8 heads"),
        ({"K": 3, "H": 6}, "do not fill tiles of 2"),
        ({"normed": True}, "share a tile"),
        ({"head": Weight(512, 256, 2)}, "cut into 2 parts"),
        ({"page_size": 96}, "page_size=96"),
        ({"pages": 0}, "pages=0"),
        ({"D": 14336}, "ring slots"),
        ({"rows": 24}, r"rows=24, the kernel knows \(8, 16, 32\)"),
        ({"D": 7168, "H": 4, "K": 2, "d": 128}, "leave 7 ring slots, 8 are needed"),
        ({"down": Weight(256, 1024)}, r"of down are \[256, 512, 0\]"),
        ({"left_out": ("norm",)}, r"nothing is called \['norm'\]"),
    ],
)
def test_a_step_that_the_kernel_cannot_do_is_refused_with_the_reason(changes, words):
    with pytest.raises(ValueError, match=words):
        step_of(**changes)


def arrays(step, make):
    """(stacked, embedded, keys, values) by `make(shape, dtype)`."""
    L, D, d, bf16 = step.layers, step.hidden, step.head_dim, jnp.bfloat16
    pool = (L * step.pages, step.kv_heads, step.page_size, d)
    stacked = Stacked(
        make((L * step.layer_rows, 64), bf16),
        make(step.head.packed_shape, bf16),
        make((2 * L + 1, D), jnp.float32),
        make((L, step.qkv.rows), jnp.float32) if step.bias else None,
        make((L, 2, 2, d // 2), jnp.float32) if step.normed else None,
    )
    return stacked, make((step.rows, D), jnp.float32), make(pool, bf16), make(pool, bf16)


@pytest.mark.parametrize(
    "sizes",
    [{"bias": True}, pytest.param({"H": 4, "K": 2, "d": 128}, marks=pytest.mark.slow)],
    ids=["heads of 64, bias", "heads of 128"],
)
def test_the_formulas_are_those_of_the_launches_one_by_one(sizes):
    """Against `standard_block.decode`, which is compared with NumPy's forward of the families."""
    step, draws = step_of(**sizes, layers=1), np.random.default_rng(7)

    def draw(shape, dtype):
        scale = shape[-1] ** -0.5 if dtype == jnp.bfloat16 else 1
        return jnp.asarray(draws.normal(size=shape) * scale, dtype)

    stacked, embedded, keys, values = arrays(step, draw)
    lengths = np.array([1, 65, 0, 128, 64, 2, 0, 100], np.int32)
    tables = draws.permutation(16).reshape(8, 2).astype(np.int32)
    half, D = step.head_dim // 2, step.hidden
    block = StandardBlock(
        layers=step.layers, vocab_size=step.head.rows, hidden=D, heads=step.heads, kv_heads=step.kv_heads,
        head_dim=step.head_dim, ffn=step.down.depth, eps=step.eps, norm_offset=0.0, qk_norm=step.normed,
        qkv_bias=step.bias, activation="silu", scale=step.scale,
        frequencies=tuple((1e4 ** (-np.arange(half) / half)).tolist()),
    )  # fmt: skip

    def attend(q, pools, layer):
        own = [pool.reshape(step.layers, step.pages, *pool.shape[1:])[layer] for pool in pools]
        queries = q[:, :, : step.group].reshape(len(q), -1, step.head_dim)
        mixed = decode_reference(queries, *own, tables, lengths, scale=step.scale)
        return mixed.reshape(len(q), -1).astype(jnp.bfloat16)

    weights = BlockWeights(stacked.tiles, stacked.head, stacked.gains, embedded, stacked.bias, stacked.head_gains)
    given = jnp.arange(8), jnp.asarray(lengths - 1), tables
    pools, logits = decode(block, Shapes.of(block), PlainSteps(), weights, (keys, values), *given, attend)
    place = np.maximum(lengths - 1, 0)
    page = np.where(lengths > 0, np.take_along_axis(tables, place[:, None] // 64, 1)[:, 0], -1)
    angles = np.asarray(block.frequencies, np.float32)[:, None] * place
    turns = jnp.cos(angles), jnp.sin(angles)
    tokens = tokens_of(embedded, stacked.gains[0], turns, jnp.asarray(page), jnp.asarray(place % 64))
    made = step_reference(step, stacked, tokens, keys, values, jnp.asarray(tables), jnp.asarray(lengths))
    real = lengths > 0
    for found, exact in ((made.logits[real], logits[real]), (made.keys, pools[0]), (made.values, pools[1])):
        found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
        assert np.linalg.norm(found - exact) <= TOLERANCE * np.linalg.norm(exact)
    assert not np.array_equal(made.keys, keys)


@pytest.mark.parametrize(
    "step",
    [
        step_of(bias=True, watched=True, timed=True),
        step_of(D=2048, rows=32, bias=True, watched=True),
        pytest.param(step_of(H=4, K=2, d=128, page_size=128), marks=pytest.mark.slow),
        pytest.param(step_of(D=1536, H=4, K=2, d=128, rows=16), marks=pytest.mark.slow),
    ],
    ids=["heads of 64, watched", "32 rows", "heads of 128", "heads of 128, 16 rows"],
)
def test_a_whole_step_lowers_for_cuda_as_one_kernel_that_writes_kv_in_place(step):
    """Without a GPU: shapes, layouts and transfers are checked by Mosaic, what is computed is not."""
    stacked, embedded, keys, values = arrays(step, jax.ShapeDtypeStruct)
    half, N = step.head_dim // 2, step.rows

    def run(stacked, embedded, keys, values, tables, lengths):
        turns = jnp.ones((half, N)), jnp.zeros((half, N))
        tokens = tokens_of(embedded, stacked.gains[0], turns, lengths - 1, lengths - 1)
        schedule = make_schedule(
            tables, lengths, num_pages=step.pages, page_size=step.page_size, kv_heads=step.kv_heads
        )
        return decode_step(step, stacked, tokens, keys, values, schedule)

    small = jax.ShapeDtypeStruct((N, 2), jnp.int32), jax.ShapeDtypeStruct((N,), jnp.int32)
    traced = jax.jit(run, donate_argnums=(2, 3)).trace(stacked, embedded, keys, values, *small)
    made: Made = traced.out_info
    assert (made.logits.shape, made.logits.dtype) == ((N, step.head.rows), jnp.float32)
    assert (made.places is not None, made.times is not None) == (step.watched, step.timed)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("tf.aliasing_output") == 2


def test_arrays_of_another_shape_are_refused():
    step = step_of()
    stacked, _, keys, _ = arrays(step, jax.ShapeDtypeStruct)
    wrong = stacked._replace(tiles=jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))

    def run(stacked, keys):
        turns = jnp.ones((32, 8)), jnp.zeros((32, 8))
        lengths = jnp.ones(8, jnp.int32)
        tokens = tokens_of(jnp.ones((8, 256)), stacked.gains[0], turns, lengths, lengths)
        schedule = make_schedule(lengths[:, None], lengths, num_pages=17, page_size=64, kv_heads=4)
        return decode_step(step, stacked, tokens, keys, keys, schedule)

    with pytest.raises(ValueError, match=r"tiles is \(64, 64\)"):
        jax.eval_shape(run, wrong, keys)
    with pytest.raises(ValueError, match="keys is"):
        jax.eval_shape(run, stacked, jax.ShapeDtypeStruct((34, 4, 128, 64), jnp.bfloat16))
    with pytest.raises(ValueError, match="only then"):
        jax.eval_shape(run, stacked._replace(bias=jax.ShapeDtypeStruct((2, 1024), jnp.float32)), keys)
