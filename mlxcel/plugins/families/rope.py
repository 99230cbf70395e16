"""Rotary embeddings: how far a position turns each pair of a head's dims. https://arxiv.org/abs/2104.09864

Position p turns pair i by p * frequency_i radians. float32 product and sine, as the models were trained with.
"""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.plugins.families.rope_scaling import Scaling, periods

DEFAULT_BASE = 10000.0
"""rope_theta where a config has none: what the first models used and every reader assumes."""

BASES = (2.0, 1e30)
"""What a base may be: the logarithm of 1 is 0, and float32 holds it stretched."""


@attrs.frozen
class Rope:
    """How positions turn the first `dim` dims of a head, in halves: n = dim / 2 pairs (i, i + n). The rest stays.

    `context` is N, the positions that the engine bounds each row to. longrope and dynamic have two sets of frequencies,
    one for rows within the original context and one for longer ones; N chooses, once, for all rows. By a row's own
    length the cached keys of a row would be turned otherwise than its next query as soon as it grows past the border,
    and its logits would depend on how it was cut. Where N and the row's length are on the same side of the border the
    numbers are those of an implementation that goes by the length; for dynamic, of one that sees the whole length
    original * factor at once.
    """

    dim: int
    base: float = DEFAULT_BASE
    scaling: Scaling | None = None
    magnitude: float = 1.0

    def frequencies(self, context: int) -> np.ndarray:
        """float32 [n], radians a position."""
        if self.scaling is None:
            return 1 / periods(self.base, self.dim)
        return self.scaling.frequencies(self.base, self.dim, context)

    def attention_factor(self, context: int) -> float:
        """What cos and sin are multiplied by: yarn and longrope are trained with scores of q and k turned so, longrope
        in both of its regimes. 1.0 for all others."""
        return self.magnitude

    def window(self, max_positions: int) -> int:
        """Positions the model may be run with, where its config says `max_positions`: never fewer.

        linear, dynamic and yarn reach original * factor where that is more; for longrope and llama3 the config says the
        stretched number.
        """
        return max_positions if self.scaling is None else self.scaling.window(max_positions)
