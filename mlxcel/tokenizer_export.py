"""A model's tokenizer as the files that Hugging Face tools read, also where the model is a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import attrs

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import CheckpointError, UsageError
from mlxcel.text.chat_template import select_template
from mlxcel.text.special_tokens import special_tokens

if TYPE_CHECKING:
    import tokenizers

    from mlxcel.core.checkpoint import Checkpoint

TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
PROBES: Final = (
    "Hello, World! It's 3.14159 o'clock.",
    "  two  spaces\tand a tab\n\n\nand lines  ",
    "def f(x):\n    return {'a': [1, 22, 333]}  # ok",
    "Äpfel, naïve café, Привет мир, 你好世界, こんにちは, مرحبا, 👩‍🚀🇫🇷",
    "antidisestablishmentarianism aaaaaaaaaaaaaaaa ____ ---- ====",
)


@runtime_checkable
class Exportable(Protocol):
    """A `Tokenizer` that the `tokenizers` library can stand for."""

    def as_library(self) -> tokenizers.Tokenizer:
        """One that encodes by itself as this one does, BOS and EOS included. Raises CheckpointError where none can."""
        ...


@attrs.frozen
class Exported:
    """`differing` are the probes that the written tokenizer encodes to other ids than the model's own."""

    files: tuple[Path, ...]
    differing: tuple[str, ...]


def require_new_folder(folder: Path) -> None:
    """Raises UsageError where something is in it, or it is no folder: nothing is ever written over."""
    try:
        taken = any(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error.strerror or error}", hint="name a folder") from error
    if taken:
        raise UsageError(f"{folder} is not empty", hint="name a new or an empty folder")


def export_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, folder: Path) -> Exported:
    """Writes tokenizer.json and tokenizer_config.json, the chat template in it, into a new or empty folder.

    Raises UsageError for the folder, CheckpointError for a tokenizer that has no such form.
    """
    require_new_folder(folder)
    if not isinstance(tokenizer, Exportable):
        raise CheckpointError(
            f"{checkpoint.path}: its tokenizer, {type(tokenizer).__name__}, has no form as tokenizer.json",
            hint="take the one that the model's author publishes",
        )
    library = tokenizer.as_library()
    texts = {TOKENIZER: library.to_str(pretty=True), SETTINGS: json.dumps(_settings(checkpoint, tokenizer), indent=2)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written to: {error.strerror or error}", hint="name another folder"
        ) from error
    differing = [text for text in PROBES if library.encode(text).ids != tokenizer.encode(text, add_special=True)]
    return Exported(tuple(folder / name for name in texts), tuple(differing))


def _settings(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """The model's own tokenizer_config.json where it has one, else what it would say. No code is named: the class is
    the one that takes tokenizer.json as it is."""
    given: Mapping[str, Any] = checkpoint.assets.get(SETTINGS, {})
    settings = {key: value for key, value in given.items() if key not in ("auto_map", "chat_template")}
    settings |= special_tokens(checkpoint)
    for role, index in tokenizer.special_ids.items():
        if role in ("bos", "eos", "unk", "pad"):
            settings.setdefault(f"{role}_token", tokenizer.token_text(index))
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = select_template(checkpoint)
    if template is not None:
        settings["chat_template"] = template.source
    return settings
