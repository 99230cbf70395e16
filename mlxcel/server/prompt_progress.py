"""How far the prompts of a streamed reply are, for clients that ask for it (docs/spec/clients.md 3.6)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlxcel.core.events import Event, Progressed, Started


class PromptProgress:
    """From what the cache gave, piece by piece. `lengths` are the prompts', in tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._begun: dict[int, tuple[float, int]] = {}

    def heard(self, prompt: int, event: Event) -> dict[str, Any] | None:
        """`total`, `cache` and `processed` tokens, `time_ms` since the prompt began; of its first choice alone."""
        if event.choice or not isinstance(event, Started | Progressed):
            return None
        if isinstance(event, Started):
            self._begun[prompt] = (time.monotonic(), event.cached_tokens)
        begun, cached = self._begun[prompt]
        return {
            "total": self._lengths[prompt],
            "cache": cached,
            "processed": cached if isinstance(event, Started) else event.processed,
            "time_ms": round((time.monotonic() - begun) * 1000, 3),
        }
