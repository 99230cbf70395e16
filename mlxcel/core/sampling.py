"""What a sampler is: per-row parameters packed into arrays, and one pure function over the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.request import SequenceSpec


class Drawn(NamedTuple):
    """Output of Sampler.draw, arrays of the backend's own kind. Fields and their order as in StepResult."""

    tokens: Any  # [R] int32
    status: Any  # [R] int32
    logprobs: Any  # [R] float32, or None
    top_ids: Any  # [R, n] int32, or None
    top_logprobs: Any  # [R, n] float32, or None
    observed: Any = None  # [R] float32: what `commit` wants to know of the drawn token beside its id, or None


class Carry(NamedTuple):
    """What a backend keeps of each row's newest draw, for a step that is submitted before that draw was read.

    It counts for the rows that `pack` was told are pending; for the others it is of an older draw.
    """

    tokens: Any  # [R] int32
    observed: Any  # [R] float32, as in Drawn


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

    def closed(self, state: Any) -> bool:
        """Whether the row's next draw needs nothing that the host learns from a token in flight, but what `Carry` holds
        (spec C51). The engine refuses a step ahead for a row that is not."""
        ...

    def pack(self, states: Sequence[Any], positions: Sequence[int], pending: Sequence[bool]) -> SamplingArrays:
        """Arrays for the R drawing rows; positions[r] is q = P + G, the position of the token being drawn. Where
        pending[r] the token at q - 1 is in flight: the state does not know it, the draw gets it as Carry."""
        ...

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        """Draw one token a row from logits [R, V]. Pure array-API code: NumPy runs it, JAX traces it. A row's result
        depends on its own logits, parameters and carry only, bit for bit. `sampling.params` may hold arrays of either
        kind."""
        ...

    def commit(self, state: Any, token: int, observed: float | None) -> None:
        """The token was read, resolved and appended; `observed` is what its draw said of it."""
        ...
