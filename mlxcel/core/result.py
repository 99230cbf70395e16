"""How a request ended, as plain data: clients format it and compute nothing but differences of times (spec E21)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from mlxcel.core.backend import Level
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Span, TokenLogprobs
from mlxcel.errors import MlxcelError

OPENAI_REASON: Final[Mapping[str, str | None]] = {
    "eos": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "grammar": "stop",
    "max_tokens": "length",
    "context": "length",
    "time_limit": "length",
    "indent_limit": "stop",
    "loop": "stop",
    "cancelled": None,
    "rejected": None,
    "error": None,
}
"""finish_cause -> OpenAI's finish_reason (docs/spec/clients.md 0.4); a plugin's own cause reads as "stop"."""

NAMED_CAUSES: Final = ("stop_token", "stop_string", "loop")
"""Causes whose detail clients call `stop_reason`."""


def error_code(error: BaseException) -> str:
    """The machine-readable name of an error (docs/spec/engine.md 1.4), `internal` for a mistake of ours."""
    return error.code if isinstance(error, MlxcelError) else "internal"


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
    """One sequence, ended. `params` are the effective values, `origin` says where each is from, `warnings` which could
    not act; level, storage and chunk are those that were used. With `echo` the text begins with the prompt's."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    cause: str
    detail: Any  # as in Ending; the code of an error, and of the refusal of a rejected request
    timings: Timings
    pieces: tuple[Span, ...]  # as executed
    params: SamplingParams
    level: Level
    kv_storage: str
    prefill_chunk: int
    reasoning: str | None = None  # what was split off the text; None where nothing was
    origin: Mapping[str, str] = attrs.field(factory=dict)
    warnings: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # of each prompt id, none for the first; () if not asked
    truncated_tokens: int = 0  # ids that `truncate_prompt_tokens` took off the prompt's beginning
    cached_tokens: int = 0
    cache_miss: str | None = None  # why there are none, by a name of spec 8.6
    error: Exception | None = None

    @property
    def finish_reason(self) -> str | None:
        return OPENAI_REASON.get(self.cause, "stop")

    @property
    def stop_reason(self) -> Any:
        """The stop id, the stop string, `{"period", "count"}` of a loop, or None."""
        return self.detail if self.cause in NAMED_CAUSES else None
