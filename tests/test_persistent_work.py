"""Which blocks of the persistent step attend to what, and where they find their pages."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_persistent_step import LLAMA_1B, QWEN_17B, step_of

from mlxcel_jax_cuda.kernels.attention_schedule import Tables
from mlxcel_jax_cuda.kernels.persistent_stream import Work

SIZES = pytest.mark.parametrize("sizes", [{}, LLAMA_1B, QWEN_17B], ids=["small", "llama-3.2-1b", "qwen3-1.7b"])


@pytest.mark.parametrize("sms", [9, 132])
@pytest.mark.parametrize("used", [0, 1, 2, 17, 32])
@SIZES
def test_every_item_of_every_kv_head_has_one_block(sizes, used, sms):
    """A block's items are of one KV head and follow one another. Who merges one row's partials has no more than others.
    The schedule's item n has n in its first field; all are of the last row."""
    step, blocks = step_of(**sizes, sms=sms), np.arange(sms)
    schedule = jnp.arange(max(used, 1), dtype=jnp.int32)[:, None]
    rows = jnp.asarray([[0, 0]] * 7 + [[0, used]], jnp.int32)
    work = Work(step, jnp.asarray(blocks, jnp.int32), schedule, rows, jnp.zeros(8, jnp.int32), Tables(0, 1))
    counts, found = np.asarray(work.items), []
    for n in range(counts.max()):
        (item, head), [field] = map(np.asarray, work.place(jnp.int32(n))), work.record(jnp.int32(n), 1)
        here = counts > n
        found += list(zip(item[here].tolist(), head[here].tolist(), strict=True))
        np.testing.assert_array_equal(head, blocks % step.kv_heads)
        np.testing.assert_array_equal(np.asarray(field)[here], item[here])
        np.testing.assert_array_equal(item - n, np.asarray(work.place(jnp.int32(0))[0]))
    assert sorted(found) == [(item, head) for item in range(used) for head in range(step.kv_heads)]
    sharing = sms // step.kv_heads
    assert counts.max() == -(-used // sharing)
    if sharing > step.chunks:
        assert counts[: step.kv_heads * step.chunks].max() == used // sharing


def test_fewer_multiprocessors_than_kv_heads_are_refused():
    with pytest.raises(ValueError, match="3 multiprocessors are less than one for each of 4 KV heads"):
        step_of(sms=3)


def test_pages_are_read_where_their_tables_lie():
    """In an array that has other things before and behind. What lies behind a row's last page is not the next row's."""
    tables = np.random.default_rng(3).permutation(24).reshape(8, 3).astype(np.int32)
    buffer = jnp.concatenate([jnp.full(10, -7, jnp.int32), jnp.asarray(tables.reshape(-1)), jnp.full(4, -7, jnp.int32)])
    work = Work(step_of(), jnp.int32(0), None, None, buffer, Tables(10, 3))
    found = [[int(work.page(jnp.int32(row), jnp.int32(number))) for number in range(4)] for row in range(8)]
    np.testing.assert_array_equal(found, np.concatenate([tables, tables[:, -1:]], axis=1))
