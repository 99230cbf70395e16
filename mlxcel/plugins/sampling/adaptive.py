"""adaptive-p: favours tokens whose probability is near a target that follows what was drawn before (spec S26)."""

from __future__ import annotations

from typing import Any

from mlxcel.plugins.sampling.masses import masses

WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0


def start(target: float, decay: float) -> tuple[float, float]:
    """The weighted sum s and the weight w of a row that has drawn nothing."""
    return target / (1 - decay), 1 / (1 - decay)


def adaptive_p(xp: Any, z: Any, target: Any, total: Any, weight: Any) -> tuple[Any, Any]:
    """New logits 5 - 10 x^2 / (1 + x), x = abs(p - a') / 0.3, a' = clamp(2a - s/w, 0, 1); and p.

    z float32 [R, V], removed ones -inf and left so; target a, total s, weight w float32 [R, 1]. Returns two float32
    [R, V].
    """
    row = masses(xp, z)
    p = row.weight / row.whole
    aim = xp.clip(2 * target - total / weight, xp.float32(0), xp.float32(1))
    x = xp.abs(p - aim) / xp.float32(WIDTH)
    shaped = xp.float32(PEAK) - xp.float32(SHARPNESS) * x * x / (1 + x)
    return xp.where(z > xp.float32(-xp.inf), shaped, z), p
