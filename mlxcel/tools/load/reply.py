"""What came of one request, from the chunks of an OpenAI stream (docs/spec/clients.md 8.2)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

DONE: Final = b"[DONE]"
MOST_TOKENS: Final = 2**31 - 1
"""That a usage is believed to have counted."""


@attrs.define
class Reply:
    """Moments are those of the event loop's clock, in seconds. `sent` is when the request set out, `times` are those of
    chunks that carry text, `ended` is when nothing more was waited for."""

    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    times: list[float] = attrs.field(factory=list)
    text: list[str] = attrs.field(factory=list)
    usage: Mapping[str, Any] = attrs.field(factory=dict)
    finish_reasons: list[str] = attrs.field(factory=list)
    done: bool = False
    fault: str | None = None

    def hear(self, event: bytes, at: float) -> None:
        """An event's data."""
        if event == DONE:
            self.done = True
            return
        try:
            chunk = json.loads(event)
        except (ValueError, RecursionError):
            self.fail(f"an event is no JSON: {event[:60]!r}")
            return
        if not isinstance(chunk, Mapping):
            self.fail(f"an event is no object: {event[:60]!r}")
        elif chunk.get("error"):
            self.fail(said(chunk["error"]))
        else:
            usage = chunk.get("usage")
            if isinstance(usage, Mapping):
                self.usage = usage
            choices = chunk.get("choices")
            if isinstance(choices, list):
                self._choices([choice for choice in choices if isinstance(choice, Mapping)], at)

    def fail(self, fault: str) -> None:
        """The first fault is the one that counts."""
        if self.fault is None:
            self.fault = fault

    def tokens(self, name: str) -> int | None:
        """Of `usage`."""
        return _count(self.usage.get(name))

    @property
    def cached(self) -> int | None:
        """Tokens of the prompt that the server had already, where it says so."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None

    def _choices(self, choices: Sequence[Mapping[str, Any]], at: float) -> None:
        """All of one chunk."""
        if text := "".join(map(_text, choices)):
            self.times.append(at)
            self.text.append(text)
        reasons = (choice.get("finish_reason") for choice in choices)
        self.finish_reasons += [reason for reason in reasons if isinstance(reason, str)]


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice says in a chunk: text, or a message's reasoning, which has two names, and content."""
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        given = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"))
        return "".join(part for part in given if isinstance(part, str))
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _count(value: Any) -> int | None:
    """A number of tokens; None for what cannot be one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS else None


def said(error: Any) -> str:
    """The message of an error object of whatever shape."""
    message = error.get("message") if isinstance(error, Mapping) else None
    return str(message if message else error)[:500]
