"""Rows of a scheduler as others may see them."""

from __future__ import annotations

from typing import Literal

import attrs

from mlxcel.core.job import Row, RowState
from mlxcel.core.params import SamplingParams
from mlxcel.core.prefix import Reject

Phase = Literal["prefill", "decode", "preempted"]


@attrs.frozen
class RowView:
    """A row that has a place, or had one and waits for it again: then its `slot` is None.

    `prompt_done` of the prompt's tokens are in KV or on their way, `cached_tokens` of them came from the prompt cache;
    where none did, `cache_miss` says why. `max_new` is the most tokens that the reply may have.
    """

    slot: int | None
    request: int  # counts requests
    request_id: str
    choice: int
    phase: Phase
    prompt_tokens: int
    prompt_done: int
    cached_tokens: int
    cache_miss: Reject | None
    generated: int
    max_new: int
    params: SamplingParams

    @classmethod
    def of(cls, row: Row, slot: int | None) -> RowView:
        phases: dict[RowState, Phase] = {RowState.PARKED: "prefill", RowState.DECODING: "decode"}
        return cls(
            slot=slot,
            request=row.job.number,
            request_id=row.spec.request_id,
            choice=row.spec.choice,
            phase=phases.get(row.state, "preempted"),
            prompt_tokens=row.prompt_length,
            prompt_done=min(row.at, row.prompt_length),
            cached_tokens=row.cached,
            cache_miss=row.cache_miss,
            generated=len(row.output),
            max_new=row.max_new,
            params=row.spec.params,
        )
