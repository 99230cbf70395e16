"""What a line of the REPL asks for: a message, or a command with its argument."""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, Final

import attrs

from mlxcel.cli.line_editor import QUOTES
from mlxcel.core.param_table import RULES
from mlxcel.core.request_names import OUR_NAME, REFUSED, canonical
from mlxcel.errors import RequestError, UsageError

COMMANDS: Final = {
    "help": ("", "these lines"),
    "bye": ("", "leave, as /exit and Ctrl-D do"),
    "clear": ("", "a new conversation; the system message stays"),
    "undo": ("", "drop the last message and its reply"),
    "regen": ("", "answer the last message again"),
    "system": ("[TEXT]", "set the system message; without TEXT there is none"),
    "set": ("NAME [VALUE]", "a sampling value, as in /set temperature 0.7; without VALUE back to the default"),
    "show": ("", "values in force, the prompt as it is rendered, token counts"),
    "save": ("FILE", "the conversation as JSON, into a new file"),
    "load": ("FILE", "a conversation from such a file"),
}
"""By name: its argument, and what it does."""

ALIASES: Final = {"exit": "bye"}

IDLE: Final = {
    "add_special_tokens": "the chat template writes its own special tokens",
    "n": "a conversation has one reply",
    "logprobs": "they are not shown here: `generate --json` has none either, the server's replies have",
    "prompt_logprobs": "they are not shown here: the server's replies have them",
}
"""Fields that could not act here, and why."""


@attrs.frozen
class Called:
    """A command; `argument` is the text behind its name."""

    name: str
    argument: str = ""


def parse(line: str) -> str | Called | None:
    """A message, a command, or None for an empty line. UsageError for a command that there is none of, and for one
    without the argument that it needs."""
    text = line.strip()
    if text.startswith(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n") or None
    if not text.startswith("/"):
        return text or None
    word, _, argument = text[1:].partition(" ")
    name, argument = ALIASES.get(word, word), argument.strip()
    if name not in COMMANDS:
        near = get_close_matches(word, [*COMMANDS, *ALIASES], n=1, cutoff=0.5)
        raise UsageError(
            f"there is no command /{word[:64]}",
            hint=f"did you mean /{near[0]}?" if near else f"/help lists them; {QUOTES} begins a message that is none",
        )
    wanted = COMMANDS[name][0]
    if argument and not wanted:
        raise UsageError(f"/{name} takes nothing behind it", hint="/help says what each command takes")
    if not argument and wanted and not wanted.startswith("["):
        raise UsageError(f"/{name} needs {wanted}", hint="/help says what each command does")
    return Called(name, argument)


def help_lines() -> list[str]:
    rows = [(f"/{name} {argument}".rstrip(), words) for name, (argument, words) in COMMANDS.items()]
    width = max(len(call) for call, _ in rows)
    return [
        *(f"{call.ljust(width)}  {words}" for call, words in rows),
        f"{QUOTES} opens and closes a message of several lines, Alt-Enter is a newline in any.",
        "Ctrl-C stops a reply and keeps what was said. Ctrl-D leaves.",
    ]


def setting(argument: str) -> tuple[str, Any]:
    """`NAME VALUE` as a field and its value; None where VALUE is left out or is null. VALUE is JSON, or a text as it
    stands. UsageError for an unknown name, RequestError for a value out of its range."""
    name, *rest = argument.split(maxsplit=1)
    if name not in OUR_NAME and name not in REFUSED:
        near = get_close_matches(name, sorted({*RULES, *OUR_NAME}), n=1, cutoff=0.5)
        raise UsageError(
            f"there is no sampling value {name[:64]!r}",
            hint=f"did you mean {near[0]!r}?" if near else "/show lists them",
        )
    field = OUR_NAME.get(name, name)
    if field in IDLE:
        raise UsageError(f"{name} does nothing here: {IDLE[field]}")
    refused: RequestError | None = None
    for value in _readings(rest[0] if rest else "null"):
        try:
            return field, canonical({name: value}).get(field)
        except RequestError as error:
            refused = refused or error
    assert refused is not None  # a value has a reading
    raise refused


def _readings(text: str) -> Iterator[Any]:
    """What a value may mean: the first reading that its field takes counts. A list of one needs no brackets."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield {"on": True, "off": False}.get(text, text)
    else:
        yield value
        if not isinstance(value, list):
            yield [value]
    yield text
    yield [text]
