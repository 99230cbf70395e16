"""What the scheduler counts, by the names of docs/spec/clients.md 3.8."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy

import attrs


@attrs.define
class Counters:
    """The `_total` ones never go down; the others are of the moment. Written by the engine thread alone, but for
    refusals; a reader gets a copy."""

    request_started_total: int = 0
    request_finished_total: Counter[str] = attrs.field(factory=Counter)  # by cause
    prompt_tokens_total: int = 0
    prompt_tokens_cached_total: int = 0
    generation_tokens_total: int = 0
    steps_total: Counter[str] = attrs.field(factory=Counter)  # prefill, decode, mixed
    steps_ahead_total: int = 0  # of these, submitted before the one before was read
    step_faults_total: int = 0
    ticks_total: int = 0  # those that did something
    tick_host_seconds: float = 0.0  # of these, without the reading of steps
    preemptions_total: Counter[str] = attrs.field(factory=Counter)  # parked, running
    reclaims_total: Counter[str] = attrs.field(factory=Counter)  # cache, parked, running, left_out
    kv_reserve_failures_total: Counter[str] = attrs.field(factory=Counter)  # admission, piece, decode
    slow_clients_total: int = 0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    rows_total: int = 0
    rows_busy: int = 0

    def copy(self) -> Counters:
        return deepcopy(self)
