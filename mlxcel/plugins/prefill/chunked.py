"""Prompts cut at absolute multiples of the chunk, so that a cache hit runs the very pieces a miss would (spec 3)."""

from __future__ import annotations

import itertools

import numpy as np

from mlxcel.core.backend import BackendCaps, Level
from mlxcel.core.plan import PrefillPlan, Span, id_bytes
from mlxcel.errors import UsageError


class ChunkedPlanner:
    """Builds plans of one chunk size. Equal inputs give equal plans."""

    def __init__(self, *, chunk: int, level: Level, caps: BackendCaps) -> None:
        if chunk < 1:
            raise UsageError(f"the prefill chunk must be 1 token or more, not {chunk}", hint="the default is 2048")
        self.chunk = chunk
        self._level = level
        self._caps = caps

    def build(
        self,
        ids: np.ndarray,
        adopted: int = 0,
        *,
        boundary: int | None = None,
        draw: bool = True,
        adopted_prefilled: bool = True,
    ) -> PrefillPlan:
        """A plan for prompt ids [P] of which `adopted` positions are in KV already. At least one token is computed.

        `boundary` adds one cut (a place to snapshot state). `adopted_prefilled` says whether every adopted position was
        computed by a piece of a plan (spec V15).
        """
        total = len(ids)
        if total < 1:
            raise ValueError("a plan needs at least one token")
        granule = self.chunk if self._level == "R1" else 1
        start = min(adopted, total - 1) // granule * granule
        first = (start // self.chunk + 1) * self.chunk
        cuts = {start, total, *range(first, total, self.chunk)}
        if boundary is not None and start < boundary < total:
            cuts.add(boundary)
        edges = sorted(cuts)
        pieces = tuple(
            Span(begin, end, self._caps.piece_width(end - begin, self._level))
            for begin, end in itertools.pairwise(edges)
        )
        return PrefillPlan(
            ids=id_bytes(ids),
            start=start,
            pieces=pieces,
            level=self._level,
            draw=draw,
            boundary=boundary if boundary in cuts else None,
            adopted_prefilled=adopted_prefilled,
        )
