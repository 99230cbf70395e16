"""The KV arrays of an engine: per-layer leaves, donated to each launch and given back by it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel.core.kv import BLOCK, FullKV, KVLayout, LayerKV, RecurrentKV, SlidingKV
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.numerics import Numerics

Leaves = tuple[jax.Array, ...]


def make_storage(layout: KVLayout, numerics: Numerics) -> Leaves:
    """Zeros for every layer in turn: keys [pages, K, page_size, dk] and values of a full layer, keys
    [slots, K, ring, dk] and values of one with a window, arrays [2, slots, …] float32 of a recurrent one."""
    made: list[jax.Array] = []
    for kv in layout.spec.layers:
        if isinstance(kv, RecurrentKV):
            made += [jnp.zeros((2, layout.slots, *shape), jnp.float32) for shape in kv.shapes]
        else:
            count, size = _pages(layout, kv)
            made += [jnp.zeros((count, kv.kv_heads, size, dim), numerics.compute) for dim in (kv.k_dim, kv.v_dim)]
    return tuple(made)


def _pages(layout: KVLayout, kv: FullKV | SlidingKV) -> tuple[int, int]:
    """How many pages a layer has, and of how many positions. A ring is one page of its slot."""
    if isinstance(kv, FullKV):
        return layout.pages, layout.page_size
    return layout.slots, kv.ring(context=layout.context, chunk=layout.chunk)


@attrs.frozen
class LayerPlace:
    """Where the leaves of a layer are among all of them."""

    kv: LayerKV
    first: int
    count: int


@functools.lru_cache(maxsize=64)
def places(layout: KVLayout) -> tuple[LayerPlace, ...]:
    """One entry a layer."""
    found, first = [], 0
    for kv in layout.spec.layers:
        count = len(kv.shapes) if isinstance(kv, RecurrentKV) else 2
        found.append(LayerPlace(kv, first, count))
        first += count
    return tuple(found)


def full_leaves(layout: KVLayout) -> list[int]:
    """Places of the keys and values of each full layer in turn."""
    return [p.first + i for p in places(layout) if isinstance(p.kv, FullKV) for i in (0, 1)]


def ring_leaves(layout: KVLayout) -> list[int]:
    """Places of the keys and values of each layer with a window in turn."""
    return [p.first + i for p in places(layout) if isinstance(p.kv, SlidingKV) for i in (0, 1)]


def tables_of(kv: FullKV | SlidingKV, fields: Fields) -> jax.Array:
    """int32 [S, P], the pages of each row in a layer of this kind. A ring is one page, that of the slot."""
    tables: jax.Array = fields.page_tables if isinstance(kv, FullKV) else fields.slots[:, None]
    return tables


def write(pages: jax.Array, tables: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    """`pages` [pages, K, size, d] with values [S, W, K, d] at `positions` [S, W] of the rows. Padding goes nowhere.

    A position behind the last page of a row's table lies on its first again, as in a ring.
    """
    count, _, size, _ = pages.shape
    real = positions >= 0
    place = jnp.where(real, positions, 0) % (tables.shape[1] * size)
    page = jnp.take_along_axis(tables, place // size, axis=1)
    # Every padding token has a place of its own behind the last page, so that the places are unique and none is used.
    behind = count + jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
    page = jnp.where(real & (page >= 0), page, behind)
    return pages.at[page, :, place % size].set(
        values.astype(pages.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def block(pages: jax.Array, table: jax.Array, number: jax.Array) -> jax.Array:
    """Positions [128 number, 128 number + 128) of one row, [K, 128, d]. table int32 [P]. What no page holds is whatever
    page 0 has there: it is masked by its position."""
    _, heads, size, dim = pages.shape
    start = number * BLOCK % (table.shape[0] * size)
    if size >= BLOCK:
        page = jnp.maximum(table[start // size], 0)
        found = jax.lax.dynamic_slice(pages, (page, 0, start % size, 0), (1, heads, BLOCK, dim))
        return found[0]
    count = BLOCK // size
    held = jnp.maximum(jax.lax.dynamic_slice(table, (start // size,), (count,)), 0)
    return pages[held].swapaxes(0, 1).reshape(heads, BLOCK, dim)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def copy_pages(layout: KVLayout, leaves: Leaves, copies: jax.Array) -> Leaves:
    """copies int32 [N, 3], (from, to, positions): the first positions of a page, in every full layer. A `to` behind the
    last page copies nothing."""
    source, target, count = copies[:, 0], copies[:, 1], copies[:, 2]
    changed = list(leaves)
    for place in full_leaves(layout):
        pages = leaves[place]
        fresh = jnp.arange(pages.shape[2])[None, None, :, None] < count[:, None, None, None]
        kept = jnp.where(fresh, pages[source], pages.at[target].get(mode="clip"))
        changed[place] = pages.at[target].set(kept, mode="drop", wrap_negative_indices=False)
    return tuple(changed)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def clear_spoilt(layout: KVLayout, leaves: Leaves, pages: jax.Array, slot: jax.Array) -> Leaves:
    """What is not finite becomes 0: on the pages of a row, int32 [P] with -1 behind the last, and in the rings and the
    state of its slot, which may lie behind the last one. One page after the other, so that it takes no memory."""
    full = full_leaves(layout)

    def page(number: jax.Array, chosen: Leaves) -> Leaves:
        at = pages[number]
        return tuple(lax.dynamic_update_slice_in_dim(c, _finite(c[at][None]), at, 0) for c in chosen)

    changed = list(leaves)
    cleared = lax.fori_loop(0, jnp.sum(pages >= 0), page, tuple(leaves[place] for place in full))
    for place, leaf in zip(full, cleared, strict=True):
        changed[place] = leaf
    for each in places(layout):
        for place in range(each.first, each.first + each.count):
            if not isinstance(each.kv, FullKV):
                where = changed[place].at[(slice(None), slot) if isinstance(each.kv, RecurrentKV) else slot]
                changed[place] = where.set(_finite(where.get(mode="fill", fill_value=0)), mode="drop")
    return tuple(changed)


def _finite(values: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(values), values, 0)


@functools.partial(jax.jit, static_argnums=0)
def take(places_: tuple[int, ...], leaves: Leaves, rows: jax.Array) -> Leaves:
    """Rows of the first axis of some leaves."""
    return tuple(leaves[place][rows] for place in places_)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def put(places_: tuple[int, ...], leaves: Leaves, rows: jax.Array, values: Leaves) -> Leaves:
    """The other way."""
    changed = list(leaves)
    for place, value in zip(places_, values, strict=True):
        changed[place] = leaves[place].at[rows].set(value.astype(leaves[place].dtype))
    return tuple(changed)


def routes(layout: KVLayout, *, kernel: bool) -> tuple[str, ...]:
    """The attention route of each layer (spec 2.7)."""
    way = "kernel" if kernel else "gather"
    names = {FullKV: f"{'paged' if layout.paged else 'dense'}_{way}", SlidingKV: "ring_gather"}
    return tuple(names.get(type(kv), "state_scan") for kv in layout.spec.layers)


def as_copies(copies: np.ndarray, pages: int, width: int) -> np.ndarray:
    """int32 [N, 3] padded to `width` rows that copy nothing."""
    padded = np.zeros((width, 3), np.int32)
    padded[:, 1] = pages
    padded[: len(copies)] = copies
    return padded


def host_arrays(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(array) for array in arrays]
