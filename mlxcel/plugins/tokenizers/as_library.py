"""Tokenizers as ones of the `tokenizers` library that need nothing beside them: what a tokenizer.json holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mlxcel.errors import CheckpointError
from mlxcel.plugins.tokenizers.pieces import SPACE
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.token_kinds import CONTROL, UNKNOWN, USER_DEFINED


def surrounded(library: tokenizers.Tokenizer, prefix: Sequence[int], suffix: Sequence[int]) -> tokenizers.Tokenizer:
    """`library`, changed: it puts the ids around a text, and decodes byte-level pieces where nothing decoded them."""
    from mlxcel.plugins.tokenizers.hf_json import surrounding_ids

    if library.decoder is None:
        library.decoder = decoders.ByteLevel()
    if surrounding_ids(library) != (list(prefix), list(suffix)):
        library.post_processor = _template(library, prefix, suffix)
    return library


def _template(
    library: tokenizers.Tokenizer, prefix: Sequence[int], suffix: Sequence[int]
) -> processors.TemplateProcessing:
    """The ids are named by numbers: a spelling may hold what a template means something by."""
    before, after = [f"id{index}" for index in prefix], [f"id{index}" for index in suffix]
    tokens = [
        {"id": f"id{index}", "ids": [index], "tokens": [library.id_to_token(index)]}
        for index in dict.fromkeys((*prefix, *suffix))
    ]
    single = [*before, "$A", *after]
    pair = [*single, *(f"{piece}:1" for piece in (*before, "$B", *after))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def of_sentencepiece(
    model: SentencePieceModel,
    *,
    space_once: bool,
    strips_before: Collection[int],
    strips_after: Collection[int],
) -> tokenizers.Tokenizer:
    """The library's own form of a SentencePiece model: Unigram, or BPE with merges derived from the scores.

    The library ranks pairs where SentencePiece ranks pieces, so that the two may split a text differently where two
    splits of one piece meet; and it puts the space prefix behind user-defined tokens too. Raises CheckpointError for a
    model that changes characters before it segments.
    """
    if model.charsmap is not None or model.remove_extra_spaces:
        raise CheckpointError(
            f"{model.where}: a tokenizer that replaces characters or takes spaces away has no exact tokenizer.json",
            hint="take the one that the model's author publishes",
        )
    library = tokenizers.Tokenizer(_unigram(model) if model.unigram else _bpe(model))
    if not model.space_prefix:
        library.normalizer = normalizers.Replace(" ", SPACE)
    elif space_once:
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)

    def added(*kinds: int) -> list[tokenizers.AddedToken]:
        special = USER_DEFINED not in kinds
        return [
            tokenizers.AddedToken(
                model.tokens[index],
                lstrip=index in strips_before,
                rstrip=index in strips_after,
                normalized=False,
                special=special,
            )
            for index in model.ids_of(*kinds)
        ]

    library.add_special_tokens(added(CONTROL, UNKNOWN))
    library.add_tokens(added(USER_DEFINED))
    return library


def _unigram(model: SentencePieceModel) -> models.Unigram:
    pieces = [(token, float(score)) for token, score in zip(model.tokens, model.scores, strict=True)]
    return models.Unigram(pieces, unk_id=_unknown(model), byte_fallback=bool(model.byte_ids()))


def _bpe(model: SentencePieceModel) -> models.BPE:
    unknown = _unknown(model)
    return models.BPE(
        vocab={token: index for index, token in enumerate(model.tokens)},
        merges=list(_merges(model)),
        unk_token=None if unknown is None else model.tokens[unknown],
        fuse_unk=True,
        byte_fallback=bool(model.byte_ids()),
    )


def _merges(model: SentencePieceModel) -> Iterator[tuple[str, str]]:
    """All pairs that join to a piece: the best-scored piece first, as SentencePiece joins."""
    pieces = model.pieces()
    for piece in sorted(pieces, key=lambda piece: -model.scores[pieces[piece]]):
        splits = [(piece[:place], piece[place:]) for place in range(1, len(piece))]
        found = [(left, right) for left, right in splits if left in pieces and right in pieces]
        yield from sorted(found, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))


def _unknown(model: SentencePieceModel) -> int | None:
    return next(iter(model.ids_of(UNKNOWN)), None)
