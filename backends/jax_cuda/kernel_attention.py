"""Attention by the Hopper kernels: which layers they can do, and the schedule that the layers of a launch share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mlxcel.core.kv import FullKV, LayerKV, SlidingKV
from mlxcel_jax_cuda.kernels import chunk_attention, decode_attention
from mlxcel_jax_cuda.kernels.attention import HALF, HEAD_DIMS, SLOT
from mlxcel_jax_cuda.kernels.attention_schedule import Schedule, make_schedule
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.storage import LayerPlace


def by_kernel(kv: LayerKV, keys: jax.Array, heads: int) -> bool:
    """Whether the kernels can attend to these pages, [pages, K, page_size, d], with so many query heads."""
    if not isinstance(kv, FullKV | SlidingKV):
        return False
    page_size = keys.shape[2]
    return (
        kv.k_dim == kv.v_dim
        and kv.k_dim in HEAD_DIMS
        and (page_size == HALF or page_size % SLOT == 0)
        and keys.dtype == jnp.bfloat16
        and heads // kv.kv_heads <= decode_attention.MOST_COLUMNS
    )


class KernelAttention:
    """Of one launch, while it is traced."""

    def __init__(self, fields: Fields, sms: int) -> None:
        self._fields, self._sms = fields, sms
        self._schedules: dict[tuple[int, ...], Schedule] = {}

    def attend(
        self, q: jax.Array, keys: jax.Array, values: jax.Array, place: LayerPlace, *, scale: float, softcap: float = 0.0
    ) -> jax.Array:
        """q [S W, H, d], pages with this launch's keys in them, of a layer at `place` -> [S W, H, d]."""
        positions, tables = self._fields.positions, place.own_tables(self._fields)
        window = place.kv.window if isinstance(place.kv, SlidingKV) else 0
        own: Any = {"scale": scale, "softcap": softcap, "window": window, "sms": self._sms}
        own |= {"layer": place.layer, "layers": place.layers}
        if positions.shape[1] == 1:
            return decode_attention.decode_attention(
                q, keys, values, self._schedule(keys, tables, window, place.layers), **own
            )
        length = jnp.sum(positions[0] >= 0)
        return chunk_attention.chunk_attention(q, keys, values, tables[0], positions[0, 0], length, **own)

    def attend_columns(
        self,
        columns: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        layer: int,
        layers: int,
        group: int,
        scale: float,
    ) -> jax.Array:
        """Over every position of one of the stacked layers: queries [S W, K, N, d] padded as the kernels have them,
        `group` of the N real -> [S W, K * group * d]."""
        positions, tables = self._fields.positions, self._fields.page_tables
        own: Any = {"group": group, "scale": scale, "sms": self._sms, "layer": layer, "layers": layers}
        if positions.shape[1] == 1:
            mixed = decode_attention.attend_columns(
                columns, keys, values, self._schedule(keys, tables, 0, layers), **own
            )
        else:
            length = jnp.sum(positions[0] >= 0)
            mixed = chunk_attention.attend_columns(columns, keys, values, tables[0], positions[0, 0], length, **own)
        return mixed.reshape(len(mixed), -1)

    def _schedule(self, keys: jax.Array, tables: jax.Array, window: int, layers: int) -> Schedule:
        held, kv_heads, page_size, _ = keys.shape
        pages = held // layers
        key = (pages, kv_heads, page_size, window)
        if key not in self._schedules:
            self._schedules[key] = make_schedule(
                tables, self._fields.seq_lens, num_pages=pages, page_size=page_size, kv_heads=kv_heads, window=window
            )
        return self._schedules[key]
