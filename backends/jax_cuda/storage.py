"""The KV arrays of an engine: per-layer leaves, donated to each launch and given back by it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mlxcel.core.kv import BLOCK, FullKV, KVLayout, LayerKV, RecurrentKV, SlidingKV
from mlxcel_jax_cuda.launch import Fields
from mlxcel_jax_cuda.numerics import Numerics

Leaves = tuple[jax.Array, ...]

MOVED = 64 << 20
"""Bytes of pages that go to the host or come from it at once. A page that is larger goes alone."""


@attrs.frozen(cache_hash=True)
class KVArrays:
    """Which arrays hold the KV of an engine. Where a model's layers are `stacked`, which all keep every position, there
    are two in all: page p of layer l is page l * pages + p of them."""

    layout: KVLayout
    stacked: bool

    @property
    def layers(self) -> int:
        """Of an array of full layers."""
        return len(self.layout.spec.layers) if self.stacked else 1


def make_storage(arrays: KVArrays, numerics: Numerics) -> Leaves:
    """Zeros for every layer in turn: keys [pages, K, page_size, dk] and values of a full layer, keys
    [slots, K, ring, dk] and values of one with a window, arrays [2, slots, …] float32 of a recurrent one. Of stacked
    layers keys [L * pages, K, page_size, dk] and values."""
    made: list[jax.Array] = []
    layout, layers = arrays.layout, arrays.layout.spec.layers
    for kv in layers[:: arrays.layers]:
        if isinstance(kv, RecurrentKV):
            made += [jnp.zeros((2, layout.slots, *shape), jnp.float32) for shape in kv.shapes]
        else:
            count, size = _pages(layout, kv)
            count *= arrays.layers
            made += [jnp.zeros((count, kv.kv_heads, size, dim), numerics.compute) for dim in (kv.k_dim, kv.v_dim)]
    return tuple(made)


def _pages(layout: KVLayout, kv: FullKV | SlidingKV) -> tuple[int, int]:
    """How many pages a layer has, and of how many positions. A ring is one page of its slot."""
    if isinstance(kv, FullKV):
        return layout.pages, layout.page_size
    return layout.slots, kv.ring(context=layout.context, chunk=layout.chunk)


@attrs.frozen
class LayerPlace:
    """Where the leaves of a layer are among all of them; and which of the layers it is that they hold, where they hold
    `layers` of so many `pages`."""

    kv: LayerKV
    first: int
    count: int
    layer: int | None = None
    layers: int = 1
    pages: int = 0

    def own_tables(self, fields: Fields) -> jax.Array:
        """int32 [S, P], the pages of each row, by their numbers in a layer. A ring is one page, that of the slot."""
        tables: jax.Array = fields.slots[:, None] if isinstance(self.kv, SlidingKV) else fields.page_tables
        return tables

    def tables(self, fields: Fields) -> jax.Array:
        """The same by their numbers in the leaves."""
        tables = self.own_tables(fields)
        return jnp.where(tables < 0, tables, tables + self.layer * self.pages) if self.layer else tables


@functools.lru_cache(maxsize=64)
def places(arrays: KVArrays) -> tuple[LayerPlace, ...]:
    """One entry a layer."""
    layout, layers = arrays.layout, arrays.layout.spec.layers
    if arrays.stacked:
        return tuple(LayerPlace(kv, 0, 2, layer, len(layers), layout.pages) for layer, kv in enumerate(layers))
    found, first = [], 0
    for kv in layers:
        count = len(kv.shapes) if isinstance(kv, RecurrentKV) else 2
        found.append(LayerPlace(kv, first, count))
        first += count
    return tuple(found)


def full_leaves(arrays: KVArrays) -> tuple[int, ...]:
    """Places of the keys and values of each full layer in turn, or of all that are stacked."""
    firsts = dict.fromkeys(place.first for place in places(arrays) if isinstance(place.kv, FullKV))
    return tuple(first + i for first in firsts for i in (0, 1))


def ring_leaves(arrays: KVArrays) -> tuple[int, ...]:
    """Places of the keys and values of each layer with a window in turn."""
    return tuple(p.first + i for p in places(arrays) if isinstance(p.kv, SlidingKV) for i in (0, 1))


def by_layer(arrays: KVArrays, pages: jax.Array) -> jax.Array:
    """Pages [L * pages, …] of full layers as [L, pages, …]."""
    return pages.reshape(arrays.layers, -1, *pages.shape[1:])


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
def copy_pages(arrays: KVArrays, leaves: Leaves, copies: jax.Array) -> Leaves:
    """copies int32 [N, 3], (from, to, positions): the first positions of a page, in every full layer. A `to` behind the
    last page copies nothing."""
    source, target, count = copies[:, 0], copies[:, 1], copies[:, 2]
    changed = list(leaves)
    for place in full_leaves(arrays):
        pages = by_layer(arrays, leaves[place])
        fresh = jnp.arange(pages.shape[3])[:, None] < count[:, None, None, None]
        kept = jnp.where(fresh, pages[:, source], pages.at[:, target].get(mode="clip"))
        # Apart from the write, which else is one with the reads and done in a copy of all pages.
        kept = lax.optimization_barrier(kept)  # type: ignore[no-untyped-call]
        written = pages.at[:, target].set(kept, mode="drop", wrap_negative_indices=False)
        changed[place] = written.reshape(leaves[place].shape)
    return tuple(changed)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def clear_spoilt(arrays: KVArrays, leaves: Leaves, pages: jax.Array, slot: jax.Array) -> Leaves:
    """What is not finite becomes 0: on the pages of a row, int32 [P] with -1 behind the last, and in the rings and the
    state of its slot, which may lie behind the last one. One page after the other, so that it takes no memory."""
    full = full_leaves(arrays)

    def page(number: jax.Array, chosen: Leaves) -> Leaves:
        at = pages[number]
        return tuple(lax.dynamic_update_slice_in_dim(c, _finite(c[:, at][:, None]), at, 1) for c in chosen)

    changed = list(leaves)
    chosen = tuple(by_layer(arrays, leaves[place]) for place in full)
    cleared = lax.fori_loop(0, jnp.sum(pages >= 0), page, chosen)
    for place, leaf in zip(full, cleared, strict=True):
        changed[place] = leaf.reshape(leaves[place].shape)
    for each in places(arrays):
        for place in range(each.first, each.first + each.count):
            if not isinstance(each.kv, FullKV):
                where = changed[place].at[(slice(None), slot) if isinstance(each.kv, RecurrentKV) else slot]
                changed[place] = where.set(_finite(where.get(mode="fill", fill_value=0)), mode="drop")
    return tuple(changed)


def _finite(values: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(values), values, 0)


@functools.partial(jax.jit, static_argnums=0)
def take_rings(arrays: KVArrays, leaves: Leaves, slot: jax.Array) -> Leaves:
    """The rings of a slot, int32 [1]: keys and values [1, K, ring, d] of each layer that has one."""
    return tuple(leaves[place][slot] for place in ring_leaves(arrays))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def put_rings(arrays: KVArrays, leaves: Leaves, slot: jax.Array, values: Leaves) -> Leaves:
    """The other way."""
    changed = list(leaves)
    for place, value in zip(ring_leaves(arrays), values, strict=True):
        changed[place] = leaves[place].at[slot].set(value.astype(leaves[place].dtype))
    return tuple(changed)


def pages_to_host(arrays: KVArrays, leaves: Leaves, pages: np.ndarray) -> list[np.ndarray]:
    """These pages, int32 [N]: keys and values [N, K, page_size, d] of each full layer in turn. A part after another,
    so that the device needs no room for all of them."""
    taken = []
    for place in full_leaves(arrays):
        leaf = leaves[place]
        out = np.empty((arrays.layers * len(pages), *leaf.shape[1:]), leaf.dtype)
        for first, own, at in _parts(arrays, leaf, pages):
            out[first : first + own] = np.asarray(_take_pages(leaf, at))[:own]
        taken.append(out.reshape(arrays.layers, len(pages), *leaf.shape[1:]))
    pairs = zip(taken[::2], taken[1::2], strict=True)
    return [array[layer] for pair in pairs for layer in range(arrays.layers) for array in pair]


def pages_from_host(
    arrays: KVArrays, leaves: Leaves, pages: np.ndarray, values: Sequence[np.ndarray]
) -> Iterator[Leaves]:
    """The leaves, again and again, with more of such values on these pages, at last with all. Those given before are
    donated: whoever holds the KV holds the newest."""
    changed, count = list(leaves), 2 * arrays.layers
    for number, place in enumerate(full_leaves(arrays)):
        layers = values[number // 2 * count :][:count][number % 2 :: 2]
        joined = np.concatenate(layers)
        for first, own, at in _parts(arrays, changed[place], pages):
            part = np.zeros((len(at), *joined.shape[1:]), joined.dtype)
            part[:own] = joined[first : first + own]
            changed[place] = _put_pages(changed[place], at, part)
            yield tuple(changed)


def _parts(arrays: KVArrays, leaf: jax.Array, pages: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Pages of all layers of a leaf by their numbers in it, MOVED bytes at a time: the place of the first, how many
    there are, and int32 [n], n a power of two, of which the rest lie behind the last page."""
    count = leaf.shape[0] // arrays.layers
    places = (np.arange(arrays.layers, dtype=np.int32)[:, None] * count + pages).reshape(-1)
    most = max(1, MOVED // (leaf.nbytes // leaf.shape[0]))
    width = min(1 << (most.bit_length() - 1), 1 << (len(places) - 1).bit_length())
    for first in range(0, len(places), width):
        own = places[first : first + width]
        yield first, len(own), np.pad(own, (0, width - len(own)), constant_values=leaf.shape[0])


@jax.jit
def _take_pages(leaf: jax.Array, places: jax.Array) -> jax.Array:
    """[n, K, page_size, d]; behind the last page whatever."""
    return leaf.at[places].get(mode="clip")


@functools.partial(jax.jit, donate_argnums=0)
def _put_pages(leaf: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    return leaf.at[places].set(values.astype(leaf.dtype), mode="drop", wrap_negative_indices=False)


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
