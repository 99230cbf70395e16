"""The conversation that `run` holds: messages of which the first may be the system's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from mlxcel.cli.prompt_input import read_messages
from mlxcel.errors import UsageError

Message = dict[str, Any]


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


@attrs.define
class Dialogue:
    """`messages` are what the template gets."""

    messages: list[Message] = attrs.field(factory=list)

    @property
    def has_system(self) -> bool:
        return bool(self.messages) and self.messages[0].get("role") == "system"

    def set_system(self, text: str) -> None:
        """An empty text takes the system message away."""
        self.messages[: int(self.has_system)] = [_message("system", text)] if text else []

    def say(self, text: str) -> None:
        self.messages.append(_message("user", text))

    def answer(self, text: str) -> None:
        self.messages.append(_message("assistant", text))

    def clear(self) -> None:
        """Begin anew; the system message stays."""
        del self.messages[int(self.has_system) :]

    def undo(self) -> bool:
        """Drop the last message of the user and what came after it. Whether there was one."""
        place = self._last_question()
        if place is None:
            return False
        del self.messages[place:]
        return True

    def reopen(self) -> bool:
        """Drop what came after the last message of the user. Whether there is one."""
        place = self._last_question()
        if place is None:
            return False
        del self.messages[place + 1 :]
        return True

    def save(self, file: Path) -> None:
        """As JSON that `load` and --messages read. UsageError for a file that is there, and where none can be made."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        try:
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError as error:
            raise UsageError(f"{file} is there already", hint="name a new file") from error
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, file: Path) -> Dialogue:
        """UsageError for what cannot be read, RequestError for what is no conversation."""
        from mlxcel.text.messages import checked_messages

        return cls(checked_messages(read_messages(str(file.absolute()))))

    def _last_question(self) -> int | None:
        places = (place for place in reversed(range(len(self.messages))) if self.messages[place]["role"] == "user")
        return next(places, None)
