"""Spellings of special tokens, under the names by which chat templates ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint

SPECIAL_TOKEN_NAMES: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    "additional_special_tokens",
)
GGUF_KEYS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # the format spells it so
    "pad_token": "tokenizer.ggml.padding_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}


def special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Name ("bos_token") to spelling, for those that exist: tokenizer_config.json over special_tokens_map.json over
    GGUF metadata. Any key that ends in "_token" and holds a spelling counts ("image_token")."""
    assets = checkpoint.assets
    tokens = _of_gguf(assets.get("gguf", {}))
    for source in ("special_tokens_map.json", "tokenizer_config.json"):
        tokens |= _of_json(assets.get(source, {}))
    return tokens


def _of_json(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        spelling = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(spelling, str):
            found[name] = spelling
    return found


def _of_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    spellings = metadata.get("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    if not isinstance(spellings, list):  # a damaged one is for the tokenizer to refuse
        return found
    for name, key in GGUF_KEYS.items():
        index = metadata.get(key)
        if type(index) is int and 0 <= index < len(spellings) and isinstance(spellings[index], str):
            found[name] = spellings[index]
    return found
