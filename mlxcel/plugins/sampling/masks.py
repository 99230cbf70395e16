"""The last of the logit stages: one set of allowed ids a row, made on the host as the masks of all its rules together.

Last, so that nothing lifts a masked id. Ids that are masked for every row, padding of the vocabulary, are not in it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.core.sampling import Carry, HostMask, MaskedRow
from mlxcel.plugins.sampling.bits import unpacked, word_count
from mlxcel.plugins.sampling.processors import prepared_by
from mlxcel.plugins.sampling.stage import RowState

log = logging.getLogger("mlxcel.sampling")


@attrs.frozen(eq=False)
class _Rule:
    """A mask as one row uses it. `name` is None for what comes with the chain."""

    name: str | None
    mask: HostMask
    prepared: Any


@attrs.define(eq=False)
class MaskUse:
    rules: tuple[_Rule, ...]
    failure: str | None = None
    """Why the row is allowed nothing, where a plugin's mask failed."""


class Masks:
    """The intersection of what a row's masks allow (spec S15)."""

    name = "masks"
    foreign = None
    lists: Mapping[str, int] = {}

    def __init__(self, vocab: int, built_in: Sequence[HostMask], named: Mapping[str, HostMask]) -> None:
        self._vocab = vocab
        self._words = word_count(vocab)
        self._built_in = tuple(built_in)
        self._named = dict(named)

    def prepare(self, spec: SequenceSpec) -> MaskUse | None:
        rules = [_Rule(None, mask, mask.prepare({}, spec)) for mask in self._built_in]
        for entry in spec.params.logits_processors:
            if (mask := self._named.get(entry.name)) is not None:
                rules.append(_Rule(entry.name, mask, prepared_by(entry.name, mask, entry.args, spec)))
        used = tuple(rule for rule in rules if rule.prepared is not None)
        return MaskUse(used) if used else None

    def closed(self, prepared: MaskUse) -> bool:
        return all(rule.mask.closed(rule.prepared) for rule in prepared.rules)

    def pack(self, rows: Sequence[RowState], pending: Sequence[bool]) -> dict[str, np.ndarray]:
        words = np.full((len(rows), self._words), 0xFFFFFFFF, np.uint32)
        for place, (row, coming) in enumerate(zip(rows, pending, strict=True)):
            use: MaskUse | None = row.prepared.get(self.name)
            if use is not None:
                self._allow(use, MaskedRow(row.history.output, len(row.history.output) + coming), words[place])
        return {"masks.words": words}

    def apply(self, xp: Any, z: Any, params: Mapping[str, Any], carry: Carry) -> Any:
        return xp.where(unpacked(xp, params["masks.words"], self._vocab), z, xp.float32(-xp.inf))

    def _allow(self, use: MaskUse, row: MaskedRow, words: np.ndarray) -> None:
        """A mask that fails leaves its row nothing, and the others what they have."""
        for rule in use.rules:
            try:
                words &= self._checked(rule.mask.mask(rule.prepared, row))
            except Exception as error:
                log.warning("the logits processor %r failed", rule.name, exc_info=error)
                use.failure = f"the logits processor {rule.name!r} failed: {error!r}"
                words[:] = 0

    def _checked(self, words: np.ndarray) -> np.ndarray:
        if not isinstance(words, np.ndarray) or words.shape != (self._words,) or words.dtype != np.uint32:
            found = f"{words.dtype} {list(words.shape)}" if isinstance(words, np.ndarray) else type(words).__name__
            raise TypeError(f"mask must return uint32 [{self._words}] for {self._vocab} ids, not {found}")
        return words
