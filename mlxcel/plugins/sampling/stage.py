"""What a stage of the chain is: a row's use of it, its arrays for a step, and its function over [R, V]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry
from mlxcel.plugins.sampling.history import History


@attrs.define(eq=False)
class RowState:
    """A row's sampler state. It changes in `ChainSampler.commit` alone (spec E11)."""

    spec: SequenceSpec
    history: History
    prepared: Mapping[str, Any]
    """By the name of a stage: what it made of the row's parameters. A stage the row does not use has no entry."""
    mu: float = 0.0  # mirostat's running bound of surprise
    adaptive: tuple[float, float] = (0.0, 0.0)  # adaptive-p's weighted sum and weight


class Stage(Protocol):
    """One step of the chain. A row that does not use it passes bit for bit, by selection (spec S3)."""

    @property
    def name(self) -> str:
        """A name of its own. What stands before a dot is what reports call it."""
        ...

    @property
    def foreign(self) -> str | None:
        """The name of the logits processor that `apply` runs; None for stages that come with the chain, which make no
        NaN. The chain looks at what a foreign stage leaves, so that a fault is told by its name (spec S45)."""
        ...

    @property
    def lists(self) -> Mapping[str, int]:
        """Of its arrays those that are lists, [R, W], and what stands behind the end of one: another W changes no bit.
        A foreign stage has none."""
        ...

    def prepare(self, spec: SequenceSpec) -> Any | None:
        """Once a row, at `open`: what this row needs, None where it does not use the stage. RequestError names a field
        that cannot be honoured."""
        ...

    def closed(self, prepared: Any) -> bool:
        """Whether a draw may be in flight when the next one is packed: the arrays and `Carry` say all there is."""
        ...

    def pack(self, rows: Sequence[RowState], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        """Arrays [R, …] for a step that has the stage, by names that begin with the stage's. Their shapes come from a
        small closed set, so that values never choose an executable."""
        ...

    def apply(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        """z float32 [R, V] -> float32 [R, V]. Pure array-API code over all rows."""
        ...
