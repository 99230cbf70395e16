"""Replies in Anthropic's shape, whole and as events (docs/spec/clients.md 3.6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mlxcel.core.events import Delta
from mlxcel.core.result import RequestResult
from mlxcel.server.sse import event

STOP_REASONS: Final[Mapping[str, str]] = {
    "stop_string": "stop_sequence",
    "max_tokens": "max_tokens",
    "context": "max_tokens",
    "time_limit": "max_tokens",
}
"""finish_cause -> `stop_reason`; the others end a turn (docs/spec/clients.md 0.4)."""

PING: Final = event("ping", {"type": "ping"})


def message(identity: str, model: str, result: RequestResult) -> dict[str, Any]:
    """A reply that is there as a whole."""
    return {
        **_begun(identity, model, len(result.prompt_ids), result.cached_tokens, len(result.token_ids)),
        "content": [{"type": "text", "text": result.text}],
        **_stop(result),
        **_extras(result),
    }


class MessageEvents:
    """The events of one reply in their order, each as bytes of the stream. `prompt` is the number of its tokens."""

    def __init__(self, identity: str, model: str, prompt: int) -> None:
        self._identity, self._model, self._prompt = identity, model, prompt
        self._begun = False
        self._open = False

    def started(self, cached: int) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            begun = _begun(self._identity, self._model, self._prompt, cached, 0)
            yield event("message_start", {"type": "message_start", "message": begun})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """Nothing for tokens whose text waits."""
        if delta.text:
            yield from self._block()
            piece = {"type": "text_delta", "text": delta.text}
            yield event("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": piece})

    def ended(self, result: RequestResult) -> Iterator[bytes]:
        yield from self.started(result.cached_tokens)
        yield from self._block()
        yield event("content_block_stop", {"type": "content_block_stop", "index": 0})
        last = {
            "type": "message_delta",
            "delta": {**_stop(result), **_extras(result)},
            "usage": {"output_tokens": len(result.token_ids)},
        }
        yield event("message_delta", last)
        yield event("message_stop", {"type": "message_stop"})

    def _block(self) -> Iterator[bytes]:
        """A reply without text has its block as well."""
        if not self._open:
            self._open = True
            block = {"type": "text", "text": ""}
            yield event("content_block_start", {"type": "content_block_start", "index": 0, "content_block": block})


def _begun(identity: str, model: str, prompt: int, cached: int, output: int) -> dict[str, Any]:
    """The three counts of the input are disjoint, and add up to the prompt. Nothing is said of what the cache keeps of
    it: that is known once the reply is over, and costs nobody anything."""
    return {
        "id": identity,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        },
    }


def _stop(result: RequestResult) -> dict[str, Any]:
    return {
        "stop_reason": STOP_REASONS.get(result.cause, "end_turn"),
        "stop_sequence": result.detail if result.cause == "stop_string" else None,
    }


def _extras(result: RequestResult) -> dict[str, Any]:
    """Of ours: more than Anthropic's names say."""
    warnings = {"warnings": list(result.warnings)} if result.warnings else {}
    return {"finish_cause": result.cause, **warnings}
