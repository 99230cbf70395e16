"""What a sampler is: per-row parameters packed into arrays, and one pure function over the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mlxcel.core.plan import SamplingArrays
from mlxcel.core.request import SequenceSpec


class Drawn(NamedTuple):
    """Output of Sampler.draw, arrays of the backend's own kind. Fields and their order as in StepResult."""

    tokens: Any  # [R] int32
    status: Any  # [R] int32: kinds of StepResult.status in the low byte, above it what `Sampler.fault` knows to name
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

    def memoryless(self, state: Any) -> bool:
        """Whether each of the row's draws is a function of its logits and its position alone, for as long as the row
        lives: then any number of them may be in flight (spec C54), and `commit` may be left out.
        Such a row is `closed`. Filters, temperatures and seeds are; penalties, masks over what was said, and numbers
        that move from token to token are not."""
        ...

    def pack(
        self, states: Sequence[Any], positions: Sequence[int], pending: Sequence[bool], *, closed: bool = False
    ) -> SamplingArrays:
        """Arrays for the R drawing rows; positions[r] is q = P + G, the position of the token being drawn. Where
        pending[r] the token at q - 1 is in flight, of a memoryless row perhaps more before it: the state does not know
        it, the draw gets it as Carry.

        Stages and log-probabilities are those that the rows use; with `closed`, for a backend that compiles, those of
        the first of `stage_sets` that has them all (spec S44). A row draws the same bits from either, and from arrays
        in which rows are left out, repeated or in another order. An array that was handed out stays as it is; the same
        one may be handed out again, which tells that nothing of it moved.
        """
        ...

    def stage_sets(self, rows: int) -> list[SamplingArrays]:
        """All that `pack` gives with `closed` for R = `rows`, each once: its static parts, its names, shapes and dtypes
        of arrays, the cheapest first. The values are of rows that ask for nothing. What a third party's logits
        processor adds to a step is not in it, and neither is `pack_scores`."""
        ...

    def pack_scores(self, targets: np.ndarray, top: int) -> SamplingArrays:
        """Arrays for R positions of one row whose next tokens are known, targets int32 [R]: what `draw` then gives is
        `targets` for tokens, their log-probabilities by the raw logits (spec S37, S38), and at least the `top` best,
        or all V in the order of ids. `mlxcel.plugins.sampling.scoring` is that, for any sampler."""
        ...

    def draw(self, xp: Any, logits: Any, sampling: SamplingArrays, carry: Carry) -> Drawn:
        """Draw one token a row from logits [R, V]. Pure array-API code: NumPy runs it, JAX traces it. A row's result
        depends on its own logits, parameters and carry only, bit for bit. `sampling.params` may hold arrays of either
        kind."""
        ...

    def commit(self, state: Any, token: int, observed: float | None) -> None:
        """The token was read, resolved and appended; `observed` is what its draw said of it. Of a memoryless row it
        is not called where nothing is asked of the draw but its token."""
        ...

    def fault(self, state: Any, status: int) -> str:
        """What kept the row from a token, in words that end a sentence about it; `status` is not 0."""
        ...


@runtime_checkable
class LogitsProcessor(Protocol):
    """A change to the logits that rows ask for by its registered name, in `logits_processors` (spec S48).

    It has one of two forms beside this: `BatchedProcessor`, or, for the stage "masks" alone, `HostMask`.
    """

    @property
    def stage(self) -> str:
        """ "bias", "processors" or "masks": where in the chain it runs (spec 4.1). A mask only ever removes ids: what
        it makes of the others does not count."""
        ...

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> Any | None:
        """Once a row, at `open`: what the row's `args` come to, None where they come to nothing. RequestError, or any
        other exception, refuses the row."""
        ...


@runtime_checkable
class BatchedProcessor(LogitsProcessor, Protocol):
    """Over all rows of a step, traced into it."""

    @property
    def history(self) -> int:
        """How many of the newest ids of prompt and output `apply` wants to see, 0 to 4096."""
        ...

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> Mapping[str, np.ndarray] | None:
        """Arrays of bool, int32, uint32 or float32 by name: the same names, dtypes and ranks for every row."""
        ...

    def apply(self, xp: Any, logits: Any, params: Mapping[str, Any], history: Any) -> Any:
        """logits float32 [R, V] -> float32 [R, V], pure array-API code in the array library `xp`.

        `params` holds the rows' arrays, [R, …], their axes padded at the end to a length from a small closed set: int32
        with -1, anything else with 0. `history` is int32 [R, `history`], the newest id last, -1 where there is none.
        A row that does not use the processor is padding throughout, and what becomes of it here does not count.
        """
        ...


class MaskedRow(NamedTuple):
    """A row of which a host mask is asked for."""

    output: np.ndarray  # [G] int32: the ids of the output that were read, the newest last
    generated: int  # tokens of the output at this draw: G, or one more with a draw in flight


@runtime_checkable
class HostMask(LogitsProcessor, Protocol):
    """A row at a time, on the host: for masks that a step cannot compute."""

    def closed(self, prepared: Any) -> bool:
        """Whether `mask` needs to know no id that is still in flight (spec C51)."""
        ...

    def mask(self, prepared: Any, row: MaskedRow) -> np.ndarray:
        """The ids that may be drawn: bit t % 32 of word t // 32, uint32 [(V + 31) // 32]; `allowed_words` of
        mlxcel.plugins.sampling.bits makes them of a bool [V]. An exception fails the row alone."""
        ...
