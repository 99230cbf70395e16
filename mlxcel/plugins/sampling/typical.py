"""Locally typical sampling: keep what is about as surprising as the row expects. https://arxiv.org/abs/2202.00666"""

from __future__ import annotations

from typing import Any

from mlxcel.plugins.sampling.filters import remove
from mlxcel.plugins.sampling.masses import entropy, masses
from mlxcel.plugins.sampling.threshold import among_best, within_mass


def typical(xp: Any, z: Any, t: Any, keep: Any | None = None, peak: Any | None = None) -> Any:
    """Keep i iff the mass of those strictly nearer to the entropy is < t, d_i = abs(-ln p_i - H) (spec 4.6).

    z float32 [R, V], removed ones -inf; t float32 [R, 1], 0 … 1; keep and peak as in filters.py. The nearest always
    stay.
    """
    row = masses(xp, z, peak)
    surprise = xp.log(row.whole) - row.shifted
    distance = xp.abs(surprise - entropy(xp, row))
    # The image of a distance, which is not negative, is its bits; flipped, the nearest comes first.
    nearness = ~distance.view(xp.uint32)
    stays = within_mass(xp, nearness, row.weight, t * row.whole)
    return remove(xp, z, stays if keep is None else stays | among_best(xp, nearness, keep))
