"""What of a reply goes to stdout, and when."""

from __future__ import annotations

import sys
from io import TextIOWrapper

import attrs


def utf8_stdout() -> None:
    """Whatever the locale. Newlines stay as the model wrote them; bytes of a path that are no UTF-8 become escapes,
    which JSON reads."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@attrs.define
class ReplyOutput:
    """Writes text as it comes, and reasoning before it where it is to be seen, with a newline between them."""

    show_reasoning: bool
    open_line: bool = False  # whether the last thing written is reasoning that ended inside a line

    def text(self, text: str) -> None:
        write(f"\n{text}" if self.open_line else text)
        self.open_line = False

    def reasoning(self, text: str) -> None:
        if self.show_reasoning:
            write(text)
            self.open_line = not text.endswith("\n")
