"""Lines from a terminal, with a history in a file: prompt-toolkit, set up."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

log = logging.getLogger("mlxcel.cli")

QUOTES: Final = '"""'
PROMPT: Final = "> "
CONTINUED: Final = ". "


def is_open(text: str) -> bool:
    """Whether a message that `QUOTES` opened is not closed yet."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


class LineEditor:
    """Enter ends a message, unless `QUOTES` opened it and do not close it; Alt-Enter is a newline in any. What is shown
    goes to stderr. Without a `history` file none is kept."""

    def __init__(self, history: Path | None) -> None:
        keys = KeyBindings()
        keys.add("enter")(_enter)
        for enter in ("enter", "c-j"):  # what was typed before there was a prompt comes as c-j
            keys.add("escape", enter)(_newline)
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=CONTINUED,
            key_bindings=keys,
            history=_opened(history),
            output=create_output(stdout=sys.stderr),
        )

    def read(self) -> str:
        """The next message as it was typed. KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D in an empty line."""
        return self._session.prompt()


def _enter(event: KeyPressEvent) -> None:
    if is_open(event.current_buffer.text):
        event.current_buffer.insert_text("\n")
    else:
        event.current_buffer.validate_and_handle()


def _newline(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def _opened(file: Path | None) -> History:
    """The history of a file that its owner alone may read. One that cannot be written is none."""
    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("no history is kept: %s: %s", file, error.strerror or error)
        return InMemoryHistory()
    return FileHistory(str(file))
