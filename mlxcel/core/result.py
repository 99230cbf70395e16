"""How a request ended, as plain data: clients format it and compute nothing but differences of times (spec E21)."""

from __future__ import annotations

from typing import Any

import attrs

from mlxcel.core.plan import Span, TokenLogprobs

OPENAI_REASON = {
    "eos": "stop",
    "stop_token": "stop",
    "max_tokens": "length",
    "context": "length",
    "cancelled": None,
    "rejected": None,
    "error": None,
}
"""finish_cause -> OpenAI's finish_reason (docs/spec/clients.md 0.4); a plugin's own cause reads as "stop"."""


@attrs.frozen
class Timings:
    """Seconds on the injected monotonic clock; None where the moment never came."""

    accepted: float
    started: float
    first_token: float | None
    last_token: float | None
    ended: float

    @property
    def ttft(self) -> float | None:
        """Request accepted until the first token is on the host."""
        return None if self.first_token is None else self.first_token - self.accepted

    @property
    def prompt(self) -> float | None:
        """Prefill until the first token."""
        return None if self.first_token is None else self.first_token - self.started

    @property
    def predicted(self) -> float | None:
        """First token until the last one."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token


@attrs.frozen
class RequestResult:
    """One sequence, ended."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    cause: str
    detail: Any
    timings: Timings
    pieces: tuple[Span, ...]  # as executed
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    error: Exception | None = None

    @property
    def finish_reason(self) -> str | None:
        return OPENAI_REASON.get(self.cause, "stop")
