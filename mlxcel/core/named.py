"""What a hook returns: a name, one line of help, and where the object lives. Importing a spec imports nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import attrs


def load_target(target: str) -> Any:
    """The object behind "package.module:Name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


@attrs.frozen
class Named:
    """A plugin's offer under a name that configuration chooses by.

    `target` is a lazy "package.module:Name" string, so that registering costs no import. `load()` returns the object,
    a factory whose keywords are documented with its hook.
    """

    name: str
    summary: str
    target: str

    def load(self) -> Any:
        return load_target(self.target)
