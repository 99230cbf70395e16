"""What Anthropic's routes read of a body, besides the sampling fields that all routes share
(docs/spec/clients.md 3.3, 3.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from mlxcel.core.request_names import OUR_NAME, canonical
from mlxcel.errors import RequestError, UnsupportedField, shown
from mlxcel.server.fields import Asking, Body

_BLOCKS: Final = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _BLOCKS},
}

Turns = Annotated[Any, Meta(extra_json_schema={"type": "array", "items": _MESSAGE, "minItems": 1})]
System = Annotated[Any, Meta(extra_json_schema=_BLOCKS)]
Thinking = Annotated[
    Any, Meta(extra_json_schema={"type": "object", "properties": {"type": {"const": "disabled"}}, "required": ["type"]})
]
Inert = Annotated[Any, Meta(description="Accepted, and without effect: every prompt may be kept in the prefix cache.")]

MOST_TEMPERATURE: Final = 1.0


class Messages(Asking, kw_only=True):
    """POST /v1/messages"""

    needs: ClassVar[tuple[str, ...]] = ("max_tokens",)
    messages: Turns
    system: System = None
    thinking: Thinking = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Inert = None


class CountTokens(Body, kw_only=True):
    """POST /v1/messages/count_tokens"""

    samples: ClassVar[bool] = True
    model: str | None = None
    messages: Turns
    system: System = None
    thinking: Thinking = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Inert = None


ELSEWHERE: Final = "ask /v1/chat/completions, which takes it"


REFUSED: Final = ("n", "logprobs", "prompt_logprobs")
"""What a message has no place for: it is one text."""


def message_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields as this route means them: the reply is one text, no reasoning is split off it.

    RequestError without `max_tokens` and for a temperature above 1; UnsupportedField for what a message has no place
    for.
    """
    values = canonical(sampling)
    for name in Messages.needs:
        if name not in values:
            raise RequestError(f"{name} is missing or null, it is needed", field=name)
    if values.get("temperature", 0) > MOST_TEMPERATURE:
        raise RequestError(
            f"temperature must be a number from 0 to 1 here, not {shown(values['temperature'])}",
            field="temperature",
            hint=ELSEWHERE,
        )
    asked: set[str] = {field for field in REFUSED if field in values and (field, values[field]) != ("n", 1)}
    if values.get("reasoning_format") not in (None, "none", "auto"):
        asked.add("reasoning_format")
    for name in sampling:
        if OUR_NAME.get(name) in asked:
            raise UnsupportedField(
                f"{name} is not supported here: a message is one text and nothing beside it", field=name, hint=ELSEWHERE
            )
    return {**sampling, "reasoning_format": "none"}
