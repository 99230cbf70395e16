"""What is asked: prompts from a file of JSON lines, each with the length of its reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from mlxcel.errors import UsageError, shown

MOST: Final = 16 << 20
"""Bytes of a line."""

LONGEST: Final = 2**31 - 1
"""Tokens of a reply."""

KEYS: Final = frozenset({"prompt", "messages", "output_len"})


@attrs.frozen
class Asked:
    """A prompt, as a text or as messages. `input_len` are its tokens, None where nobody counted; `output_len` is the
    most its reply may have."""

    prompt: str | tuple[Any, ...]
    input_len: int | None
    output_len: int


def file_prompts(path: Path, most: int, *, chat: bool, output_len: int) -> list[Asked]:
    """The first `most` lines of a file, each `{"prompt" or "messages", "output_len"?}`; `output_len` where a line has
    none. UsageError, naming the line."""
    found: list[Asked] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(_bounded(lines, path), 1):
                if line.strip():
                    found.append(_asked(line, f"{path}, line {number}", chat=chat, output_len=output_len))
                if len(found) == most:
                    break
    except OSError as error:
        raise UsageError(f"--dataset {path}: {error.strerror or error}", hint="name a file of JSON lines") from error
    if not found:
        raise UsageError(f"{path} has no line", hint='a line is {"prompt": "...", "output_len": 128}')
    return found


def _bounded(lines: Any, path: Path) -> Iterator[bytes]:
    while line := lines.readline(MOST + 1):
        if len(line) > MOST:
            raise UsageError(f"{path} has a line of more than {MOST} bytes", hint="--dataset takes JSON lines")
        yield line


def _asked(line: bytes, place: str, *, chat: bool, output_len: int) -> Asked:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place} is no JSON: {error}", hint="--dataset takes JSON lines") from error
    if not isinstance(entry, Mapping):
        raise UsageError(f"{place} is {shown(entry)}, it must be an object")
    if unknown := sorted(entry.keys() - KEYS):
        raise UsageError(f"{place} has {shown(unknown[0])}, which means nothing here", hint="leave it out")
    if len({"prompt", "messages"} & entry.keys()) != 1:
        raise UsageError(f"{place} must have one of prompt and messages")
    length = entry.get("output_len", output_len)
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
        raise UsageError(f"{place}: output_len is {shown(length)}, it must be an integer of 1 or more")
    if "prompt" in entry:
        prompt = entry["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise UsageError(f"{place}: prompt is {shown(prompt)}, it must be a text")
        return Asked(prompt, None, length)
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(each, Mapping) for each in messages):
        raise UsageError(f"{place}: messages is {shown(messages)}, it must be a list of objects")
    if not chat:
        raise UsageError(f"{place} has messages", hint="--endpoint-type openai-chat sends them")
    return Asked(tuple(messages), None, length)
