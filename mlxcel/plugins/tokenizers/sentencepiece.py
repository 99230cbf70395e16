"""The `Tokenizer` of SentencePiece models: what `sentencepiece` itself encodes, and special spellings besides."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from mlxcel.plugins.tokenizers.library import encodable
from mlxcel.plugins.tokenizers.pieces import PieceTable, dropping_one_space, sentencepiece_pieces
from mlxcel.plugins.tokenizers.score_bpe import ScoreBpe
from mlxcel.plugins.tokenizers.sentencepiece_model import SentencePieceModel
from mlxcel.plugins.tokenizers.spaces import Normaliser
from mlxcel.plugins.tokenizers.spellings import Spellings
from mlxcel.plugins.tokenizers.token_kinds import CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from mlxcel.plugins.tokenizers.unigram import Unigram

if TYPE_CHECKING:
    import tokenizers


class SentencePieceTokenizer:
    """A `Tokenizer` over a `SentencePieceModel`.

    User-defined tokens are found first (a best path may take longer pieces over them), then the rest is segmented by
    score; a character that is no piece becomes its UTF-8 bytes where the vocabulary has byte tokens for all of them,
    else the unknown token, one for each run. Control tokens come from spellings only, and only with `parse_special`;
    behind one a text begins anew, so that it gets its space prefix again unless `space_once`.

    `prefix` and `suffix` are the ids that `add_special` puts around a text; `strips_before` and `strips_after` the
    special or user-defined tokens that take the white space beside them.
    """

    byte_exact = True

    def __init__(
        self,
        model: SentencePieceModel,
        *,
        special_ids: Mapping[str, int],
        eos_ids: frozenset[int],
        prefix: Sequence[int],
        suffix: Sequence[int],
        space_once: bool = False,
        strips_before: Collection[int] = (),
        strips_after: Collection[int] = (),
    ) -> None:
        self.size = len(model.tokens)
        self.special_ids = dict(special_ids)
        self.eos_ids = eos_ids
        self._tokens = model.tokens
        self._special = frozenset(model.ids_of(CONTROL, UNKNOWN))
        self._table = piece_table(model)
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self._space_once = space_once
        self._model = model
        self._strips = (frozenset(strips_before), frozenset(strips_after))
        self._ids = model.pieces()
        self._bytes = model.byte_ids()
        self._unknown = next(iter(model.ids_of(UNKNOWN)), self.special_ids.get("unk"))
        defined = model.ids_of(USER_DEFINED)
        self._whole = Spellings({} if model.unigram else {model.as_normalised(index): index for index in defined})
        strips = {"strips_before": strips_before, "strips_after": strips_after}
        early = {model.tokens[index]: index for index in defined if index in {*strips_before, *strips_after}}
        self._spelled = Spellings({**model.control(), **early}, **strips)
        self._spelled_literally = Spellings(early, **strips)
        self._normalise = Normaliser(
            model.charsmap,
            space_prefix=model.space_prefix,
            remove_extra_spaces=model.remove_extra_spaces,
            protected=Spellings({model.tokens[index]: index for index in defined}),
        )
        self._segment = segmenter(model, self._ids)
        bos = self.special_ids.get("bos")
        self.adds_bos = bos is not None and self._prefix[:1] == [bos]

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        ids: list[int] = []
        begins = True
        for part in (self._spelled if parse_special else self._spelled_literally).split(encodable(text)):
            if isinstance(part, int):
                ids.append(part)
                begins = not self._space_once
            else:
                ids += self._text_ids(self._normalise(part, self.token_text, begins=begins))
                begins = False
        if not add_special:
            return ids
        bos_is_written = self.adds_bos and ids[:1] == self._prefix[:1]
        return [*(self._prefix[1:] if bos_is_written else self._prefix), *ids, *self._suffix]

    def _text_ids(self, text: str) -> list[int]:
        """Ids of normalised text without special spellings."""
        ids: list[int] = []
        for part in self._whole.split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            for piece in self._segment(part):
                index = self._ids.get(piece)
                if index is not None:
                    ids.append(index)
                else:
                    self._append_unknown(piece, ids)
        return ids

    def _append_unknown(self, piece: str, ids: list[int]) -> None:
        found = [self._bytes.get(byte) for byte in piece.encode()]
        known = [index for index in found if index is not None]
        if len(known) == len(found):
            ids += known
        elif self._unknown is not None and ids[-1:] != [self._unknown]:
            ids.append(self._unknown)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        skipped = self._special if skip_special else ()
        return self._table.text([index for index in ids if 0 <= index < self.size and index not in skipped])

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return self._table.piece(token_id, first=first) if 0 <= token_id < self.size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        return self._tokens[token_id] if 0 <= token_id < self.size else ""

    def as_library(self) -> tokenizers.Tokenizer:
        """A tokenizer of the `tokenizers` library that encodes as this one does, nearly: see `of_sentencepiece`."""
        from mlxcel.plugins.tokenizers.as_library import of_sentencepiece, surrounded

        before, after = self._strips
        library = of_sentencepiece(self._model, space_once=self._space_once, strips_before=before, strips_after=after)
        return surrounded(library, self._prefix, self._suffix)


def segmenter(model: SentencePieceModel, ids: Mapping[str, int]) -> Callable[[str], list[str]]:
    scores = {piece: model.scores[index] for piece, index in ids.items()}
    if not model.unigram:
        return ScoreBpe(scores, [piece for piece, index in ids.items() if model.kinds[index] == UNUSED])
    defined = {piece for piece, index in ids.items() if model.kinds[index] == USER_DEFINED}
    return Unigram({piece: score for piece, score in scores.items() if piece not in defined}, defined)


def piece_table(model: SentencePieceModel) -> PieceTable:
    """Control tokens are spelled as they are, and unused rows are nothing."""
    pieces = sentencepiece_pieces(model.tokens)
    for index in model.ids_of(CONTROL, UNKNOWN):
        pieces[index] = model.tokens[index].encode()
    for index in model.ids_of(UNUSED):
        pieces[index] = b""
    return dropping_one_space(pieces) if model.space_prefix or model.remove_extra_spaces else PieceTable(pieces, pieces)
