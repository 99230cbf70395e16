"""What a sampler is: per-row parameters packed into arrays, and one pure function over the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.request import SequenceSpec


class Drawn(NamedTuple):
    """Output of Sampler.draw, arrays of the backend's own kind. Fields as in StepResult."""

    tokens: Any  # [R] int32
    status: Any  # [R] int32
    logprobs: Any  # [R] float32, or None
    top_ids: Any  # [R, n] int32, or None
    top_logprobs: Any  # [R, n] float32, or None


@runtime_checkable
class Sampler(Protocol):
    """One sampler serves every client. Host state is per row and changes only in `commit` (spec E11)."""

    @property
    def name(self) -> str: ...

    @property
    def stage_order(self) -> tuple[str, ...]:
        """All stages in the order they run, for reports."""
        ...

    def open(self, spec: SequenceSpec) -> Any:
        """A row's sampler state."""
        ...

    def pack(self, states: Sequence[Any], positions: Sequence[int]) -> SamplingArrays:
        """Arrays for the R drawing rows; positions[r] is q = P + G, the position of the token being drawn."""
        ...

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays) -> Drawn:
        """Draw one token a row from logits [R, V]. Pure array-API code: NumPy runs it, JAX traces it. A row's result
        depends on its own logits and parameters only, bit for bit. `sampling.params` may hold arrays of either kind."""
        ...

    def commit(self, state: Any, token: int) -> None:
        """The token was read, resolved and appended."""
        ...
