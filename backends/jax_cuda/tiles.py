"""A forward on XLA:CPU: the whole model over eight tokens, and a loop over all tokens of a launch.

The loop's body is one program over tokens that are rows of their own, each with its position, slot and page table: the
same program in every launch, be it many rows that decode or a piece of any width. So a token gets the same bits in all
of them by construction, in whatever way XLA fuses and orders what is inside (level R2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mlxcel_jax_cuda.context import JaxContext
from mlxcel_jax_cuda.launch import Fields, Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import TILE
from mlxcel_jax_cuda.storage import Leaves
from mlxcel_jax_cuda.watch import nothing_seen

_Carried = tuple[Leaves, jax.Array, jax.Array | None]


def forward_by_tiles(
    model: Model, shape: Shape, fields: Fields, token_ids: jax.Array, weights: Any, kv: Leaves
) -> tuple[Leaves, jax.Array, jax.Array | None]:
    """As the forward of a launch: the KV as it leaves it, logits float32 [R, V], and where layers are watched int32 [T]
    of each token. token_ids int32 [T].

    Tokens of a piece run behind one another: each finds the KV and the state of those before it, and of those beside it
    in its own tile, which are written before any of them attends.
    """
    places = _places(fields.logits_rows, shape)
    rows = _as_rows(fields, shape)
    count = jnp.sum(rows.positions >= 0)  # padding stands behind them

    def tile(number: jax.Array, carried: _Carried) -> _Carried:
        kv, logits, seen = carried

        def own(values: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(values, number * TILE, TILE)

        wanted = own(places)
        context = JaxContext(
            model, Fields(*map(own, rows)), own(token_ids), weights, kv, wanted=jnp.any(wanted < shape.logits)
        )
        found = model.family.forward(context, model.config).astype(jnp.float32)
        if seen is not None and context.seen is not None:
            seen = lax.dynamic_update_slice_in_dim(seen, context.seen, number * TILE, 0)
        return tuple(context.kv), logits.at[wanted].set(found, mode="drop"), seen

    logits = jnp.zeros((shape.logits, model.config.vocab_size), jnp.float32)
    seen = nothing_seen(shape.tokens) if model.numerics.watched else None
    carried: _Carried = lax.fori_loop(0, (count + TILE - 1) // TILE, tile, (kv, logits, seen))
    return carried


def _places(logits_rows: jax.Array, shape: Shape) -> jax.Array:
    """int32 [T]: the place among the R of each token's logits, R where nobody wants them. Places behind the last one
    that is wanted name token 0, which only the first can mean."""
    order = jnp.arange(shape.logits, dtype=jnp.int32)
    meant = jnp.where((logits_rows == 0) & (order > 0), shape.tokens, logits_rows)
    return jnp.full(shape.tokens, shape.logits, jnp.int32).at[meant].set(order, mode="drop")


def _as_rows(fields: Fields, shape: Shape) -> Fields:
    """Every token as a row of its own, [T, 1]. The first of a row begins with the copy of the state that the row began
    with, the others with the one that is written. `logits_rows` are those of a tile: all."""
    width = shape.width

    def each(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, width, axis=0)

    positions = fields.positions.reshape(-1, 1)
    first = jnp.arange(shape.tokens, dtype=jnp.int32) % width == 0
    writes = each(fields.state_writes)
    return Fields(
        token_ids=fields.token_ids.reshape(-1, 1),
        positions=positions,
        seq_lens=positions[:, 0] + 1,
        slots=each(fields.slots),
        state_reads=jnp.where(first, each(fields.state_reads), writes),
        state_writes=writes,
        logits_rows=jnp.arange(shape.tokens, dtype=jnp.int32) % TILE,
        page_tables=each(fields.page_tables),
    )
