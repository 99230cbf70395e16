"""Byte-level BPE from GGUF metadata: tokens, merges, token types and the name of a pre-tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from mlxcel.errors import CheckpointError, shown
from mlxcel.plugins.tokenizers.end_of_turn import end_roles
from mlxcel.plugins.tokenizers.gguf_metadata import KEY, flag, role_ids, strings, token_types
from mlxcel.plugins.tokenizers.library import LibraryTokenizer
from mlxcel.plugins.tokenizers.pieces import PieceTable, byte_level_pieces
from mlxcel.plugins.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from mlxcel.plugins.tokenizers.token_kinds import CONTROL, UNKNOWN, UNUSED, USER_DEFINED


def from_metadata(metadata: Mapping[str, Any], path: Path) -> LibraryTokenizer:
    """`metadata` under full keys, whose model is "gpt2"; `path` is for messages.

    Raises CheckpointError when they are damaged, or name a pre-tokenizer that is not known.
    """
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
        table=PieceTable(pieces, pieces),
    )


def pre_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTokenizer:
    name = metadata.get(f"{KEY}pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path}: pre-tokenizer {shown(name)} is not known, known are {', '.join(PRE_TOKENIZERS)}",
            hint="take the checkpoint as a folder with tokenizer.json",
        )
    return PRE_TOKENIZERS[name]


def merge_pairs(metadata: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    """Pairs in order of rank. Byte-level spellings hold no space, so the one space parts left from right."""
    pairs: list[tuple[str, str]] = []
    for merge in strings(metadata, "merges", path):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{path}: merge {shown(merge)} in {KEY}merges is not two tokens with a space between")
        pairs.append((left, right))
    return pairs


def build(tokens: Sequence[str], merges: list[tuple[str, str]], pre: PreTokenizer, path: Path) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(index for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(
            f"{path}: token {shown(tokens[twice])} occurs twice, as {twice} and {vocabulary[tokens[twice]]}",
            hint="convert the model again",
        )
    for left, right in merges:
        lost = next((token for token in (left, right, left + right) if token not in vocabulary), None)
        if lost is not None:
            raise CheckpointError(
                f"{path}: merge {shown(left)} {shown(right)} needs the token {shown(lost)}, "
                "which is not in the vocabulary",
                hint="convert the model again",
            )
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignore_merges))
    library.pre_tokenizer = pre.words()
    normalizer = pre.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    return library
