"""The ids that end a reply: the union of everything that names one (spec 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.text.generation_config import GenerationDefaults, id_list

if TYPE_CHECKING:
    from mlxcel.core.tokenizer import Tokenizer


@attrs.frozen
class EndIds:
    """`ids`, all in [0, V); who named each, in the order config, generation config, tokenizer, family; and the warnings
    for the ids that were dropped, one line each, to be logged once at load."""

    ids: frozenset[int]
    sources: Mapping[int, tuple[str, ...]]
    warnings: tuple[str, ...]


def end_ids(
    config: Mapping[str, Any],
    generation_config: GenerationDefaults | None,
    tokenizer: Tokenizer | None,
    family_ids: Iterable[int],
    vocab: int,
) -> EndIds:
    """The set E of a model with V = `vocab` rows in its unembedding.

    `config` is the checkpoint's: `eos_token_id` at its top and in `text_config`, an int or a list. What
    `--generation-config` took comes as `generation_config`; mode "none" leaves it empty. The ends that GGUF metadata
    name come through the tokenizer. Raises CheckpointError for an `eos_token_id` of config.json that holds no ids.
    """
    named: list[tuple[str, Iterable[int]]] = [
        ("config.json", id_list(config.get("eos_token_id"), "config: eos_token_id"))
    ]
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        where = "config: text_config.eos_token_id"
        named.append(("config.json text_config", id_list(text_config.get("eos_token_id"), where)))
    if generation_config is not None:
        named.append((generation_config.eos_origin or "generation config", generation_config.eos_ids))
    if tokenizer is not None:
        named.append(("tokenizer", sorted(tokenizer.eos_ids)))
    named.append(("family", family_ids))
    sources: dict[int, tuple[str, ...]] = {}
    warnings: list[str] = []
    for origin, ids in named:
        for token_id in dict.fromkeys(ids):
            if 0 <= token_id < vocab:
                sources[token_id] = (*sources.get(token_id, ()), origin)
            else:
                warnings.append(f"{origin} names the end id {token_id}, outside the {vocab} ids of the model: ignored")
    return EndIds(frozenset(sources), MappingProxyType(sources), tuple(warnings))
