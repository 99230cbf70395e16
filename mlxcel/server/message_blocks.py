"""Conversations in Anthropic's shape, as conversations of ours (docs/spec/clients.md 3.6)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from mlxcel.conversation import Conversation
from mlxcel.errors import RequestError, UnsupportedField, shown
from mlxcel.text.messages import MAX_MESSAGES, MAX_PARTS, refuse_half_characters

ROLES: Final = ("user", "assistant")

_PLACE: Final = re.compile(r"messages\[(\d+)\]")


def asked_conversation(
    messages: Any, *, system: Any = None, thinking: Any = None, kwargs: Mapping[str, Any] | None = None
) -> Conversation:
    """Texts of all blocks, the system's first. A last message of the assistant is gone on with. `kwargs` are variables
    of the template.

    RequestError, whose field is the place ("messages[1].content[0].text"), and UnsupportedField for blocks of another
    type than text and for thinking that is not disabled. Where it is, the template hears of it.
    """
    variables = {**_thinking(thinking), **(kwargs or {})}
    spoken = [{"role": "system", "content": _content(system, "system")}] if speaks(system) else []
    if not isinstance(messages, list):
        given = "missing or null" if messages is None else shown(messages)
        raise RequestError(f"messages is {given}, a list of messages is needed", field="messages")
    if not messages:
        raise RequestError("messages is empty, at least one message is needed", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages holds {len(messages)} messages, at most {MAX_MESSAGES} are taken", field="messages"
        )
    spoken += [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    goes_on = spoken[-1]["role"] == "assistant"
    return Conversation(
        spoken,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        chat_template_kwargs=variables,
    )


def speaks(system: Any) -> bool:
    """Whether there is a text of the system: clients that have none may send an empty one."""
    return system is not None and system not in ("", [])


def as_asked(error: RequestError, *, system: bool) -> RequestError:
    """What the template says of the conversation, by the places that the client wrote: with `system` that is the first
    message and the client's follow."""

    def place(found: re.Match[str]) -> str:
        number = int(found[1]) - 1
        return "system" if number < 0 else f"messages[{number}]"

    if system and error.field is not None and _PLACE.match(error.field):
        error.field = _PLACE.sub(place, error.field)
        error.args = (_PLACE.sub(place, error.message, count=1),)
    return error


def _thinking(thinking: Any) -> Mapping[str, Any]:
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if not isinstance(kind, str):
        raise RequestError(f'thinking is {shown(thinking)}, it must be {{"type": "disabled"}}', field="thinking")
    if kind != "disabled":
        raise UnsupportedField(
            f"thinking.type is {shown(kind)}, it can only be disabled here",
            field="thinking.type",
            hint="leave thinking out; /v1/chat/completions splits the reasoning off a reply",
        )
    return {"enable_thinking": False}


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} is {shown(message)}, an object with role and content is needed", field=path)
    role = message.get("role")
    if role not in ROLES:
        given = "missing or null" if role is None else shown(role)
        hint = "give it as the field `system`, beside `messages`" if role == "system" else None
        raise RequestError(
            f"{path}.role is {given}, it must be one of {', '.join(ROLES)}", field=f"{path}.role", hint=hint
        )
    return {"role": role, "content": _content(message.get("content"), f"{path}.content")}


def _content(content: Any, path: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        refuse_half_characters(content, path)
        return content
    if not isinstance(content, list):
        given = "missing or null" if content is None else shown(content)
        raise RequestError(f"{path} is {given}, a string or a list of text blocks is needed", field=path)
    if len(content) > MAX_PARTS:
        raise RequestError(f"{path} holds {len(content)} blocks, at most {MAX_PARTS} are taken", field=path)
    return [{"type": "text", "text": _text(block, f"{path}[{place}]")} for place, block in enumerate(content)]


def _text(block: Any, path: str) -> str:
    if not isinstance(block, Mapping):
        raise RequestError(f"{path} is {shown(block)}, an object with type and text is needed", field=path)
    kind = block.get("type")
    if not isinstance(kind, str):
        given = "missing or null" if kind is None else shown(kind)
        raise RequestError(f"{path}.type is {given}, a string is needed", field=f"{path}.type")
    if kind != "text":
        raise UnsupportedField(
            f"{path}.type is {shown(kind)}, only text blocks are read",
            field=f"{path}.type",
            hint="send the text alone: images, documents, tools and thinking are not read",
        )
    text = block.get("text")
    if not isinstance(text, str):
        given = "missing or null" if text is None else shown(text)
        raise RequestError(f"{path}.text is {given}, a string is needed", field=f"{path}.text")
    refuse_half_characters(text, f"{path}.text")
    if block.get("citations"):
        raise UnsupportedField(
            f"{path}.citations cannot be given to the model", field=f"{path}.citations", hint="send the text alone"
        )
    return text
