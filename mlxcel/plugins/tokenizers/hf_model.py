"""tokenizer.model, SentencePiece's own file, for a folder without tokenizer.json, and the settings beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.errors import CheckpointError, shown
from mlxcel.plugins.tokenizers.end_of_turn import end_roles
from mlxcel.plugins.tokenizers.hf_json import MAX_ID, generation_roles, obeying, role_spellings
from mlxcel.plugins.tokenizers.sentencepiece import SentencePieceTokenizer
from mlxcel.plugins.tokenizers.sentencepiece_file import read_model_file
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.token_kinds import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

if TYPE_CHECKING:
    from mlxcel.core.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


def load(checkpoint: Checkpoint) -> SentencePieceTokenizer:
    """The tokenizer of a checkpoint whose assets have "tokenizer.model". Raises CheckpointError when it is damaged.

    Roles: tokenizer_config.json, then special_tokens_map.json, then the model; generation_config.json fills what all
    leave open. A BOS is put in front unless `add_bos_token` is false, an EOS behind only where `add_eos_token` is true.
    `added_tokens_decoder` adds tokens and says which are special; `add_prefix_space` false takes the space prefix away,
    and `legacy` false leaves it to the beginning of a text (else it comes behind special tokens too).
    """
    path = checkpoint.assets["tokenizer.model"]
    settings = checkpoint.assets.get("tokenizer_config.json", {})
    model, roles = read_model_file(path)
    added = added_tokens(settings, len(model.tokens), path.with_name("tokenizer_config.json"))
    model = extended(model, added)
    spelled = role_spellings(settings, checkpoint.assets.get("special_tokens_map.json", {}))
    ids = {token: index for index, token in enumerate(model.tokens) if token in spelled.values()}
    roles |= {role: ids[token] for role, token in spelled.items() if token in ids}
    model = with_special(model, set(roles.values()))
    if settings.get("add_prefix_space") is False:
        model = attrs.evolve(model, space_prefix=False)
    completed, ends = end_roles(model.control(), roles)
    bos = completed.get("bos")
    return SentencePieceTokenizer(
        model,
        special_ids={**generation_roles(checkpoint, len(model.tokens)), **completed},
        eos_ids=ends,
        prefix=obeying(settings.get("add_bos_token"), bos, [] if bos is None else [bos], 0),
        suffix=obeying(settings.get("add_eos_token"), completed.get("eos"), [], -1),
        space_once=settings.get("legacy") is False,
        strips_before={index for index, token in added.items() if token.strips_before},
        strips_after={index for index, token in added.items() if token.strips_after},
    )


@attrs.frozen
class AddedToken:
    spelling: str
    special: bool
    strips_before: bool
    strips_after: bool


def added_tokens(settings: Mapping[str, Any], size: int, path: Path) -> dict[int, AddedToken]:
    """`added_tokens_decoder` by id. Raises CheckpointError for ids that no vocabulary of `size` pieces goes on with."""
    entries = settings.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: added_tokens_decoder is {shown(entries)}, an object is expected")
    found: dict[int, AddedToken] = {}
    for key, value in entries.items():
        spelling = value.get("content") if isinstance(value, dict) else None
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_ID))) or not isinstance(spelling, str):
            raise CheckpointError(f"{path}: added_tokens_decoder[{shown(key)}] is no token", hint="download it again")
        flags = [value.get(name) is True for name in ("special", "lstrip", "rstrip")]
        found[int(key)] = AddedToken(spelling, *flags)
    highest = max(found, default=-1)
    if highest >= min(MAX_ID, size + len(found)):
        raise CheckpointError(
            f"{path}: added token {shown(found[highest].spelling)} has the id {highest}, where {size} pieces and "
            f"{len(found)} added tokens leave room for ids below {min(MAX_ID, size + len(found))}",
            hint="take tokenizer.model and tokenizer_config.json of one model",
        )
    return found


def extended(model: SentencePieceModel, added: Mapping[int, AddedToken]) -> SentencePieceModel:
    """The model with added tokens at their ids. A place that nothing fills is an unused row."""
    size = max(len(model.tokens), max(added, default=-1) + 1)
    more = size - len(model.tokens)
    tokens, scores = [*model.tokens, *[""] * more], [*model.scores, *[0.0] * more]
    kinds = [*model.kinds, *[UNUSED] * more]
    for index, token in added.items():
        if index < len(model.tokens) and tokens[index] != token.spelling:
            logger.warning(
                "%s: token %d is %s there and %s in tokenizer_config.json, whose entry is ignored",
                *(model.where, index, shown(tokens[index]), shown(token.spelling)),
            )
        elif kinds[index] not in (UNKNOWN, BYTE):
            tokens[index] = token.spelling
            kinds[index] = CONTROL if token.special else USER_DEFINED
    return attrs.evolve(model, tokens=tokens, scores=scores, kinds=kinds)


def with_special(model: SentencePieceModel, ids: set[int]) -> SentencePieceModel:
    """A role makes an ordinary piece a control token."""
    kinds = [
        CONTROL if kind in (NORMAL, USER_DEFINED) and index in ids else kind for index, kind in enumerate(model.kinds)
    ]
    return attrs.evolve(model, kinds=kinds)
