"""What each route reads of a body, besides the sampling fields of docs/spec/clients.md 0.3, which are the same for all.

Optional fields are None or their default where the client gave none, or null. `ge`, `pattern` and the like are checked.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from mlxcel.core.request import MAX_SALT

Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}(?![\s\S])")]  # `$` lets a line end follow
Ping = Annotated[float, Meta(ge=-1, le=86400, description="Seconds; 0 and -1 are off.")]
Priority = Literal["high", "normal", "low", 0, 1, 2]

_TEXT: Final = {"type": "string"}
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_MESSAGE: Final = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
        "name": _TEXT,
    },
}

Prompt = Annotated[
    Any,
    Meta(
        description="A text, token ids, or a list of either.",
        extra_json_schema={
            "anyOf": [
                _TEXT,
                _IDS,
                {"type": "array", "items": _TEXT, "minItems": 1},
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        },
    ),
]
Messages = Annotated[
    Any,
    Meta(
        description="The conversation; what roles there are and in which order is the chat template's business.",
        extra_json_schema={"type": "array", "items": _MESSAGE, "minItems": 1},
    ),
]


class Body(msgspec.Struct, kw_only=True):
    """Base of all. `sampling` holds the sampling fields as the client wrote them, where the route `samples`; it `needs`
    some of them."""

    samples: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ()
    sampling: dict[str, Any] = {}  # each body gets its own


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asking(Body, kw_only=True):
    """What every route reads that generates. `request_id` names the reply; `sse_ping_interval` is in seconds; without
    `cache_prompt` the prefix cache is neither read nor filled."""

    samples: ClassVar[bool] = True
    model: str | None = None
    stream: bool = False
    cache_salt: Salt | None = None
    cache_prompt: bool = True
    priority: Priority | None = None
    request_id: RequestId | None = None
    sse_ping_interval: Ping | None = None


class Generating(Asking, kw_only=True):
    """What the routes of OpenAI's kind read."""

    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_progress: bool = False


class Completion(Generating, kw_only=True):
    """POST /v1/completions"""

    prompt: Prompt
    echo: bool = False


class Chat(Generating, kw_only=True):
    """POST /v1/chat/completions. `add_generation_prompt` is true unless the last message is to be continued."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ApplyTemplate(Chat, kw_only=True):
    """POST /apply-template: a chat request, of which the prompt is told, with `explain` the parameters too."""

    explain: bool = False


class Tokenize(Body, kw_only=True):
    """POST /tokenize"""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(Body, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[Any, Meta(extra_json_schema=_IDS)]
    skip_special_tokens: bool = False
