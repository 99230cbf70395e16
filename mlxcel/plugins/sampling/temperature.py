"""Temperature, fixed or following the row's entropy (spec S24, S25)."""

from __future__ import annotations

from typing import Any

from mlxcel.core.params import GREEDY_TEMPERATURE
from mlxcel.plugins.sampling.filters import remove
from mlxcel.plugins.sampling.masses import entropy, masses


def scale(xp: Any, z: Any, temperature: Any, *, may_be_cold: bool, peak: Any | None = None) -> Any:
    """(z - m) / T, the maximum taken first so that nothing overflows.

    z float32 [R, V], removed ones -inf; temperature float32 [R, 1], and so is peak, the maxima where they are known. A
    step with rows whose T may be below 1e-5 says so: of such a row the first of its maxima alone is left.
    """
    shifted = z - (xp.max(z, axis=-1, keepdims=True) if peak is None else peak)
    if not may_be_cold:
        shifted /= temperature
        return shifted
    cold = temperature < xp.float32(GREEDY_TEMPERATURE)
    first = xp.arange(z.shape[-1]) == xp.argmax(z, axis=-1)[:, None]
    return remove(xp, shifted / xp.where(cold, xp.float32(1), temperature), ~cold | first)


def dynamic(xp: Any, z: Any, middle: Any, spread: Any, exponent: Any) -> Any:
    """T = lo + (hi - lo) (H / ln n)^x with lo = max(0, T0 - spread), hi = T0 + spread: float32 [R, 1].

    H is the entropy of the n survivors of z, float32 [R, V]; n = 1 gives 1, which leaves the row as it is. The others
    float32 [R, 1]. https://arxiv.org/abs/2309.02772
    """
    low, high = xp.maximum(xp.float32(0), middle - spread), middle + spread
    count = xp.sum((z > xp.float32(-xp.inf)).astype(xp.int32), axis=-1, keepdims=True)
    several = count > 1
    most = xp.log(xp.where(several, count, 2).astype(xp.float32))
    part = xp.minimum(entropy(xp, masses(xp, z)) / most, xp.float32(1))
    return xp.where(several, low + (high - low) * xp.power(part, exponent), xp.float32(1))
