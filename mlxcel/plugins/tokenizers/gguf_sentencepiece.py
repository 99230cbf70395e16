"""SentencePiece from GGUF metadata: "llama" is BPE by score, "t5" is Unigram."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from mlxcel.errors import CheckpointError
from mlxcel.plugins.tokenizers.charsmap import CharsMap
from mlxcel.plugins.tokenizers.end_of_turn import end_roles
from mlxcel.plugins.tokenizers.gguf_metadata import KEY, flag, role_ids, strings, token_types
from mlxcel.plugins.tokenizers.sentencepiece import SentencePieceTokenizer
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.token_kinds import CONTROL, UNKNOWN, USER_DEFINED

MAX_CHARSMAP: Final = 1 << 22  # bytes; that of NFKC with case folding has about 2**18


@attrs.frozen
class Defaults:
    """What holds where the metadata say nothing. Source: llama.cpp, `llama_vocab::impl::load`."""

    roles: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    space_prefix: bool


DEFAULTS: Final = {
    "llama": Defaults({"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_eos=False, space_prefix=True),
    "t5": Defaults({"eos": 1, "unk": 2, "pad": 0}, add_bos=False, add_eos=True, space_prefix=False),
}


def from_metadata(metadata: Mapping[str, Any], path: Path) -> SentencePieceTokenizer:
    """`metadata` under full keys, whose model is "llama" or "t5"; `path` is for messages.

    A role that the metadata leave open is the default's where that id is a control token, or the unknown one. The
    pre-tokenizer's name says nothing for these models. Raises CheckpointError when anything does not hold.
    """
    defaults = DEFAULTS[metadata[f"{KEY}model"]]
    tokens = strings(metadata, "tokens", path)
    model = SentencePieceModel(
        str(path),
        tokens,
        scores(metadata, len(tokens), path),
        token_types(metadata, len(tokens), path),
        unigram=metadata[f"{KEY}model"] == "t5",
        space_prefix=flag(metadata, "add_space_prefix", defaults.space_prefix, path),
        remove_extra_spaces=flag(metadata, "remove_extra_whitespaces", False, path),
        charsmap=charsmap(metadata, path),
    )
    control = model.control()
    special = set(control.values())
    assumed = {role: index for role, index in defaults.roles.items() if index in special}
    roles, ends = end_roles(control, {**assumed, **role_ids(metadata, len(tokens), path)})
    return SentencePieceTokenizer(
        model,
        special_ids=roles,
        eos_ids=ends,
        prefix=[roles["bos"]] if flag(metadata, "add_bos_token", defaults.add_bos, path) and "bos" in roles else [],
        suffix=[roles["eos"]] if flag(metadata, "add_eos_token", defaults.add_eos, path) and "eos" in roles else [],
        strips_after=strips_after(metadata, model),
    )


def scores(metadata: Mapping[str, Any], size: int, path: Path) -> list[float]:
    values = metadata.get(f"{KEY}scores")
    if not isinstance(values, list) or len(values) != size:
        found = len(values) if isinstance(values, list) else "none"
        raise CheckpointError(
            f"{path}: {size} tokens need as many scores in {KEY}scores, found {found}",
            hint="convert the model again: without them nothing says which pieces join",
        )
    return values


def charsmap(metadata: Mapping[str, Any], path: Path) -> CharsMap | None:
    """The table of `precompiled_charsmap`, an array of signed or unsigned bytes."""
    name = f"{KEY}precompiled_charsmap"
    values = metadata.get(name)
    if not values and (values is None or isinstance(values, list)):
        return None
    if not isinstance(values, list) or len(values) > MAX_CHARSMAP or not set(map(type, values)) <= {int}:
        raise CheckpointError(f"{path}: {name} is no array of at most {MAX_CHARSMAP} bytes")
    if min(values) < -128 or max(values) > 255:
        raise CheckpointError(f"{path}: {name} holds numbers from {min(values)} to {max(values)}, which are no bytes")
    try:
        return CharsMap(bytes(value & 0xFF for value in values))
    except ValueError as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}", hint="convert the model again") from error


def strips_after(metadata: Mapping[str, Any], model: SentencePieceModel) -> set[int]:
    """The tokens that take the white space behind them, which GGUF files do not say: those of Phi-3."""
    if metadata.get("general.architecture") != "phi3":
        return set()
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return {i for i in model.ids_of(CONTROL, UNKNOWN, USER_DEFINED) if model.tokens[i] not in kept}
