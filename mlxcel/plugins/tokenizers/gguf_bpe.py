"""Byte-level BPE from GGUF metadata: tokens, merges, token types and the name of a pre-tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import models

from mlxcel.errors import CheckpointError
from mlxcel.plugins.tokenizers.end_of_turn import end_roles
from mlxcel.plugins.tokenizers.library import LibraryTokenizer
from mlxcel.plugins.tokenizers.pieces import byte_level_pieces
from mlxcel.plugins.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

KEY: Final = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # `llama_token_type`; 1 is normal, 6 a byte
ROLE_KEYS: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}


def load(checkpoint: Checkpoint) -> LibraryTokenizer:
    """The tokenizer of a checkpoint whose assets have "gguf".

    Raises CheckpointError when the metadata are damaged, or name a model or a pre-tokenizer that is not known.
    """
    return from_metadata(checkpoint.assets["gguf"], checkpoint.path)


def from_metadata(metadata: Mapping[str, Any], path: Path) -> LibraryTokenizer:
    """`metadata` under full keys; `path` is for messages."""
    pre = pre_tokenizer(metadata, path)
    tokens = strings(metadata, "tokens", path)
    types = token_types(metadata, len(tokens), path)
    library = build(tokens, merge_pairs(metadata, path), pre, path)
    special = [index for index, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)]
    defined = [index for index, kind in enumerate(types) if kind == USER_DEFINED]
    library.add_special_tokens([tokenizers.AddedToken(tokens[i], normalized=False, special=True) for i in special])
    library.add_tokens([tokenizers.AddedToken(tokens[i], normalized=False, special=False) for i in defined])
    pieces = byte_level_pieces(tokens, {*special, *defined})
    for index, kind in enumerate(types):
        if kind == UNUSED:  # rows that pad the vocabulary
            pieces[index] = b""
    control = {tokens[index]: index for index in special}
    roles, ends = end_roles(control, role_ids(metadata, len(tokens), path))
    return LibraryTokenizer(
        library,
        tokens=tokens,
        special=special,
        special_ids=roles,
        eos_ids=ends,
        prefix=[roles["bos"]] if flag(metadata, "add_bos_token", pre.adds_bos, path) and "bos" in roles else [],
        suffix=[roles["eos"]] if flag(metadata, "add_eos_token", False, path) and "eos" in roles else [],
        pieces=pieces,
    )


def pre_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTokenizer:
    model, name = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}pre", "default")
    if model is None:
        raise CheckpointError(f"{path} holds no tokenizer ({KEY}model is missing)", hint="convert the model again")
    if model != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer model {model!r} is not known, known is 'gpt2' (byte-level BPE)",
            hint="take the checkpoint as a folder with tokenizer.json",
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: pre-tokenizer {name!r} is not known, known are {', '.join(PRE_TOKENIZERS)}",
            hint="take the checkpoint as a folder with tokenizer.json",
        )
    return PRE_TOKENIZERS[name]


def strings(metadata: Mapping[str, Any], name: str, path: Path) -> list[str]:
    values = metadata.get(KEY + name)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{path}: {KEY}{name} must be a list of strings", hint="convert the model again")
    return values


def token_types(metadata: Mapping[str, Any], size: int, path: Path) -> Sequence[int]:
    types = metadata.get(f"{KEY}token_type")
    if not isinstance(types, list) or len(types) != size:
        found = len(types) if isinstance(types, list) else "none"
        raise CheckpointError(
            f"{path}: {size} tokens need as many token types in {KEY}token_type, found {found}",
            hint="convert the model again: without them control tokens cannot be told from text",
        )
    return types


def merge_pairs(metadata: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    """Pairs in order of rank. Byte-level spellings hold no space, so the one space parts left from right."""
    pairs: list[tuple[str, str]] = []
    for merge in strings(metadata, "merges", path):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{path}: merge {merge!r} in {KEY}merges is not two tokens with a space between")
        pairs.append((left, right))
    return pairs


def build(tokens: Sequence[str], merges: list[tuple[str, str]], pre: PreTokenizer, path: Path) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(index for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(
            f"{path}: token {tokens[twice]!r} occurs twice, as {twice} and {vocabulary[tokens[twice]]}",
            hint="convert the model again",
        )
    for left, right in merges:
        lost = next((token for token in (left, right, left + right) if token not in vocabulary), None)
        if lost is not None:
            raise CheckpointError(
                f"{path}: merge {left!r} {right!r} needs the token {lost!r}, which is not in the vocabulary",
                hint="convert the model again",
            )
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    library.pre_tokenizer = pre.words()
    normalizer = pre.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    return library


def role_ids(metadata: Mapping[str, Any], size: int, path: Path) -> dict[str, int]:
    roles: dict[str, int] = {}
    for role, name in ROLE_KEYS.items():
        value = metadata.get(KEY + name)
        if type(value) is int and 0 <= value < size:
            roles[role] = value
        elif value is not None:
            logger.warning("%s: %s%s is %r, outside the %d tokens: ignored", path, KEY, name, value, size)
    return roles


def flag(metadata: Mapping[str, Any], name: str, default: bool, path: Path) -> bool:
    value = metadata.get(KEY + name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {KEY}{name} is {value!r}, true or false is expected")
    return value
