"""Where one reply's prompt comes from: exactly one of text, a file, stdin, messages, or ids."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, Final

import attrs

from mlxcel.errors import UsageError

MAX_BYTES: Final = 1 << 26
"""Of a prompt's file: more than the longest context there is."""

_IDS: Final = re.compile(r"[0-9]{1,10}(?:\s*[,\s]\s*[0-9]{1,10})*", re.ASCII)


@attrs.frozen
class PromptInput:
    """One of `messages` (for the chat template), `text` (raw) and `ids` is not None.

    `raw_text` is the text itself where messages are made of one prompt alone, for models without a chat template.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    raw_text: str | None = None


def read_prompt(
    *, prompt: str | None, file: str | None, raw: bool, system: str | None, messages: str | None, token_ids: str | None
) -> PromptInput:
    """UsageError for two sources, none, and whatever cannot be read. Reads stdin only where nothing else is named."""
    sources = {"-p": prompt, "-f": file, "--messages": messages, "--token-ids": token_ids}
    named = [flag for flag, value in sources.items() if value is not None]
    if len(named) > 1:
        raise _conflict(*named[:2])
    for flag in ("--messages", "--token-ids"):
        if sources[flag] is not None and system is not None:
            raise _conflict(flag, "--system")
    if raw:
        for flag, value in (("--system", system), ("--messages", messages)):
            if value is not None:
                raise _conflict("--raw", flag)
    if system is not None:
        system = argument_text(system, "--system")
    if token_ids is not None:
        return PromptInput(ids=_read_ids(token_ids))
    if messages is not None:
        return PromptInput(messages=read_messages(messages, "--messages "))
    text = _text(prompt, file)
    if raw:
        return PromptInput(text=text)
    user = {"role": "user", "content": text}
    if system is not None:
        return PromptInput(messages=[{"role": "system", "content": system}, user])
    return PromptInput(messages=[user], raw_text=text)


def _text(prompt: str | None, file: str | None) -> str:
    if prompt is not None:
        return argument_text(prompt, "the prompt")
    if file is None and sys.stdin.isatty():
        raise UsageError(
            "there is no prompt: no -p, no -f, and stdin is a terminal",
            hint='mlxcel generate -p "Why is the sky blue?", or `mlxcel run` for a conversation',
        )
    text = _read_text(file or "-")
    if file is None and not text:
        raise UsageError(
            "there is no prompt: no -p, no -f, and nothing came on stdin",
            hint='mlxcel generate -p "Why is the sky blue?"; -p "" or -f - asks for the empty prompt',
        )
    return text.removesuffix("\n")


def _read_text(file: str) -> str:
    where = "stdin" if file == "-" else file
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(file, "rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"{where} holds more than {MAX_BYTES} bytes", hint="no context takes a prompt as long")
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror or error}", hint="name a file of text") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8: {error.reason} at byte {error.start}", hint="convert it, for one with iconv"
        ) from error


def read_messages(file: str, flag: str = "") -> list[Any]:
    """A list, whatever it holds. UsageError, whose message begins with the `flag`, for anything else."""
    where = f"{flag}{'stdin' if file == '-' else file}"
    try:
        messages = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(messages, list):
        raise UsageError(
            f"{where} holds a JSON {type(messages).__name__}, a list of messages is needed",
            hint='such as [{"role": "user", "content": "Hello"}]',
        )
    return messages


def _read_ids(text: str) -> tuple[int, ...]:
    if not _IDS.fullmatch(text.strip()):
        raise UsageError(
            f"--token-ids {text[:80]!r} is no list of token ids", hint="numbers with commas between them: 1,15,203"
        )
    return tuple(int(number) for number in re.split(r"[,\s]+", text.strip()))


def argument_text(text: str, what: str) -> str:
    """An argument's text. In a locale that is not UTF-8 Python could not read its bytes, which may still be UTF-8."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        place = error.start
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise UsageError(f"{what} is not UTF-8 at character {place}", hint="correct the terminal's locale") from error


def _conflict(first: str, second: str) -> UsageError:
    return UsageError(f"{first} and {second} exclude each other", hint="leave one of them out")
