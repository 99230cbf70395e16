"""YaRN: long waves stretched, short ones kept, and cos and sin enlarged. https://arxiv.org/abs/2309.00071"""

from __future__ import annotations

import math

import attrs
import numpy as np

from mlxcel.errors import CheckpointError
from mlxcel.plugins.families.config_keys import ConfigKeys
from mlxcel.plugins.families.rope_scaling import periods


@attrs.frozen
class Yarn:
    """Waves that turn `beta_fast` times and more within the original context are kept, those that turn `beta_slow`
    times and less are divided by `factor`, and those between are mixed. https://arxiv.org/abs/2309.00071, 3.2

    `truncate` widens the range of mixed pairs to whole ones.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def mixed(self, base: float, dim: int) -> tuple[float, float]:
        """(first, last) pair of those that are mixed, clipped to pairs that can be; not whole without `truncate`."""

        def pair(turns: float) -> float:
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(first, 0), min(last, dim - 1)

    def frequencies(self, base: float, dim: int, context: int) -> np.ndarray:
        first, last = self.mixed(base, dim)
        width = (last - first) or 0.001
        pairs = np.arange(dim // 2, dtype=np.float32)
        kept = 1 - np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)
        plain = periods(base, dim)
        frequencies: np.ndarray = 1 / (np.float32(self.factor) * plain) * (1 - kept) + 1 / plain * kept
        return frequencies

    def window(self, max_positions: int) -> int:
        return max(max_positions, int(self.original_context * self.factor))


def yarn_magnitude(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """What cos and sin are multiplied by, the paper's 3.4: 0.1 ln(factor) + 1.

    Models that divide a part of it out again have two numbers above 0, and the magnitude is the quotient of
    0.1 mscale ln(factor) + 1 and the same with mscale_all_dim. With one of them alone neither counts.
    """

    def of(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1)


def check_yarn(yarn: Yarn, base: float, dim: int, keys: ConfigKeys, fast: str, original: str) -> None:
    """CheckpointError where the mixed pairs end before they begin. `fast` and `original` are keys to name."""
    if yarn.beta_fast < yarn.beta_slow:
        raise keys.wrong(fast, f"at least the {yarn.beta_slow:g} turns of the slow waves")
    first, last = yarn.mixed(base, dim)
    if first > last:
        raise CheckpointError(
            f"{original} {yarn.original_context} is nothing that yarn can stretch: with a base of {base:g} the pairs "
            f"to mix begin at {first:g} and end at {last:g} of {dim // 2}"
        )
