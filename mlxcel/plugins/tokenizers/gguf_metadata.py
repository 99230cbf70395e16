"""What every tokenizer in GGUF metadata has: tokens, token types, roles of ids, flags. Each is checked before use."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlxcel.errors import CheckpointError, shown

logger = logging.getLogger(__name__)

KEY: Final = "tokenizer.ggml."
ROLE_KEYS: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}


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


def role_ids(metadata: Mapping[str, Any], size: int, path: Path) -> dict[str, int]:
    """Roles to ids, those in the vocabulary."""
    roles: dict[str, int] = {}
    for role, name in ROLE_KEYS.items():
        value = metadata.get(KEY + name)
        if type(value) is int and 0 <= value < size:
            roles[role] = value
        elif value is not None:
            logger.warning("%s: %s%s is %s, outside the %d tokens: ignored", path, KEY, name, shown(value), size)
    return roles


def flag(metadata: Mapping[str, Any], name: str, default: bool, path: Path) -> bool:
    value = metadata.get(KEY + name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {KEY}{name} is {shown(value)}, true or false is expected")
    return value
