"""logit_bias: numbers that are added to the logits of ids. Entries that are false are masks (spec 4.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from mlxcel.core.request import SequenceSpec
from mlxcel.errors import RequestError
from mlxcel.plugins.sampling.pairs import change_at


@attrs.frozen
class LogitBias:
    """A batched processor. Entries for one id have been added up, so that the ids of a row are distinct."""

    vocab: int
    stage: str = "bias"
    history: int = 0

    @property
    def nothing(self) -> Mapping[str, np.ndarray]:
        """What `prepare` would make of no entry."""
        return {"ids": np.zeros(0, np.int32), "amounts": np.zeros(0, np.float32)}

    def prepare(self, args: Mapping[str, Any], spec: SequenceSpec) -> Mapping[str, np.ndarray] | None:
        """RequestError for an id outside the vocabulary, or a text that nobody encoded."""
        for token, _ in spec.params.logit_bias:
            if not isinstance(token, int) or not 0 <= token < self.vocab:
                raise RequestError(
                    f"logit_bias: {token!r} is not in the vocabulary, whose ids are 0 to {self.vocab - 1}",
                    field="logit_bias",
                )
        added = [(token, amount) for token, amount in spec.params.logit_bias if amount is not None]
        if not added:
            return None
        return {
            "ids": np.array([token for token, _ in added], np.int32),
            "amounts": np.array([amount for _, amount in added], np.float32),
        }

    def apply(self, xp: Any, logits: Any, params: Mapping[str, Any], history: Any) -> Any:
        return change_at(xp, logits, params["ids"], lambda old: old + params["amounts"])
