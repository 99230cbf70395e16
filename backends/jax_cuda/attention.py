"""Causal attention over page tables as XLA programs: one form for full layers and windows, dense and paged storage.

A tile is Q consecutive tokens of one row. It walks over the key blocks [0, 128), [128, 256) … of absolute positions;
each block gives one partial (maximum, sum, weighted values), and partials are merged in their order. A block of which a
token sees nothing leaves its sums as they are, bit for bit, so a token's result follows from its own position alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel.core.kv import BLOCK

MASKED = -3e38
"""Score of a position that is not seen. Finite, so that no difference of two is NaN."""
FLOOR = -1e30
"""Least maximum of a block: far above MASKED, so that the weight of what is masked is exactly 0."""

Fetch = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(row, number of a block) -> keys [K, 128, dk] and values [K, 128, dv] of those positions."""


def attend(
    q: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    fetch: Fetch,
    *,
    scale: float,
    softcap: float,
    window: int | None,
    sinks: jax.Array | None = None,
    one_by_one: bool,
) -> jax.Array:
    """q [S, W, K, G, dk] of tokens at `positions` int32 [S, W], -1 for padding -> float32 [S, W, K, G, dv].

    Row s sees positions below seq_lens[s]. sinks: float32 [K, G], a score of each head beside those of positions. With
    `one_by_one` rows run one after the other, each over no more blocks than it has; else all at once.
    """

    def tile(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        row, queries, at = args
        own = functools.partial(fetch, row)
        return _tile(queries, at, seq_lens[row], own, scale=scale, softcap=softcap, window=window, sinks=sinks)

    args = (jnp.arange(q.shape[0], dtype=jnp.int32), q, positions)
    return lax.map(tile, args) if one_by_one else jax.vmap(lambda *each: tile(each))(*args)


def _tile(
    q: jax.Array,
    positions: jax.Array,
    length: jax.Array,
    fetch: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    *,
    scale: float,
    softcap: float,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """q [Q, K, G, dk] -> float32 [Q, K, G, dv]."""
    Q, K, G, _ = q.shape
    last = jnp.max(positions)
    oldest = jnp.zeros_like(positions) if window is None else positions - (window - 1)
    first = jnp.max(jnp.where(positions >= 0, -oldest, -last))
    low = jnp.maximum(-first, 0) // BLOCK
    queries = q.transpose(1, 0, 2, 3).reshape(K, Q * G, -1)
    value_dim = jax.eval_shape(fetch, jnp.int32(0))[1].shape[-1]

    def per_query(values: jax.Array) -> jax.Array:
        """[Q, 128] -> [1, Q G, 128]"""
        return jnp.repeat(values, G, axis=0)[None]

    def add_block(number: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        maximum, total, mixed = sums
        keys, values = fetch(number)
        at = number * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = (at[None] <= positions[:, None]) & (at[None] >= oldest[:, None])
        # By selection: what lies behind a row's end is whatever a page held before, NaN included.
        values = jnp.where((at < length)[None, :, None], values, 0)
        scores = jnp.einsum("kqd,kpd->kqp", queries, keys, preferred_element_type=jnp.float32) * jnp.float32(scale)
        if softcap:
            scores = jnp.float32(softcap) * jnp.tanh(scores / jnp.float32(softcap))
        scores = jnp.where(per_query(seen), scores, MASKED)
        own = jnp.maximum(jnp.max(scores, axis=-1), FLOOR)
        weights = jnp.exp(scores - own[..., None])
        part = jnp.einsum("kqp,kpd->kqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        new = jnp.maximum(maximum, own)
        before, here = jnp.exp(maximum - new), jnp.exp(own - new)
        used = per_query(jnp.any(seen, axis=-1, keepdims=True))[..., 0]
        return (
            jnp.where(used, new, maximum),
            jnp.where(used, total * before + jnp.sum(weights, axis=-1) * here, total),
            jnp.where(used[..., None], mixed * before[..., None] + part * here[..., None], mixed),
        )

    start = (
        jnp.full((K, Q * G), FLOOR, jnp.float32),
        jnp.zeros((K, Q * G), jnp.float32),
        jnp.zeros((K, Q * G, value_dim), jnp.float32),
    )
    maximum, total, mixed = lax.fori_loop(low, last // BLOCK + 1, add_block, start)
    if sinks is not None:
        beside = jnp.tile(sinks, (1, Q))
        new = jnp.maximum(maximum, beside)
        before = jnp.exp(maximum - new)
        total, mixed = total * before + jnp.exp(beside - new), mixed * before[..., None]
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    by_query: jax.Array = mixed.reshape(K, Q, G, value_dim).transpose(1, 0, 2, 3)
    return by_query
