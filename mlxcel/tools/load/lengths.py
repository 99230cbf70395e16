"""How many tokens a text has: from a tokenizer here, from the server, or, where nobody says, from its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import attrs

from mlxcel.errors import MlxcelError, UsageError
from mlxcel.tools.load.options import LoadOptions

Call = Callable[[str, str, Any], Any]
"""Method, route and body of a request to the server; the JSON of its reply. MlxcelError where it is no success."""


class Counter(Protocol):
    """`source` is what results have as `length_source`."""

    @property
    def source(self) -> str: ...

    def count(self, text: str) -> int:
        """Tokens that the server reads where this is a whole prompt of /v1/completions, or those of the text alone
        where it is a message of a chat."""
        ...


@attrs.frozen
class TokenizerCounter:
    """A tokenizer.json here."""

    tokenizer: Any
    special: bool
    source: str = "tokenizer"

    @classmethod
    def load(cls, path: Path, *, special: bool) -> TokenizerCounter:
        """`path` is the file or the folder that holds it. UsageError."""
        import tokenizers

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8")), special)
        except Exception as error:  # the library raises nothing more exact
            raise UsageError(
                f"--tokenizer {path}: {error}",
                hint="name a folder with a tokenizer.json, such as `mlxcel download NAME --export-tokenizer DIR` makes",
            ) from error

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=self.special).ids)

    def reply_tokens(self, text: str) -> int:
        """Of a reply, to which nothing is added."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


SHAPES: Final[tuple[tuple[str, str], ...]] = (("content", "add_special"), ("prompt", "add_special_tokens"))
"""What /tokenize calls its text, and whether ids are put around it: llama.cpp's server first, then vLLM's."""


@attrs.frozen
class ServerCounter:
    """The server's own /tokenize."""

    call: Call
    model: str
    special: bool
    shape: tuple[str, str]
    source: str = "server"

    @classmethod
    def find(cls, call: Call, model: str, *, special: bool) -> ServerCounter | None:
        """None where the server has no such route."""
        for shape in SHAPES:
            made = cls(call, model, special, shape)
            with suppress(MlxcelError):
                if made.count("the word") > 1:
                    return made
        return None

    def count(self, text: str) -> int:
        name, special = self.shape
        told = self.call("POST", "/tokenize", {"model": self.model, name: text, special: self.special})
        tokens = told.get("tokens") if isinstance(told, Mapping) else None
        return len(tokens) if isinstance(tokens, list) else 0


@attrs.frozen
class WordCounter:
    """A word counts as a token; what the server's usage says is believed."""

    source: str = "words"

    def count(self, text: str) -> int:
        return len(text.split())


def counter(options: LoadOptions, model: str, call: Call) -> Counter:
    """The best that there is. UsageError for a tokenizer that cannot be read."""
    special = not options.chat
    if options.tokenizer is not None:
        return TokenizerCounter.load(options.tokenizer, special=special)
    return ServerCounter.find(call, model, special=special) or WordCounter()
