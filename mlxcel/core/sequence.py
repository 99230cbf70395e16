"""The one mutable record of the engine: a row."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import attrs
import numpy as np

from mlxcel.core.finish import Ending
from mlxcel.core.request import SequenceSpec


class SequenceState(StrEnum):
    """docs/spec/engine.md 1.1. A closed row is forgotten, so CLOSED has no record."""

    OPEN = "open"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"


_FINISHED, _FAILED = SequenceState.FINISHED, SequenceState.FAILED  # members are slow to look up, and each token asks


@attrs.define(eq=False)
class Sequence:
    """A row. Two numbers never mix: positions stored in KV, and tokens produced."""

    id: int
    spec: SequenceSpec
    slot: int | None  # None: preempted, or its KV was handed over
    max_new: int  # most output tokens
    context: int  # N
    sampler_state: Any
    finish_state: Any
    runs: bool = False  # its sampling lets several of its draws be in flight (spec C54)
    prompt_length: int = attrs.field(init=False)  # P
    state: SequenceState = SequenceState.OPEN
    output: list[int] = attrs.field(factory=list)
    stored: int = 0  # positions whose KV is valid and confirmed
    in_flight: int = 0  # parts submitted and not collected
    fed: int = 0  # tokens in these parts
    drawing: int = 0  # how many of these parts draw
    ahead: int = 0  # how many of these parts count: a lost one does not
    steps: int = 0  # parts whose positions are stored: the parity says which copy of recurrent state is valid
    adopted: int = 0  # A: positions that it came with
    prefilled: int = 0  # positions from 0 that pieces of plans computed (spec V15)
    written: int = 0  # positions that its rings have seen, those of dropped steps too
    rewindable: int = 0  # positions of its last step, where the older copy of recurrent state is still whole
    epoch: int = 0  # of the KV arrays it was seated in
    ending: Ending | None = None
    error: Exception | None = None
    closing: bool = False  # close() was called with a step in flight

    @prompt_length.default
    def _prompt_length(self) -> int:
        return len(self.spec.prompt_ids)

    @property
    def ended(self) -> bool:
        state = self.state
        return state is _FINISHED or state is _FAILED

    @property
    def length(self) -> int:
        """P + G: positions of the prompt and the output together."""
        return self.prompt_length + len(self.output)

    def tokens(self, start: int, end: int) -> np.ndarray:
        """int32 ids of prompt ++ output at positions [start, end)."""
        head = self.spec.prompt_ids[start:end]
        tail = self.output[max(0, start - self.prompt_length) : max(0, end - self.prompt_length)]
        return np.concatenate([head, np.asarray(tail, np.int32)]) if tail else np.asarray(head, np.int32)


@attrs.frozen
class SequenceView:
    """A row as others may see it."""

    id: int
    spec: SequenceSpec
    state: SequenceState
    prompt_tokens: int
    output: tuple[int, ...]
    stored: int
    in_flight: int
    adopted: int
    prefilled: int
    max_new: int
    context: int
    ending: Ending | None
    error: Exception | None

    @classmethod
    def of(cls, row: Sequence) -> SequenceView:
        return cls(
            id=row.id,
            spec=row.spec,
            state=row.state,
            prompt_tokens=row.prompt_length,
            output=tuple(row.output),
            stored=row.stored,
            in_flight=row.in_flight,
            adopted=row.adopted,
            prefilled=row.prefilled,
            max_new=row.max_new,
            context=row.context,
            ending=row.ending,
            error=row.error,
        )
