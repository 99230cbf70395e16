"""The messages of a conversation as a client gave them: their shape is checked here, their order by the template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from mlxcel.errors import RequestError, UnsupportedField, shown

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 256
PART_SEPARATOR: Final = "\n"
KEPT_ROLES: Final = frozenset({"system", "developer", "user"})

_HALF_CHARACTER: Final = re.compile("[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """New messages whose `content` is one string each; other keys are passed on.

    A message is a mapping with `role` and `content`, which is a string, a list of `{"type": "text", "text": ...}` parts
    (joined by a newline, since templates of text models add strings), or null beside `tool_calls`, which gives "".
    Raises RequestError, whose `field` is the path of what is wrong ("messages[1].content[0].text"), and
    UnsupportedField for parts other than text.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages is {shown(messages)}, a list of messages is needed", field="messages")
    if not messages:
        raise RequestError("messages is empty, at least one message is needed", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages holds {len(messages)} messages, at most {MAX_MESSAGES} are taken", field="messages"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} is {shown(message)}, an object with role and content is needed", field=path)
    stray = next((key for key in message if not isinstance(key, str)), None)
    if stray is not None:
        raise RequestError(f"{path} has the key {shown(stray)}, keys are strings", field=path)
    _refuse_unless_text(message.get("role"), f"{path}.role")
    if not message["role"]:
        raise RequestError(f"{path}.role is empty, name who speaks: system, user, assistant", field=f"{path}.role")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            _refuse_unless_text(message[name], f"{path}.{name}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)):
        field = f"{path}.tool_calls"
        raise RequestError(f"{field} is {shown(calls)}, a list of objects is needed", field=field)
    content = message.get("content")
    return {**message, "content": "" if content is None and calls else _content(content, f"{path}.content")}


def _content(content: Any, path: str) -> str:
    if not isinstance(content, list | tuple):
        _refuse_unless_text(content, path, allowed="a string or a list of text parts")
        return str(content)
    if len(content) > MAX_PARTS:
        raise RequestError(f"{path} holds {len(content)} parts, at most {MAX_PARTS} are taken", field=path)
    return PART_SEPARATOR.join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f"{path} is {shown(part)}, an object with type and text is needed", field=path)
    kind = part.get("type")
    _refuse_unless_text(kind, f"{path}.type")
    if kind != "text":
        raise UnsupportedField(
            f"{path}.type is {shown(kind)}, only text parts are read",
            field=f"{path}.type",
            hint="send the text alone; images, audio and files are not read",
        )
    _refuse_unless_text(part.get("text"), f"{path}.text")
    return str(part["text"])


def _refuse_unless_text(value: Any, path: str, *, allowed: str = "a string") -> None:
    if not isinstance(value, str):
        given = "missing or null" if value is None else shown(value)
        raise RequestError(f"{path} is {given}, {allowed} is needed", field=path)
    refuse_half_characters(value, path)


def refuse_half_characters(text: str, path: str) -> None:
    """RequestError for a lone surrogate: no token stands for one, so that the model would read another text."""
    if (half := _HALF_CHARACTER.search(text)) is not None:
        raise RequestError(
            f"{path} holds half a character, {shown(half[0])} at {half.start()}: no text in UTF-8 has one",
            field=path,
            hint="where a text is cut, cut it between characters, not between the two UTF-16 units of one",
        )


def refuse_vanished(messages: list[dict[str, Any]], prompt: str) -> None:
    """RequestError naming the first system, developer or user message whose text is not in the prompt.

    Texts count without white space at their ends. Each needs a place of its own: a message that is dropped is not
    excused by another one with the same words.
    """
    texts = [(i, str(m["content"]).strip()) for i, m in enumerate(messages) if m["role"] in KEPT_ROLES]
    texts = [(index, text) for index, text in texts if text]
    if not _out_of_order(texts, prompt):
        return
    users = [(index, text) for index, text in texts if messages[index]["role"] == "user"]
    others = [(index, text) for index, text in texts if messages[index]["role"] != "user"]
    for index, text in sorted([*others, *_out_of_order(users, prompt)]):  # a template may move a system message
        if prompt.count(text) < sum(other.count(text) for _, other in texts):
            raise RequestError(
                f"messages[{index}] ({shown(messages[index]['role'])}) does not appear in the prompt that the chat "
                f"template renders: {shown(text)}",
                field=f"messages[{index}]",
                hint="put its text where the template takes one: most take a system message in the first place only",
            )


def _out_of_order(texts: list[tuple[int, str]], prompt: str) -> list[tuple[int, str]]:
    """The texts that do not follow, without overlap, the ones before them. Linear where there are none."""
    place, lost = 0, []
    for index, text in texts:
        found = prompt.find(text, place)
        if found < 0:
            lost.append((index, text))
        else:
            place = found + len(text)
    return lost
