"""What a model at Hugging Face is called: `owner/name[@revision][:choice]`."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

import attrs

MAIN: Final = "main"
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_WORD: Final = r"[^\s:@\x00-\x1f\x7f]{1,120}"
_NAME: Final = re.compile(rf"({_PART})/({_PART})(?:@({_WORD}))?(?::({_WORD}))?")
_LONGEST_FOLDER: Final = 255  # bytes that file systems take
_FILES: Final = (".gguf", ".safetensors", ".json")


@attrs.frozen
class HubName:
    """`revision` is a branch, a tag or a commit. `choice` is one GGUF file of several, by its name or by the
    quantisation in it ("Q4_K_M"); None where the repository is to be taken as it is."""

    owner: str
    name: str
    revision: str = MAIN
    choice: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None for what no repository can be called, and for what reads as a path to a file."""
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        owner, name, revision, choice = found.groups()
        if any(pair in part for part in (owner, name) for pair in ("--", "..")):
            return None
        if revision is None and choice is None and name.lower().endswith(_FILES):
            return None
        if choice is not None and not choice.lower().endswith(".gguf"):
            choice = choice.upper()
        made = cls(owner, name, revision or MAIN, choice)
        return made if len(made.folder) <= _LONGEST_FOLDER else None

    @property
    def repository(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def text(self) -> str:
        """One spelling of what may be written in several: this is the model's name in the store."""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return self.repository + revision + (f":{self.choice}" if self.choice else "")

    @property
    def folder(self) -> str:
        """A name of a folder that no other model has, neither of Hugging Face nor of a plugin: those have no "@"."""
        choice = f"+{quote(self.choice, safe='')}" if self.choice else ""
        return f"{self.owner}--{self.name}@{quote(self.revision, safe='')}{choice}"
