"""The model file of SentencePiece, a protocol-buffer message, as data.

Field numbers: sentencepiece's `sentencepiece_model.proto`, messages `ModelProto`, `SentencePiece`, `TrainerSpec`,
`NormalizerSpec`. Fields that do not bear on text and ids are passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import attrs

from mlxcel.errors import CheckpointError, shown
from mlxcel.plugins.tokenizers.charsmap import CharsMap
from mlxcel.plugins.tokenizers.protobuf import as_bytes, as_float, as_signed, as_text, fields
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.token_kinds import NORMAL

MAX_BYTES: Final = 1 << 27  # the largest known, of 262,144 pieces, has about 2**22
MAX_PIECES: Final = 1 << 22
UNIGRAM, BPE = 1, 2
MODEL_TYPES: Final = {UNIGRAM: "unigram", BPE: "bpe", 3: "word", 4: "char"}
ROLE_FIELDS: Final = {40: "unk", 41: "bos", 42: "eos", 43: "pad"}


@attrs.define
class Settings:
    """Of the trainer and the normaliser, with the defaults of the message definition. `roles` may hold -1: none."""

    model_type: int = UNIGRAM
    roles: dict[str, int] = attrs.Factory(lambda: {"unk": 0, "bos": 1, "eos": 2, "pad": -1})
    space_as_suffix: bool = False
    charsmap: bytes = b""
    space_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True


def read_model_file(path: Path) -> tuple[SentencePieceModel, dict[str, int]]:
    """The model, and its roles in the vocabulary. Raises CheckpointError for a file that is damaged or no such model,
    and for kinds of models that are not known."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, at most {MAX_BYTES} are taken")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        pieces, settings = _message(data)
        charsmap = CharsMap(settings.charsmap) if settings.charsmap else None
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no SentencePiece model, or damaged: {error}", hint="download it again"
        ) from error
    if not pieces:
        raise CheckpointError(f"{path} holds no piece: it is no SentencePiece model", hint="download it again")
    refuse_unknown(settings, path)
    model = SentencePieceModel(
        str(path),
        [token for token, _, _ in pieces],
        [score for _, score, _ in pieces],
        [kind for _, _, kind in pieces],
        unigram=settings.model_type == UNIGRAM,
        space_prefix=settings.space_prefix,
        remove_extra_spaces=settings.remove_extra_spaces,
        charsmap=charsmap,
    )
    return model, {role: index for role, index in settings.roles.items() if 0 <= index < len(pieces)}


def refuse_unknown(settings: Settings, path: Path) -> None:
    hint = "take a folder with tokenizer.json, or a GGUF file"
    if settings.model_type not in (UNIGRAM, BPE):
        kind = MODEL_TYPES.get(settings.model_type, shown(settings.model_type))
        raise CheckpointError(f"{path}: models of the type {kind} are not read, only unigram and bpe", hint=hint)
    if settings.space_as_suffix:
        raise CheckpointError(f"{path}: spaces behind words (treat_whitespace_as_suffix) are not known", hint=hint)
    if not settings.escape_spaces:
        raise CheckpointError(f"{path}: spaces that are not ▁ (escape_whitespaces off) are not known", hint=hint)


def _message(data: bytes) -> tuple[list[tuple[str, float, int]], Settings]:
    pieces: list[tuple[str, float, int]] = []
    settings = Settings()
    for number, value in fields(data):
        if number == 1:
            if len(pieces) == MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES} pieces")
            pieces.append(_piece(as_bytes(value)))
        elif number == 2:
            _trainer(as_bytes(value), settings)
        elif number == 3:
            _normaliser(as_bytes(value), settings)
        elif number == 5 and any(number == 2 and as_bytes(v) for number, v in fields(as_bytes(value))):
            raise ValueError("a table of characters for decoding, which is not known")
    return pieces, settings


def _piece(data: bytes) -> tuple[str, float, int]:
    token, score, kind = "", 0.0, NORMAL
    for number, value in fields(data):
        if number == 1:
            token = as_text(value)
        elif number == 2:
            score = as_float(value)
        elif number == 3:
            kind = as_signed(value)
    return token, score, kind


def _trainer(data: bytes, settings: Settings) -> None:
    for number, value in fields(data):
        if number == 3:
            settings.model_type = as_signed(value)
        elif number == 24:
            settings.space_as_suffix = as_signed(value) != 0
        elif number in ROLE_FIELDS:
            settings.roles[ROLE_FIELDS[number]] = as_signed(value)


def _normaliser(data: bytes, settings: Settings) -> None:
    for number, value in fields(data):
        if number == 2:
            settings.charsmap = as_bytes(value)
        elif number == 3:
            settings.space_prefix = as_signed(value) != 0
        elif number == 4:
            settings.remove_extra_spaces = as_signed(value) != 0
        elif number == 5:
            settings.escape_spaces = as_signed(value) != 0
