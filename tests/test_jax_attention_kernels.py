"""The attention kernels without a GPU: schedules, order of summation, plain forms, refusals, lowering.

What the kernels compute is compared on a GPU by benchmarks/kernels/attention_check.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_jax_cuda.kernels import attention
from mlxcel_jax_cuda.kernels.attention import BLOCK, FLOOR, MASKED, Scoring
from mlxcel_jax_cuda.kernels.attention_schedule import FIELDS, MOST_ITEMS, capacity, make_schedule
from mlxcel_jax_cuda.kernels.chunk_attention import attend_columns as chunk_columns
from mlxcel_jax_cuda.kernels.chunk_attention import block_bounds, chunk_attention, chunk_reference, item_at, items_of
from mlxcel_jax_cuda.kernels.decode_attention import decode_attention, decode_reference

RELATIVE = 1e-5
"""Of float32 sums over at most 700 products against float64; softmax and tanh add a few units in the last place."""


@functools.partial(jax.jit, static_argnames=("page_size", "window", "most_items"))
def scheduled(tables, lengths, page_size, window=0, most_items=None):
    return make_schedule(
        tables, lengths, num_pages=64, page_size=page_size, kv_heads=4, window=window, most_items=most_items
    )


def spans(length, window):
    """First and one past the last block in which the token at length - 1 sees a key."""
    visible = [p for p in range(length) if not window or p > length - 1 - window]
    return (visible[0] // BLOCK, visible[-1] // BLOCK + 1) if visible else (0, 0)


def check_schedule(lengths, pages, page_size, window, most_items):
    S, tile = len(lengths), min(page_size, 128)
    tables = np.random.default_rng(3).integers(64, size=(S, pages)).astype(np.int32)
    schedule = scheduled(tables, np.array(lengths, np.int32), page_size, window, most_items)
    work, place = np.asarray(schedule.work), 0
    for row, length in enumerate(lengths):
        first, end = spans(length, window)
        begin, count = np.asarray(schedule.rows)[row]
        assert begin == place
        assert (count > 0) == (end > first)
        blocks = []
        for n, (own, key, run, keys, *pool_rows) in enumerate(work[begin : begin + count].tolist()):
            assert (own, keys, key % BLOCK) == (row, length, 0)
            assert run == 1 or n == 0  # the row's first blocks alone may be merged on the way
            blocks += range(key // BLOCK, key // BLOCK + run)
            for i, pool_row in enumerate(pool_rows):
                position = key + i * tile
                page = tables[row][position // page_size if pages > 1 else 0]
                assert pool_row == (page * 4 * page_size + position % page_size if position < length else 0)
        assert blocks == list(range(first, end))
        place += count
    assert np.asarray(schedule.rows)[-1].sum() == place  # items in use
    assert place <= len(work)
    assert work.shape[1] == FIELDS + BLOCK // tile


@pytest.mark.parametrize(("page_size", "pages"), [(64, 48), (128, 24), (256, 12), (3072, 1)])
@pytest.mark.parametrize("most_items", [None, 13])
def test_a_schedule_holds_every_block_of_every_row_once_and_in_order(page_size, pages, most_items):
    check_schedule([0, 1, 255, 256, 257, 3072, 0, 1500], pages, page_size, 0, most_items)
    check_schedule([3072] * 8, pages, page_size, 0, most_items)
    check_schedule([0] * 8, pages, page_size, 0, most_items)


@pytest.mark.parametrize("window", [1, 256, 257, 700])
def test_a_window_drops_blocks_and_a_ring_wraps_positions(window):
    check_schedule([0, 1, 255, 700, 701, 1024, 1025, 90_000], 1, 1024, window, None)
    check_schedule([0, 1, 255, 700, 701, 1024, 1025, 3072], 24, 128, window, None)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 3072), min_size=8, max_size=8), st.sampled_from([8, 40]))
def test_schedules_of_any_lengths(lengths, most_items):
    check_schedule(lengths, 24, 128, 0, most_items)


def test_partials_are_bounded_by_the_pool_and_by_a_constant():
    assert capacity(8, 512, 4096) == 24  # the pool's 16 blocks, and one begun block a row
    assert capacity(8, 4, 10**6) == 32
    assert capacity(128, 512, 10**8) == MOST_ITEMS
    assert capacity(5000, 512, 10**8) == 5000


@pytest.mark.parametrize("sms", [1, 7, 132])
def test_multiprocessors_share_the_items_of_a_chunk(sms):
    n, sm = np.arange(600)[:, None], np.arange(sms)
    items = np.asarray(item_at(n, sm, sms))
    for total in (1, 6, 7, 131, 132, 133, 263, 264, 265, 512):
        used = n < np.asarray(items_of(sm, sms, total))
        assert sorted(items[used].tolist()) == list(range(total))


@pytest.mark.parametrize("window", [0, 1, 200, 256, 700])
@pytest.mark.parametrize("span", [64, 128])
def test_a_tile_reads_the_blocks_that_its_tokens_see(window, span):
    tiles = [(t, b, n) for t in (0, 128, 384) for b in (0, 1, 191, 192, 255, 256, 700) for n in (1, 129, 400, 512)]
    bounds = jax.jit(jax.vmap(lambda t, b, n: block_bounds(t, span, b, n, window)))(*jnp.array(tiles, jnp.int32).T)
    for (token, begin, length), first, whole, end in zip(
        tiles, *(np.asarray(x).tolist() for x in map(jnp.broadcast_to, bounds, [(len(tiles),)] * 3)), strict=True
    ):
        positions = [begin + t for t in range(token, min(token + span, length))]
        seen = [{k // BLOCK for k in range(max(0, p - window + 1 if window else 0), p + 1)} for p in positions]
        blocks = set().union(*seen)
        assert first <= whole <= end
        assert blocks == set(range(first, end))
        for block in range(first, whole):
            assert all((block + 1) * BLOCK - 1 <= p and not window for p in positions)


def explicit(q, k, v, positions, scale, softcap=0.0, window=0):
    """The formula in float64, a token and a head at a time. q [T, H, d], k and v [K, P, d]; position -1: zeros."""
    out, group = np.zeros(q.shape), q.shape[1] // k.shape[0]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for t, position in enumerate(positions):
        for h in range(q.shape[1] if position >= 0 else 0):
            keys = slice(max(0, position - window + 1) if window else 0, position + 1)
            scores = k[h // group, keys] @ q[t, h] * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[h // group, keys] / weights.sum()
    return out


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@pytest.mark.parametrize("kind", [{}, {"softcap": 5.0}, {"window": 100}], ids=str)
def test_the_plain_forms_are_the_formula(kind):
    k, v = draw(1, 6, 2, 128, 64), draw(2, 6, 2, 128, 64)
    table, q = jnp.array([4, 0, 5]), draw(3, 70, 4, 64) * 2
    dense = [np.asarray(x[table].swapaxes(0, 1).reshape(2, -1, 64).astype(jnp.float32)) for x in (k, v)]
    positions = [200 + t if t < 66 else -1 for t in range(70)]
    exact = explicit(q, *dense, positions, 0.125, **kind)
    plain = chunk_reference(q, k, v, table, 200, 66, scale=0.125, **kind)
    np.testing.assert_allclose(plain, exact, atol=RELATIVE * np.abs(exact).max())
    if "window" not in kind:
        lengths = jnp.array([p + 1 for p in positions])
        rows = decode_reference(q, k, v, jnp.tile(table, (70, 1)), lengths, scale=0.125, **kind)
        np.testing.assert_allclose(rows, exact, atol=RELATIVE * np.abs(exact).max())


def spread(x):
    return x[None]


def partial(scores, values, scoring):
    """One block's partial. Products [keys, N] and values [keys, d]; the sum is the plain one."""
    squashed = jnp.where(scores > MASKED, scoring.squash(scores), MASKED)
    m = scoring.maximum(jnp.max(squashed, axis=0))
    weights = scoring.weights(squashed, m)
    return m, jnp.sum(weights, axis=0), values.T @ weights


def nothing(d, N):
    return jnp.full((N,), FLOOR), jnp.zeros((N,)), jnp.zeros((d, N))


def blocks_of(seed, count, scoring, d=8, N=4):
    scores = jax.random.normal(jax.random.key(seed), (count * BLOCK, N)) * 30
    values = jax.random.normal(jax.random.key(seed + 1), (count * BLOCK, d))
    cut = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(count)]
    return scores, values, [partial(scores[c], values[c], scoring) for c in cut]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_merged_partials_are_the_softmax(softcap):
    scoring = Scoring(0.1, softcap)
    scores, values, partials = blocks_of(0, 5, scoring)
    _, total, acc = functools.reduce(lambda a, b: attention.merge(a, b, spread), partials, nothing(8, 4))
    scaled = np.asarray(scores, np.float64) * 0.1
    scaled = softcap * np.tanh(scaled / softcap) if softcap else scaled
    weights = np.exp(scaled - scaled.max(0))
    exact = np.asarray(values, np.float64).T @ (weights / weights.sum(0))
    np.testing.assert_allclose(attention.finish(total, acc, spread), exact, atol=RELATIVE * np.abs(exact).max())


def test_partials_merged_on_the_way_give_the_bits_of_partials_merged_at_the_end():
    """A schedule may merge a row's first blocks in one item: the order is the same, from nothing upwards."""
    _, _, partials = blocks_of(2, 6, Scoring(0.1))
    merge = jax.jit(lambda a, b: attention.merge(a, b, spread))
    at_the_end = functools.reduce(merge, partials, nothing(8, 4))
    for run in range(1, 7):
        first = functools.reduce(merge, partials[:run], nothing(8, 4))
        items = [first, *(merge(nothing(8, 4), x) for x in partials[run:])]
        for a, b in zip(functools.reduce(merge, items, nothing(8, 4)), at_the_end, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_block_without_a_visible_key_changes_no_bit():
    """A tile's tokens walk over the same blocks, of which the first tokens do not see the last."""
    _, values, partials = blocks_of(4, 2, Scoring(0.1))
    unseen = partial(jnp.full((BLOCK, 4), MASKED), values[:BLOCK], Scoring(0.1))
    merge = jax.jit(lambda a, b: attention.merge(a, b, spread))
    plain = functools.reduce(merge, partials, nothing(8, 4))
    for order in ([unseen, *partials], [partials[0], unseen, partials[1]], [*partials, unseen]):
        for a, b in zip(functools.reduce(merge, order, nothing(8, 4)), plain, strict=True):
            np.testing.assert_array_equal(a, b)
    _, total, acc = functools.reduce(merge, [unseen, unseen], nothing(8, 4))
    np.testing.assert_array_equal(attention.finish(total, acc, spread), jnp.zeros((8, 4)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"scale": 0.0}, "scale=0.0 must be finite and above 0"),
        ({"scale": math.inf}, "scale=inf must be finite"),
        ({"scale": 1.0, "softcap": -1.0}, "softcap=-1.0 must be finite"),
        ({"scale": 1.0, "window": -1}, "window=-1 must be 0"),
    ],
)
def test_scoring_checks_itself(fields, says):
    with pytest.raises(ValueError, match=says):
        Scoring(**fields)


def abstract(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def zeros(shaped):
    return jnp.zeros(shaped.shape, shaped.dtype)


def decoded(q, k, v, tables, lengths, scale=0.125, softcap=0.0, window=0, **of):
    pages = k.shape[0] // of.get("layers", 1)
    schedule = make_schedule(tables, lengths, num_pages=pages, page_size=k.shape[2], kv_heads=k.shape[1], window=window)
    return decode_attention(q, k, v, schedule, scale=scale, softcap=softcap, window=window, **of)


def decode_arguments(S=8, H=8, K=2, d=64, width=None, page_size=128, P=4, dtype=jnp.bfloat16):
    pages = abstract(16, K, page_size, width or d)
    indices = abstract(S, P, dtype=jnp.int32), abstract(S, dtype=jnp.int32)
    return abstract(S, H, d, dtype=dtype), pages, pages, *indices


def chunk_arguments(T=64, H=8, K=2, d=64, width=None, page_size=128, P=4, dtype=jnp.bfloat16):
    pages, number = abstract(16, K, page_size, width or d), abstract(dtype=jnp.int32)
    return abstract(T, H, d, dtype=dtype), pages, pages, abstract(P, dtype=jnp.int32), number, number


def chunked(*arguments, scale=0.125, **kind):
    return chunk_attention(*arguments, scale=scale, **kind)


SHAPE_ERRORS = [
    ({"d": 256}, "d is 256 of q and 256 of the pages: both must be 64 or 128"),
    ({"width": 128}, "d is 64 of q and 128 of the pages"),
    ({"H": 9}, "9 heads cannot share 2 KV heads"),
    ({"page_size": 96}, "page_size=96 must be 64 or a multiple of 128"),
    ({"dtype": jnp.float32}, "q, k and v are float32, bfloat16, bfloat16: all must be bfloat16"),
]


@pytest.mark.parametrize(("fields", "says"), [*SHAPE_ERRORS, ({"H": 66}, "33 heads share a KV head, 32 can")])
def test_decoding_refuses_what_it_cannot_do(fields, says):
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(decoded, *decode_arguments(**fields))


@pytest.mark.parametrize(("fields", "says"), [*SHAPE_ERRORS, ({"T": 65}, "65 tokens"), ({"T": 0}, "0 tokens")])
def test_chunks_refuse_what_they_cannot_do(fields, says):
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(chunked, *chunk_arguments(**fields))


@pytest.mark.parametrize(("C", "group", "kv_heads"), [(8, 9, 2), (8, 0, 2), (8, 4, 4)])
def test_chunks_refuse_columns_of_other_pages(C, group, kv_heads):
    _, k, v, *rest = chunk_arguments(K=2)
    columns = abstract(64, kv_heads, C, 64)
    with pytest.raises(ValueError, match=rf"for {group} heads of each of 2 KV heads they must be \[T, 2, {group} or"):
        jax.eval_shape(functools.partial(chunk_columns, group=group, scale=0.1), columns, k, v, *rest)


def test_a_chunk_reads_its_heads_out_of_padded_columns():
    """No copy of the queries is made for it."""
    pytest.importorskip("absl", reason="jax imports Mosaic GPU only beside absl-py")
    _, *rest = chunk_arguments(K=2)
    call = jax.jit(functools.partial(chunk_columns, group=3, scale=0.1))
    lowered = call.trace(abstract(128, 2, 8, 64), *rest).lower(lowering_platforms=("cuda",))
    assert (lowered.out_info.shape, lowered.out_info.dtype) == ((128, 6, 64), jnp.bfloat16)
    (kernel,) = (line for line in lowered.as_text().splitlines() if "custom_call @mosaic_gpu" in line)
    assert "(tensor<128x2x8x64xbf16>, " in kernel


def test_a_schedule_for_other_pages_or_rows_is_refused():
    q, k, v, _, _ = decode_arguments()
    for page_size, rows, says in ((64, 8, "items of 8 numbers for 8 rows"), (128, 7, "items of 6 numbers for 7 rows")):
        schedule = scheduled(jnp.zeros((rows, 4), jnp.int32), jnp.zeros((rows,), jnp.int32), page_size)
        with pytest.raises(ValueError, match=says):
            jax.eval_shape(lambda *a, s=schedule: decode_attention(*a, s, scale=0.1), q, k, v)
    schedule = scheduled(jnp.zeros((8, 4), jnp.int32), jnp.zeros((8,), jnp.int32), 128)
    for layer, layers in ((None, 2), (2, 2), (0, 3)):
        with pytest.raises(ValueError, match=f"layer {layer} of 16 pages of {layers} layers"):
            decode_attention(*map(zeros, (q, k, v)), schedule, scale=0.1, layer=layer, layers=layers)
    with pytest.raises(ValueError, match=r"most_items=7 is less than one for each of 8 rows"):
        check_schedule([1] * 8, 24, 128, 0, 7)
    with pytest.raises(ValueError, match=r"they must be \[S, P\] and \[S\]"):
        scheduled(jnp.zeros((8, 4), jnp.int32), jnp.zeros((7,), jnp.int32), 128)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (decoded, decode_arguments(S=32, H=32, K=8)),
        (functools.partial(decoded, softcap=30.0, window=300), decode_arguments(H=4, d=128, page_size=64)),
        (chunked, chunk_arguments(T=128, H=16, K=8, d=128)),
        (functools.partial(chunked, softcap=30.0, window=300), chunk_arguments(H=6, page_size=1024, P=1)),
    ],
    ids=["decode", "decode, softcap and window", "chunk", "chunk, softcap, ring, odd group"],
)
def test_the_kernels_lower_for_cuda(function, arguments):
    """Without a GPU: layouts and signatures of this jax, with its warnings as errors."""
    pytest.importorskip("absl", reason="jax imports Mosaic GPU only beside absl-py")
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
    assert lowered.out_info.shape == arguments[0].shape
    assert lowered.out_info.dtype == jnp.bfloat16


@pytest.mark.parametrize(("function", "arguments"), [(decoded, decode_arguments()), (chunked, chunk_arguments())])
def test_all_layers_of_stacked_pages_run_the_same_kernels(function, arguments):
    """The whole arrays and the number of a layer, so that what is lowered once is read at a layer's pages."""
    pytest.importorskip("absl", reason="jax imports Mosaic GPU only beside absl-py")
    q, k, v, *rest = arguments

    def layers(q, k, v, *rest):
        for layer in range(4):
            q = function(q, k, v, *rest, layer=layer, layers=4)
        return q

    text = jax.jit(layers).trace(q, k, v, *rest).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == (2 if function is decoded else 1)
