"""One line for each request, when all of it is over (docs/spec/clients.md 3.9). Of those that come over and over by
themselves it is for who wants to see everything: health checks, scrapes and counts of tokens would hide the others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mlxcel.core.result import RequestResult
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.server.record import RequestRecord
    from mlxcel.server.settings import ServerSettings

log = logging.getLogger("mlxcel.access")

MOST: Final = 256
"""Characters of a field that came from outside."""

REPEATED: Final = frozenset(
    {
        "/health", "/v1/health", "/metrics", "/slots", "/assets/{name}",
        "/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens",
    }
)  # fmt: skip
"""Routes that programs ask over and over, and that change nothing."""

HEALTH: Final = frozenset({"/health", "/v1/health"})
"""Routes whose 503 is an answer."""


def escaped(text: str) -> str:
    """At most MOST characters on one line, whatever they are: what does not print is written by its number."""
    return "".join(char if char.isprintable() else _number(char) for char in text[:MOST])


def _number(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def fields(record: RequestRecord) -> dict[str, Any]:
    """What a line says, in its order; None where there is no such number."""
    results = list(record.results)
    firsts = _prompts(results)
    generated = sum(len(result.token_ids) for result in results)
    return {
        "id": record.id,
        "route": record.route,
        "status": record.status,
        "stream": record.stream,
        "prompt": sum(len(result.prompt_ids) for result in firsts) if firsts else None,
        "cached": sum(result.cached_tokens for result in firsts) if firsts else None,
        "cache_miss_reason": next((result.cache_miss for result in firsts if result.cache_miss), None),
        "generated": generated if results else None,
        "queue_ms": _milliseconds([each.timings.started - each.timings.accepted for each in results], max),
        "ttft_ms": _milliseconds([each.timings.ttft for each in results if each.timings.ttft is not None], min),
        "tok_s": _rate(results),
        "cause": ",".join(dict.fromkeys(result.cause for result in results)) or None,
        "total_ms": None if record.answered is None else round((record.answered - record.started) * 1000, 1),
        "client": escaped(record.client),
        "key": record.key,
    }


def _prompts(results: list[RequestResult]) -> list[RequestResult]:
    """One row a prompt: of its choices the one that others may have had the prompt from."""
    found: dict[str, RequestResult] = {}
    for result in results:
        other = found.setdefault(result.request_id, result)
        if result.cached_tokens < other.cached_tokens:
            found[result.request_id] = result
    return list(found.values())


def _milliseconds(seconds: list[float], choose: Callable[[list[float]], float]) -> float | None:
    return round(choose(seconds) * 1000, 1) if seconds else None


def _rate(results: list[RequestResult]) -> float | None:
    """Tokens a second of all rows together, from the first one on."""
    intervals = sum(max(0, len(result.token_ids) - 1) for result in results)
    longest = max((result.timings.predicted or 0.0 for result in results), default=0.0)
    return round(intervals / longest, 1) if intervals and longest else None


def repeated(record: RequestRecord) -> bool:
    """Whether the request went well, made no token, and is one of many of its kind."""
    if record.status >= 400 and not (record.status == 503 and record.route in HEALTH):
        return False
    return record.method == "OPTIONS" or record.route in REPEATED


class AccessLog:
    """Writes lines by `write`, which is the logger `mlxcel.access` at INFO unless somebody else is named, and at DEBUG
    those of requests that are repeated."""

    def __init__(self, settings: ServerSettings, write: Callable[[str], None] | None = None) -> None:
        self._settings = settings
        self._write = write or log.info

    def request(self, record: RequestRecord, tokenizer: Tokenizer | None) -> None:
        """The line of a request. Nothing that happens here is the request's concern."""
        if not self._settings.log_requests:
            return
        try:
            told = fields(record)
            if self._settings.log_prompts and tokenizer is not None:
                told |= _texts(record, tokenizer)
            line = _as_json(told) if self._settings.log_format == "json" else _as_text(told)
            (log.debug if repeated(record) else self._write)(line)
        except Exception:
            log.debug("a request could not be logged", exc_info=True)


def _texts(record: RequestRecord, tokenizer: Tokenizer) -> dict[str, Any]:
    """The beginnings of the first prompt and of its reply; a token has at least a byte, or no text."""
    if not record.results:
        return {}
    first = record.results[0]
    return {
        "prompt_text": escaped(tokenizer.decode(first.prompt_ids[: 2 * MOST], skip_special=False)),
        "reply_text": escaped(first.text),
    }


def _as_json(told: Mapping[str, Any]) -> str:
    return json.dumps({"event": "request", **told}, ensure_ascii=True)


def _as_text(told: Mapping[str, Any]) -> str:
    return " ".join(["request", *(f"{name}={_word(value)}" for name, value in told.items())])


def _word(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and (" " in value or '"' in value or not value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
