"""Mistakes in the engine's own parts, one each, for as long as a test lasts: what `engine-parity` must see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from mlxcel.core import packing
from mlxcel.core.plan import CARRY, Piece
from mlxcel.plugins.kv.page_pool import PagePool
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.kv.prefix_index import PrefixIndex
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.plugins.sampling.dry import DryUse
from mlxcel.plugins.sampling.history import History

Mistake = Callable[[pytest.MonkeyPatch], None]


def second_page(patch: pytest.MonkeyPatch) -> None:
    """Of rows on more than two pages the second entry of the table is that of the third."""
    right = packing._page_tables

    def wrong(rows: Any, ends: Any, kv: Any) -> np.ndarray:
        table = right(rows, ends, kv).copy()
        if kv.name == "paged" and table.shape[1] > 2:
            table[:, 1] = np.where(table[:, 2] < 0, table[:, 1], table[:, 2])
        return table

    patch.setattr(packing, "_page_tables", wrong)


def forgotten_chunks(patch: pytest.MonkeyPatch) -> None:
    """Penalties know the last piece of a prompt alone."""
    right = packing._asked

    def wrong(rows: Any, parts: Any, drawing: Any, *more: Any) -> Any:
        for row, part, draws in zip(rows, parts, drawing, strict=True):
            if draws and isinstance(part, Piece):
                span = part.plan.pieces[part.index]
                row.sampler_state.history = History(row.spec.prompt_ids[span.start : span.end])
        return right(rows, parts, drawing, *more)

    patch.setattr(packing, "_asked", wrong)


def no_breakers(patch: pytest.MonkeyPatch) -> None:
    """A scheduler's rows have no breakers of DRY."""
    right = DryUse.losses

    def wrong(self: DryUse, history: np.ndarray) -> Any:
        return right(attrs.evolve(self, breakers=None) if _scheduled() else self, history)

    patch.setattr(DryUse, "losses", wrong)


def forgotten_newest(patch: pytest.MonkeyPatch) -> None:
    """A step that runs ahead has no penalties on the token that is in flight."""
    right = ChainSampler.pack

    def wrong(self: Any, states: Any, positions: Any, pending: Any, **more: Any) -> Any:
        return right(self, states, positions, [False] * len(states), **more)

    patch.setattr(ChainSampler, "pack", wrong)


def stale_token(patch: pytest.MonkeyPatch) -> None:
    """A step that runs ahead is fed the newest token that the host knows, and not the one in flight."""
    right = packing._token_ids

    def wrong(rows: Any, parts: Any, starts: Any, query_start: np.ndarray) -> np.ndarray:
        ids = right(rows, parts, starts, query_start)
        for row, part, first in zip(rows, parts, query_start, strict=False):
            if not isinstance(part, Piece) and ids[first] == CARRY and row.output:
                ids[first] = row.output[-1]
        return ids

    patch.setattr(packing, "_token_ids", wrong)


def mixed_seeds(patch: pytest.MonkeyPatch) -> None:
    """Rows of a step draw with each other's seeds."""
    right = ChainSampler.pack

    def wrong(self: Any, *arguments: Any, **more: Any) -> Any:
        packed = right(self, *arguments, **more)
        seeds = {name: np.roll(packed.params[name], 1) for name in ("seed_low", "seed_high") if name in packed.params}
        return attrs.evolve(packed, params={**packed.params, **seeds})

    patch.setattr(ChainSampler, "pack", wrong)


def written_while_shared(patch: pytest.MonkeyPatch) -> None:
    """A page that others hold is written to, and not copied before."""
    right = PagedKV.reserve

    def wrong(self: Any, wants: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(PagePool, "holders", lambda self, page: 1)
            right(self, wants)

    patch.setattr(PagedKV, "reserve", wrong)


def other_salt(patch: pytest.MonkeyPatch) -> None:
    """The prompt cache does not look at the salt."""
    for name in ("holds", "walk", "insert"):
        patch.setattr(PrefixIndex, name, _saltless(getattr(PrefixIndex, name)))


def last_bits(patch: pytest.MonkeyPatch) -> None:
    """Logits of several rows differ from those of a lone one by rounding, which changes no token."""
    right = ChainSampler.draw

    def wrong(self: Any, xp: Any, logits: Any, *more: Any) -> Any:
        return right(self, xp, logits * np.float32(1 + 2e-7) if len(logits) > 1 else logits, *more)

    patch.setattr(ChainSampler, "draw", wrong)


def _saltless(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, key, *more, **named: right(self, attrs.evolve(key, salt=None), *more, **named)


def _scheduled() -> bool:
    return threading.current_thread() is not threading.main_thread()
