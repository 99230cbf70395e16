"""What a scheduler is told, checked against what the engine offers."""

from __future__ import annotations

import attrs

from mlxcel.core.backend import BackendCaps, Level
from mlxcel.errors import UsageError


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """docs/spec/clients.md 0.2, "Advanced"; seconds where it is time.

    `chunk_busy` is the piece while rows decode, None: pieces are the planner's whoever decodes. `flat`: pieces of
    several rows may share a step; `mixed`: with decodes too.
    """

    max_queue_depth: int = 32
    grant_interval: int = 16
    chunk_busy: int | None = None
    flat: bool = False
    mixed: bool = False
    max_prefill_tokens: int = 4096
    preemption: bool = True
    watermark: float = 0.01
    ageing: float = 10.0
    decode_timeout: float = 600.0
    run_ahead: bool = True

    @classmethod
    def resolve(
        cls,
        caps: BackendCaps,
        level: Level,
        *,
        chunk: int,
        chunk_busy: int = 512,
        adaptive: bool | None = None,
        mixed: bool | None = None,
        force_sync: bool = False,
        max_queue_depth: int = 32,
        grant_interval: int = 16,
        max_prefill_tokens: int = 4096,
        preemption: bool = True,
        watermark: float = 0.01,
        ageing: float = 10.0,
        decode_timeout: float = 600.0,
    ) -> SchedulerSettings:
        """`adaptive` and `mixed` are on at R2 and off at R0 where nobody says (None). UsageError for what this level or
        backend cannot honour (spec C2, P10)."""
        if level == "R1" and adaptive:
            raise UsageError(
                "--adaptive-prefill-chunk cannot be had at level R1: the load would choose the pieces",
                hint="leave it out, or leave --deterministic out",
            )
        if level == "R1" and mixed:
            raise UsageError(
                "--mixed-step cannot be had at level R1: neighbours would choose the shape of a step",
                hint="leave it out, or leave --deterministic out",
            )
        if mixed and not caps.mixed_steps:
            raise UsageError(
                "--mixed-step: this backend runs a prompt's piece in a step of its own", hint="leave it out"
            )
        flat = caps.mixed_steps and level != "R1"
        by_level = level == "R2"
        return cls(
            max_queue_depth=max_queue_depth,
            grant_interval=grant_interval,
            chunk_busy=min(chunk, chunk_busy) if (by_level if adaptive is None else adaptive) else None,
            flat=flat,
            mixed=flat and (by_level if mixed is None else mixed),
            max_prefill_tokens=max_prefill_tokens,
            preemption=preemption,
            watermark=watermark,
            ageing=ageing,
            decode_timeout=decode_timeout,
            run_ahead=caps.run_ahead and not force_sync,
        )
