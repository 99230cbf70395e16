"""What of a step's sampling stays as long as its rows do, so that most steps pack only what moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from mlxcel.plugins.sampling.pack import CARRYING, DRAW, FEATURES, Drawing, pack_carried, pack_drawing
from mlxcel.plugins.sampling.stage import RowState, Stage


@attrs.frozen(eq=False)
class Standing:
    """Of the R rows that draw: a function of what was prepared when they were opened, so it holds for the very same
    rows in the same order, and for no others. Its arrays go out with each step, read-only."""

    rows: list[RowState]
    active: tuple[Stage, ...]  # logit stages that a row uses
    stages: tuple[str, ...]
    arrays: Mapping[str, np.ndarray]
    carries: bool  # whether a row has numbers that move from token to token
    top_logprobs: int | None

    @classmethod
    def of(cls, rows: Sequence[RowState], stages: Sequence[Stage], vocab: int) -> Standing:
        wanted = set[str]().union(*(row.prepared for row in rows))
        active = tuple(stage for stage in stages if stage.name in wanted)
        drawings: list[Drawing] = [row.prepared[DRAW] for row in rows]
        used = frozenset[str]().union(*(drawing.features for drawing in drawings))
        lists = [drawing.listed for drawing in drawings if drawing.listed is not None]
        arrays = pack_drawing(drawings, vocab)
        arrays |= pack_carried(rows, arrays["adaptive_decay"], np.zeros(len(rows), np.bool_))
        for array in arrays.values():
            array.flags.writeable = False
        return cls(
            rows=list(rows),
            active=active,
            stages=(*(stage.name for stage in active), *(name for name in FEATURES if name in used)),
            arrays=arrays,
            carries=not used.isdisjoint(CARRYING),
            top_logprobs=max(lists) if lists else None,
        )

    def holds_for(self, rows: Sequence[RowState]) -> bool:
        return self.rows == rows  # by identity: a row equals itself alone

    def pack(self, positions: Sequence[int], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        """Arrays [R, …] of every feature, as the rows are now."""
        ahead = np.array(pending, np.bool_)
        arrays = {**self.arrays, "position": np.array(positions, np.uint32), "pending": ahead}
        if self.carries:
            arrays |= pack_carried(self.rows, self.arrays["adaptive_decay"], ahead)
        return arrays
