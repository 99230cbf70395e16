"""From a text to what a SentencePiece model segments: characters normalised, spaces as ▁."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from mlxcel.plugins.tokenizers.pieces import SPACE
from mlxcel.plugins.tokenizers.spellings import Spellings

RUN: Final = re.compile("  +")


class Normaliser:
    """`charsmap` replaces characters, if the model has one. `space_prefix` puts a space in front of a text that begins;
    `remove_extra_spaces` takes spaces away at both ends and leaves one of each run. `protected` are the user-defined
    tokens, whose characters stay as they are. Source: sentencepiece, `normalizer.cc`.
    """

    def __init__(
        self,
        charsmap: Callable[[str], str] | None,
        *,
        space_prefix: bool,
        remove_extra_spaces: bool,
        protected: Spellings,
    ) -> None:
        self._charsmap = charsmap
        self._space_prefix = space_prefix
        self._remove_extra_spaces = remove_extra_spaces
        self._protected = protected

    def __call__(self, text: str, spelled: Callable[[int], str], *, begins: bool) -> str:
        """`spelled` gives the spelling of a protected id; `begins` says whether the text begins here."""
        if self._charsmap is not None or self._remove_extra_spaces:
            text = self._changed(text, spelled)
        if text and begins and self._space_prefix:
            text = f" {text}"
        return text.replace(" ", SPACE)

    def _changed(self, text: str, spelled: Callable[[int], str]) -> str:
        parts: list[str] = []
        behind_space = True
        for part in self._protected.split(text):
            if isinstance(part, int):
                changed = spelled(part)
            else:
                changed = part if self._charsmap is None else self._charsmap(part)
                if self._remove_extra_spaces:
                    changed = RUN.sub(" ", changed)
            if self._remove_extra_spaces and behind_space:
                changed = changed.lstrip(" ")
            if changed:
                behind_space = changed.endswith(" ")
                parts.append(changed)
        joined = "".join(parts)
        return joined.rstrip(f" {SPACE}") if self._remove_extra_spaces else joined
