"""The KV arrays of an engine, float32: pages for full layers, rings and recurrent state by slot for the others."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from mlxcel.core.kv import FullKV, KVLayout, RecurrentKV, SlidingKV


@attrs.frozen(eq=False)
class Pages:
    """A full layer: keys [pages, K, page_size, dk] and values [pages, K, page_size, dv]."""

    keys: np.ndarray
    values: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.keys, self.values


@attrs.frozen(eq=False)
class Rings:
    """A layer with a window: keys [slots, K, ring, dk] and values [slots, K, ring, dv], position p at p modulo ring."""

    keys: np.ndarray
    values: np.ndarray
    window: int

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.keys, self.values


@attrs.frozen(eq=False)
class States:
    """A recurrent layer: arrays [2, slots, …], the copies that a row reads and writes in turn."""

    arrays: tuple[np.ndarray, ...]


LayerStorage = Pages | Rings | States


def make_storage(layout: KVLayout) -> list[LayerStorage]:
    """One entry a layer. np.zeros is backed on first touch, so memory follows use and not the bound."""
    made: list[LayerStorage] = []
    for kv in layout.spec.layers:
        match kv:
            case FullKV():
                keys, values = (
                    np.zeros((layout.pages, kv.kv_heads, layout.page_size, dim), np.float32)
                    for dim in (kv.k_dim, kv.v_dim)
                )
                made.append(Pages(keys, values))
            case SlidingKV():
                ring = kv.ring(context=layout.context, chunk=layout.chunk)
                keys, values = (
                    np.zeros((layout.slots, kv.kv_heads, ring, dim), np.float32) for dim in (kv.k_dim, kv.v_dim)
                )
                made.append(Rings(keys, values, kv.window))
            case RecurrentKV():
                made.append(States(tuple(np.zeros((2, layout.slots, *shape), np.float32) for shape in kv.shapes)))
    return made


def copy_pages(storage: Sequence[LayerStorage], copies: np.ndarray) -> None:
    """int32 [N, 3], (from, to, positions): the first positions of a page, in every full layer."""
    for layer in storage:
        if isinstance(layer, Pages):
            for array in layer.arrays:
                for source, target, count in copies.tolist():
                    array[target, :, :count] = array[source, :, :count]


def page_arrays(storage: Sequence[LayerStorage]) -> list[np.ndarray]:
    """Keys and values [pages, heads, page_size, width] of each full layer in turn."""
    return [array for layer in storage if isinstance(layer, Pages) for array in layer.arrays]


def ring_arrays(storage: Sequence[LayerStorage]) -> list[np.ndarray]:
    """Keys and values [slots, heads, ring, width] of each layer with a window in turn."""
    return [array for layer in storage if isinstance(layer, Rings) for array in layer.arrays]


def routes(layout: KVLayout) -> tuple[str, ...]:
    """The attention route of each layer (spec 2.7)."""
    names = {FullKV: f"ref_{'paged' if layout.paged else 'dense'}_gather", SlidingKV: "ref_ring_gather"}
    return tuple(names.get(type(kv), "ref_state_scan") for kv in layout.spec.layers)
