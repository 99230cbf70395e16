"""A SentencePiece model as data, from whichever file, checked before anything is built of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from mlxcel.errors import CheckpointError, shown
from mlxcel.plugins.tokenizers.charsmap import CharsMap
from mlxcel.plugins.tokenizers.pieces import SPACE, byte_token
from mlxcel.plugins.tokenizers.token_kinds import BYTE, CONTROL, KINDS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED


@attrs.frozen
class SentencePieceModel:
    """`tokens`, `scores` and `kinds` by id. `unigram` says how text is segmented: by best summed score, or by merges of
    best score. `where` is the file, for messages."""

    where: str
    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    unigram: bool
    space_prefix: bool
    remove_extra_spaces: bool
    charsmap: CharsMap | None

    def __attrs_post_init__(self) -> None:
        """Raises CheckpointError where scores, kinds or spellings do not hold."""
        size = len(self.tokens)
        for name, values in (("scores", self.scores), ("token types", self.kinds)):
            if len(values) != size:
                raise self._fault(f"{size} tokens need as many {name}, found {len(values)}")
        numbers = set(map(type, self.scores)) <= {int, float}
        if not numbers or not all(map(math.isfinite, self.scores)):
            wrong = next(i for i, score in enumerate(self.scores) if not _is_finite(score))
            raise self._fault(f"the score of token {wrong} is {shown(self.scores[wrong])}, a finite number is expected")
        if not set(map(type, self.kinds)) <= {int} or not set(self.kinds) <= set(KINDS):
            wrong = next(i for i, kind in enumerate(self.kinds) if type(kind) is not int or kind not in KINDS)
            raise self._fault(f"the type of token {wrong} is {shown(self.kinds[wrong])}, known are 1 to {BYTE}")
        for index in self.ids_of(BYTE):
            if byte_token(self.tokens[index]) is None:
                raise self._fault(
                    f"token {index} is a byte and is spelled {shown(self.tokens[index])}, not as '<0x0A>'"
                )

    def ids_of(self, *kinds: int) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind in kinds]

    def pieces(self) -> dict[str, int]:
        """What normalised text can be segmented into, with its ids. Raises CheckpointError for two spelled alike.

        Merges may go through unused pieces, which a best path never takes; a best path may take user-defined pieces,
        which merges never touch.
        """
        found: dict[str, int] = {}
        for index in self.ids_of(NORMAL, USER_DEFINED if self.unigram else UNUSED):
            piece = self.as_normalised(index)
            if not piece:  # a row without a spelling
                continue
            if found.setdefault(piece, index) != index:
                raise self._fault(f"token {shown(piece)} occurs twice, as {found[piece]} and {index}")
        return found

    def as_normalised(self, index: int) -> str:
        """A token as it stands in normalised text. GGUF files write the spaces of user-defined ones as spaces."""
        return self.tokens[index].replace(" ", SPACE)

    def control(self) -> dict[str, int]:
        return {self.tokens[index]: index for index in self.ids_of(CONTROL, UNKNOWN)}

    def byte_ids(self) -> Mapping[int, int]:
        """Byte to id, for characters that are no piece."""
        bytes_of = {index: byte_token(self.tokens[index]) for index in self.ids_of(BYTE)}
        return {byte[0]: index for index, byte in bytes_of.items() if byte is not None}

    def _fault(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}", hint="the file is damaged: download or convert it again")


def _is_finite(score: object) -> bool:
    return type(score) in (int, float) and math.isfinite(score)  # type: ignore[arg-type]  # one of the two
